"""The disk tier of a running daemon: the planner's orders about records become jobs of the segment log, and their ends
events. Bytes only; which block is where, and what is wanted, the planner knows.

Rules:
1. Orders are done by one thread, in the planner's order, so that a tombstone never overtakes a write; it never holds
   the owner's lock while it waits for the disk.
2. A directory that is somebody else's, or of another format, ends the start with its reason. One that cannot be used
   now (read-only, full, gone) turns the tier off with the reason, is tried again, and never stops the service.
3. What an earlier run left is told while calls are answered already.
"""

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache.core.demoting import Demoter
from prefixcache.core.ids import KEY_BYTES, SLOT_GRANULE
from prefixcache.core.spec import DiskSpec, SpecError
from prefixcache.server.config import Config, ConfigError
from prefixcache.server.disk_report import DiskReport
from prefixcache.server.disk_specs import pack_spec, unpack_spec
from prefixcache.server.errors import CallError
from prefixcache.server.loop import Owner
from prefixcache.server.service import Shell
from prefixcache_offload.disk import ENTRY, DiskOptions, DiskRefused, Entries, Outcome, Refusal
from prefixcache_offload.disk.cleaning import Freed
from prefixcache_offload.disk.health import HealthReport
from prefixcache_offload.disk.namespaces import NamespaceRefused
from prefixcache_offload.disk.options import DiskCodec
from prefixcache_offload.disk.recovery import Recovered
from prefixcache_offload.disk.shared import Ended
from prefixcache_offload.disk.tier import DiskTier
from prefixcache_offload.pool import HostPool

log = logging.getLogger(__name__)

_IDLE_S: Final = 0.25
_FLUSH_LOOK_S: Final = 0.01
_RETRY_S: Final = 5.0
_CLOSE_S: Final = 10.0
_REVOKE_S: Final = 2.0  # longest a clear waits for its tombstone
_TOLD_AT_ONCE: Final = 128  # records in one DiskRecovered: 4 ms of the owner's lock at most
_SEGMENT: Final = 256 << 20
_LEAST_SEGMENT: Final = 1 << 20
_SEGMENTS: Final = 16  # a small cap is still cut into so many
_LOST: Final = (Outcome.MISMATCH, Outcome.TRUNCATED, Outcome.GONE, Outcome.UNKNOWN_CODEC)


def disk_options(config: Config) -> DiskOptions:
    """Sizes of the log. Raises ConfigError."""
    size = config.disk_segment_bytes
    if not size:
        share = config.disk_bytes // _SEGMENTS // SLOT_GRANULE * SLOT_GRANULE
        size = min(max(share, min(_LEAST_SEGMENT, config.disk_bytes)), _SEGMENT)
    try:
        return DiskOptions(
            config.disk_bytes,
            size,
            stall_s=config.disk_stall,
            retry_s=config.disk_retry,
            codec=DiskCodec(config.disk_codec),
        )
    except DiskRefused as refused:
        raise ConfigError(f"disk_bytes: {refused}") from refused


class DiskStore:
    """The tier and the thread that gives it orders; `orders` goes into the table of `loop.Owner`."""

    def __init__(self, config: Config, pool: HostPool, beat: Callable[[], None]) -> None:
        """Open the data directory; nothing is read yet. Raises ConfigError where it can never be used."""
        self.options = disk_options(config)
        self._path = config.disk
        self._early_bytes = config.disk_early_bytes
        self._memory = pool.data
        self._beat = beat
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._names: dict[int, int] = {}  # namespace -> what its records call it
        self._stopping = threading.Event()
        self._revoking = 0  # tombstones ordered and not written yet
        self._revoked_one = threading.Condition()
        self._shell: Shell | None = None
        self._post: Callable[[e.Event], None] = lambda _: None  # the end of an order; nothing is ordered before `start`
        self.namespaces_known: Callable[[], None] = lambda: None  # told before anything that is there
        self.tier: DiskTier | None = None
        self.report = DiskReport()
        self._open()
        self._worker = threading.Thread(target=self._run, name="prefixcache-disk", daemon=True)
        self._recovery = threading.Thread(target=self._recover, name="prefixcache-recovery", daemon=True)
        self.orders: dict[type, Callable[..., None]] = {
            c.WriteRecords: lambda order: self._queue.put(lambda: self._write(order)),
            c.ReadRecords: lambda order: self._queue.put(lambda: self._read(order)),
            c.CancelReads: lambda order: self._queue.put(lambda: self._cancel(order)),
            c.FreeSegment: lambda order: self._queue.put(lambda: self._free(order)),
            c.RevokeRecords: self._order_revoke,
        }

    def start(self, shell: Shell) -> None:
        """Begin to work, and to tell what is there."""
        self._shell, self._post = shell, shell.background.post
        self._worker.start()
        self._recovery.start()

    def stop(self) -> bool:
        """Finish what was ordered and close. False: a call hangs in the kernel; the pool must not be unmapped."""
        self._stopping.set()
        self._queue.put(None)
        for thread in (self._worker, self._recovery):
            if thread.ident is not None:
                thread.join(_CLOSE_S)
        return self.tier.close(_CLOSE_S) if self.tier is not None else True

    def spec(self) -> DiskSpec:
        """What the planner has to know of it."""
        return DiskSpec(self.options.new_segment_bytes, early_bytes_per_day=self._early_bytes)

    def usable_folder(self) -> Path | None:
        """The data directory, once it is ours."""
        return Path(self._path) if self.tier is not None else None

    def wait_revoked(self, timeout_s: float = _REVOKE_S) -> bool:
        """Wait until every clear so far would survive kill -9. False: the disk was not that fast."""
        with self._revoked_one:
            return self._revoked_one.wait_for(lambda: not self._revoking, timeout_s)

    def trouble(self) -> str:
        """Why the tier does not work as it should; empty where it does."""
        return self.report.trouble

    # -- opening and what is there -------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self.tier = DiskTier(self._path, self.options)
        except DiskRefused as refused:
            if refused.reason is not Refusal.UNUSABLE:
                raise ConfigError(f"disk: {refused}") from refused
            self.report.off(str(refused))
            log.warning("the disk tier is off", extra={"facts": {"reason": str(refused)}})
            return
        self.report.on(self.tier)
        self.tier.watch(self._health_changed)

    def _recover(self) -> None:
        """The recovery thread: opens the directory if that failed, then tells what is in it."""
        while self.tier is None:
            if self._stopping.wait(_RETRY_S):
                return
            try:
                self._open()
            except ConfigError as error:
                self.report.off(str(error))
                return
        assert self._shell is not None
        clock, began = self._shell.owner.clock, self._shell.owner.clock()
        self.report.recovery_began_s = began - self._shell.started_at
        self._open_namespaces(self.tier)
        self.namespaces_known()
        self._send(e.DiskChanged(reads_on=True, writes_on=True))
        for told in self.tier.recovery:
            if self._stopping.is_set():
                return
            self._tell(told)
        self.report.recovery = counters = self.tier.recovery.counters
        if counters.unknown_codec:
            log.warning(
                "blocks on disk are in a form that this version cannot read; they stay until their room is needed",
                extra={"facts": {"records": counters.unknown_codec}},
            )
        self._send(e.RecoveryDone(complete=not counters.unreadable))
        self.report.recovery_s = max(clock() - began, 1e-6)
        log.info("the disk was read", extra={"facts": {"records": counters.records}})

    def _open_namespaces(self, tier: DiskTier) -> None:
        """Namespaces of earlier runs, so that their blocks are found by whoever opens them again."""
        shell = self._shell
        assert shell is not None
        for name, (fingerprint, packed) in tier.namespaces().items():
            try:
                label, spec, value_bytes = unpack_spec(packed)
            except (msgspec.DecodeError, SpecError, ValueError, KeyError, TypeError) as error:
                log.warning("a namespace on disk cannot be read", extra={"facts": {"error": error}})
                continue
            with shell.owner.lock:
                if shell.owner.failure:
                    return
                reply = shell.owner.call(e.NamespaceOpened(shell.next_namespace, fingerprint, spec))
                if isinstance(reply, c.NamespaceReady):
                    shell.add_namespace(reply.namespace, fingerprint, spec, label, value_bytes)
                    self._names[reply.namespace] = name

    def _tell(self, told: Recovered) -> None:
        numbers = {name: number for number, name in self._names.items()}
        for name in np.unique(told.entries["namespace"]).tolist():
            number = numbers.get(name)
            if number is None:
                continue
            mine = told.entries[told.entries["namespace"] == name]
            for first in range(0, len(mine), _TOLD_AT_ONCE):
                some = mine[first : first + _TOLD_AT_ONCE]
                keys, parents = some["key"].tobytes(), some["parent"].tobytes()
                parts, depths = some["part"].astype(np.uint16), some["depth"].astype(np.uint32)
                pages = some["page"].astype(np.uint32)
                self._send(e.DiskRecovered(told.segment, number, parts, pages, keys, parents, depths))
        if not len(told.entries):
            self._send(_empty(told.segment))

    def _health_changed(self, health: HealthReport) -> None:
        reason = str(health.reads_off or health.writes_off or "")
        self._send(e.DiskChanged(health.reads_off is None, health.writes_off is None, reason))
        log.warning("the disk tier changed", extra={"facts": {"trouble": reason or "none"}})

    # -- orders --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                work = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                self._beat()
                continue
            if work is None:
                return
            work()
            self._beat()

    def _write(self, order: c.WriteRecords) -> None:
        records = order.records
        name = self._registered(records.namespace)
        if self.tier is None or name is None:
            self._post(self._not_written(order.job, len(records.rows)))
            return
        entries = self._entries(records, name)
        at = records.slots.astype(np.int64) * SLOT_GRANULE

        def ended(told: Ended) -> None:
            entries = told.entries
            places = entries["segment"].astype(np.uint32), entries["page"].astype(np.uint32)
            index, ends = told.which.astype(np.uint32), _write_ends(told.outcomes)
            self._post(e.RecordsWritten(told.job, index, ends, *places, self._room_bytes()))

        self.tier.write(order.job, self._memory, at, entries, ended, order.digests)

    def _read(self, order: c.ReadRecords) -> None:
        records = order.records
        name = self._names.get(records.namespace)
        if self.tier is None or name is None:
            nothing = np.full(len(records.rows), e.ReadEnd.FAILED, np.uint8)
            self._post(e.RecordsRead(order.job, np.arange(len(nothing), dtype=np.uint32), nothing))
            return
        at = records.slots.astype(np.int64) * SLOT_GRANULE

        def ended(told: Ended) -> None:
            lost = np.isin(told.outcomes, _LOST)
            unknown = int((told.outcomes == Outcome.UNKNOWN_CODEC).sum())
            if unknown:
                log.warning("a block on disk has an unknown codec", extra={"facts": {"records": unknown}})
            ends = np.where(told.outcomes == Outcome.OK, e.ReadEnd.OK, np.where(lost, e.ReadEnd.LOST, e.ReadEnd.FAILED))
            self._post(e.RecordsRead(told.job, told.which.astype(np.uint32), ends.astype(np.uint8)))

        self.tier.read(order.job, self._memory, at, self._entries(records, name), ended)

    def _cancel(self, order: c.CancelReads) -> None:
        if self.tier is not None:
            self.tier.cancel(order.job)

    def _free(self, order: c.FreeSegment) -> None:
        pieces = [self._entries(records, self._names[records.namespace]) for records in order.keep]
        keep = np.concatenate(pieces) if pieces else np.zeros(0, ENTRY)
        cuts: list[int] = np.cumsum([len(piece) for piece in pieces])[:-1].tolist() if pieces else []

        def ended(told: Freed) -> None:
            entries = told.entries
            split = (
                np.split(_write_ends(told.outcomes), cuts),
                np.split(entries["segment"].astype(np.uint32), cuts),
                np.split(entries["page"].astype(np.uint32), cuts),
            )
            kept = tuple(zip(*split, strict=True)) if pieces else ()
            self._post(e.SegmentFreed(order.segment, told.freed, kept, self._room_bytes()))

        assert self.tier is not None  # nothing was written without it
        self.tier.free(order.segment, keep, ended)

    def _order_revoke(self, order: c.RevokeRecords) -> None:
        with self._revoked_one:
            self._revoking += 1
        self._queue.put(lambda: self._revoke(order))

    def _revoke(self, order: c.RevokeRecords) -> None:
        name = 0 if order.namespace is None else self._names.get(order.namespace)
        if self.tier is None or name is None:  # nothing of it is on disk
            self._one_revoked()
            return
        keys = np.frombuffer(order.keys or b"", np.uint8).reshape(-1, KEY_BYTES)
        self.tier.clear(name, keys, self._revoked)

    def _revoked(self, told: Ended) -> None:
        if told.outcomes[0] != Outcome.OK:
            self.report.tombstones_failed += 1
            log.error("a clear may not survive a restart: its tombstone could not be written")
        self._one_revoked()

    def _one_revoked(self) -> None:
        with self._revoked_one:
            self._revoking -= 1
            self._revoked_one.notify_all()

    def _registered(self, namespace: int) -> int | None:
        """What records call a namespace; its spec is on disk before the first of them."""
        name = self._names.get(namespace)
        if name is not None or self.tier is None or self._shell is None:
            return name
        known = self._shell.namespaces.get(namespace)
        if known is None:
            return None
        try:
            name = self.tier.register(known.fingerprint, pack_spec(known.label, known.spec, known.value_bytes))
        except (NamespaceRefused, OSError) as error:
            log.warning("a namespace cannot be kept on disk", extra={"facts": {"error": error}})
            return None
        self._names[namespace] = name
        return name

    def _entries(self, records: c.Records, name: int) -> Entries:
        assert self._shell is not None
        namespace = self._shell.namespaces[records.namespace]
        spec, value_bytes = namespace.spec, namespace.value_bytes or (0,) * len(namespace.spec.groups)
        entries = np.zeros(len(records.rows), ENTRY)
        entries["namespace"] = name
        entries["key"] = np.frombuffer(records.keys, np.uint8).reshape(-1, KEY_BYTES)
        entries["parent"] = np.frombuffer(records.parents, np.uint8).reshape(-1, KEY_BYTES)
        entries["length"] = np.array([part.size_bytes for part in spec.parts], np.uint32)[records.parts]
        entries["group"] = np.array([part.group for part in spec.parts], np.uint8)[records.parts]
        entries["value_bytes"] = np.array([value_bytes[part.group] for part in spec.parts], np.uint8)[records.parts]
        entries["depth"], entries["part"] = records.depths, records.parts
        entries["segment"], entries["page"] = records.segments, records.pages
        return entries

    def _room_bytes(self) -> int:
        return self.tier.free_bytes if self.tier is not None else 0

    @staticmethod
    def _not_written(job: int, count: int) -> e.RecordsWritten:
        nowhere = np.zeros(count, np.uint32)
        index, ends = np.arange(count, dtype=np.uint32), np.full(count, e.WriteEnd.FAILED, np.uint8)
        return e.RecordsWritten(job, index, ends, nowhere, nowhere, 0)

    def _send(self, event: e.Event) -> None:
        shell = self._shell
        if shell is None or shell.owner.failure:
            return
        try:
            shell.owner.call(event)
        except CallError:
            log.error("the planner has failed", extra={"facts": {"event": type(event).__name__}})


def flush(owner: Owner, demoter: Demoter, timeout_s: float, hurry: threading.Event) -> int:
    """Write what only memory holds, as far as time and the disk allow. Answers blocks."""
    if owner.failure or timeout_s <= 0:
        return 0
    with owner.lock:
        before = demoter.state.stats.blocks_demoted
    owner.call(e.FlushStarted())
    until = owner.clock() + timeout_s
    while True:
        with owner.lock:
            written = demoter.state.stats.blocks_demoted - before
            if not demoter.jobs or owner.clock() >= until or hurry.is_set():
                return written
        hurry.wait(_FLUSH_LOOK_S)


_ENDS: Final = np.full(256, e.WriteEnd.FAILED, np.uint8)
_ENDS[Outcome.OK], _ENDS[Outcome.NO_ROOM], _ENDS[Outcome.MISMATCH] = (
    e.WriteEnd.OK,
    e.WriteEnd.NO_ROOM,
    e.WriteEnd.CORRUPT,
)


def _write_ends(outcomes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return _ENDS[outcomes]


def _empty(segment: int) -> e.DiskRecovered:
    """A segment with nothing in it takes room all the same, so the planner has to know it."""
    nothing = np.zeros(0, np.uint32)
    return e.DiskRecovered(segment, 0, nothing.astype(np.uint16), nothing, b"", b"", nothing)
