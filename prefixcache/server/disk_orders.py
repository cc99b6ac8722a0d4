"""The planner's orders about records as jobs of the segment log, and their ends as events.

Rules:
1. Orders are done by one thread, in the planner's order, so that a tombstone never overtakes a write; it never holds
   the owner's lock while it waits for the disk. Reads overtake nothing and somebody waits for them, so they are handed
   to the log's readers at once; what that ends at once is told by the thread.
2. Without a directory every order ends at once, as failed.
3. A clear that the disk did not take is kept, and given to it again before anything else is.
Bytes only; which block is where, and what is wanted, the planner knows.
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache.core.ids import KEY_BYTES, SLOT_GRANULE
from prefixcache.server.disk_report import DiskReport
from prefixcache.server.disk_specs import pack_spec
from prefixcache.server.errors import CallError
from prefixcache.server.service import Shell
from prefixcache_offload.disk import ENTRY, Entries, Outcome
from prefixcache_offload.disk.cleaning import Freed
from prefixcache_offload.disk.namespaces import NamespaceRefused
from prefixcache_offload.disk.records import Bytes
from prefixcache_offload.disk.shared import Ended
from prefixcache_offload.disk.tier import DiskTier

log = logging.getLogger(__name__)

_IDLE_S: Final = 0.25
_CLOSE_S: Final = 10.0
_REVOKE_S: Final = 2.0  # longest a clear waits for its tombstone
_MOST_KEPT: Final = 256  # clears that the disk did not take; beyond that everything is cleared
_LOST: Final = (Outcome.MISMATCH, Outcome.TRUNCATED, Outcome.GONE, Outcome.UNKNOWN_CODEC)


class DiskOrders:
    """The thread that carries orders out; `table` goes into the table of `loop.Owner`. `tier`: the open directory, set
    by whoever opens it; `names`: namespace -> what its records call it there."""

    def __init__(self, memory: Bytes, report: DiskReport, beat: Callable[[], None]) -> None:
        self.tier: DiskTier | None = None
        self.names: dict[int, int] = {}
        self.shell: Shell | None = None
        self._memory = memory
        self._report = report
        self._beat = beat
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._revoking = 0  # tombstones ordered and not written yet
        self._revoked_one = threading.Condition()
        self._kept: list[c.RevokeRecords] = []  # clears that the disk did not take
        self._worker = threading.Thread(target=self._run, name="prefixcache-disk", daemon=True)
        self.table: dict[type, Callable[..., None]] = {
            c.WriteRecords: lambda order: self._queue.put(lambda: self._write(order)),
            c.ReadRecords: self._read,
            c.CancelReads: lambda order: self._queue.put(lambda: self._cancel(order)),
            c.FreeSegment: lambda order: self._queue.put(lambda: self._free(order)),
            c.RevokeRecords: self._order_revoke,
        }

    def start(self, shell: Shell) -> None:
        """Begin to work."""
        self.shell = shell
        self._worker.start()

    def stop(self) -> None:
        """Finish what was ordered."""
        self._queue.put(None)
        if self._worker.ident is not None:
            self._worker.join(_CLOSE_S)

    def let_go(self) -> None:
        """Nothing moves any more: a view of the pool would keep it mapped."""
        self._memory = np.zeros(0, np.uint8)

    def pass_all(self) -> bool:
        """Wait until everything that was ordered before now has been begun."""
        passed = threading.Event()
        self._queue.put(passed.set)
        return passed.wait(_CLOSE_S)

    def clear_again(self) -> None:
        """Orders anew, before anything that is ordered from now on, what the disk did not take."""
        with self._revoked_one:
            kept, self._kept = self._kept, []
        for order in kept:
            self._order_revoke(order)

    def wait_revoked(self, timeout_s: float = _REVOKE_S) -> bool:
        """Wait until every clear so far would survive kill -9. False: the disk was not that fast."""
        with self._revoked_one:
            return self._revoked_one.wait_for(lambda: not self._revoking, timeout_s)

    def send(self, event: e.Event) -> None:
        """Tell the planner, while there is one, behind all ends of orders so far."""
        if self.shell is None or self.shell.owner.failure:
            return
        try:
            self.shell.background.call(event)
        except CallError:
            log.error("the planner has failed", extra={"facts": {"event": type(event).__name__}})

    def _post(self, event: e.Event) -> None:
        assert self.shell is not None  # else nothing was ordered
        self.shell.background.post(event)

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
        records, tier = order.records, self.tier
        name = self._registered(records.namespace)
        if tier is None or name is None:
            self._post(_not_written(order.job, len(records.rows)))
            return
        entries = self._entries(records, name)
        at = records.slots.astype(np.int64) * SLOT_GRANULE
        all_told: list[Ended] = []

        def ended(told: Ended) -> None:
            all_told.append(told)
            if not told.left:  # an event a job: nobody waits for the first records, and each event is paid by calls
                self._post(self._written(all_told))

        tier.write(order.job, self._memory, at, entries, ended, order.digests)

    def _written(self, told: list[Ended]) -> e.RecordsWritten:
        entries = np.concatenate([each.entries for each in told])
        segments, pages = entries["segment"].astype(np.uint32), entries["page"].astype(np.uint32)
        index = np.concatenate([each.which for each in told]).astype(np.uint32)
        ends = _write_ends(np.concatenate([each.outcomes for each in told]))
        return e.RecordsWritten(told[0].job, index, ends, segments, pages, self._room_bytes())

    def _read(self, order: c.ReadRecords) -> None:
        records, tier = order.records, self.tier
        name = self.names.get(records.namespace)
        if tier is None or name is None:
            index = np.arange(len(records.rows), dtype=np.uint32)
            failed = e.RecordsRead(order.job, index, np.full(len(index), e.ReadEnd.FAILED, np.uint8))
            self._queue.put(lambda: self._post(failed))
            return
        caller, at_once = threading.get_ident(), True
        at = records.slots.astype(np.int64) * SLOT_GRANULE

        def ended(told: Ended) -> None:
            event = e.RecordsRead(told.job, told.which.astype(np.uint32), _READ_ENDS[told.outcomes])
            if at_once and threading.get_ident() == caller:
                self._queue.put(lambda: self._post(event))  # the planner's other orders are to be done before it
            else:
                self._post(event)
            unknown = told.outcomes.tolist().count(Outcome.UNKNOWN_CODEC)
            if unknown:
                log.warning("a block on disk has an unknown codec", extra={"facts": {"records": unknown}})

        tier.read(order.job, self._memory, at, self._entries(records, name), ended)
        at_once = False

    def _cancel(self, order: c.CancelReads) -> None:
        tier = self.tier
        if tier is not None:
            tier.cancel(order.job)

    def _free(self, order: c.FreeSegment) -> None:
        tier, sizes = self.tier, [len(records.rows) for records in order.keep]
        if tier is None:
            self._post(_not_freed(order.segment, sizes))
            return
        pieces = [self._entries(records, self.names[records.namespace]) for records in order.keep]
        keep = np.concatenate(pieces) if pieces else np.zeros(0, ENTRY)
        cuts: list[int] = np.cumsum(sizes)[:-1].tolist() if pieces else []

        def ended(told: Freed) -> None:
            entries = told.entries
            split = (
                np.split(_write_ends(told.outcomes), cuts),
                np.split(entries["segment"].astype(np.uint32), cuts),
                np.split(entries["page"].astype(np.uint32), cuts),
            )
            kept = tuple(zip(*split, strict=True)) if pieces else ()
            self._post(e.SegmentFreed(order.segment, told.freed, kept, self._room_bytes()))

        tier.free(order.segment, keep, ended)

    def _order_revoke(self, order: c.RevokeRecords) -> None:
        with self._revoked_one:
            self._revoking += 1
        self._queue.put(lambda: self._revoke(order))

    def _revoke(self, order: c.RevokeRecords) -> None:
        tier = self.tier
        name = 0 if order.namespace is None else self.names.get(order.namespace)
        if tier is None:
            self._keep(order)
        elif name is not None:
            keys = np.frombuffer(order.keys or b"", np.uint8).reshape(-1, KEY_BYTES)
            tier.clear(name, keys, lambda told: self._revoked(order, told))
            return
        self._one_revoked()  # nothing of it is on disk, or nobody knows

    def _revoked(self, order: c.RevokeRecords, told: Ended) -> None:
        if told.outcomes[0] != Outcome.OK:
            self._report.tombstones_failed += 1
            self._keep(order)
            log.error("a clear does not survive a restart before the disk works again: its tombstone was not written")
        self._one_revoked()

    def _keep(self, order: c.RevokeRecords) -> None:
        with self._revoked_one:
            self._kept.append(order)
            if len(self._kept) > _MOST_KEPT:
                self._kept = [c.RevokeRecords(None, None)]

    def _one_revoked(self) -> None:
        with self._revoked_one:
            self._revoking -= 1
            self._revoked_one.notify_all()

    def _registered(self, namespace: int) -> int | None:
        """What records call a namespace; its spec is on disk before the first of them."""
        name, tier = self.names.get(namespace), self.tier
        if name is not None or tier is None or self.shell is None:
            return name
        known = self.shell.namespaces.get(namespace)
        if known is None:
            return None
        try:
            name = tier.register(known.fingerprint, pack_spec(known.label, known.spec, known.value_bytes))
        except (NamespaceRefused, OSError) as error:
            log.warning("a namespace cannot be kept on disk", extra={"facts": {"error": error}})
            return None
        self.names[namespace] = name
        return name

    def _entries(self, records: c.Records, name: int) -> Entries:
        assert self.shell is not None
        namespace = self.shell.namespaces[records.namespace]
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
        tier = self.tier
        return tier.free_bytes if tier is not None else 0


def _not_written(job: int, count: int) -> e.RecordsWritten:
    nowhere = np.zeros(count, np.uint32)
    index, ends = np.arange(count, dtype=np.uint32), np.full(count, e.WriteEnd.FAILED, np.uint8)
    return e.RecordsWritten(job, index, ends, nowhere, nowhere, 0)


def _not_freed(segment: int, sizes: list[int]) -> e.SegmentFreed:
    nowhere = [np.zeros(size, np.uint32) for size in sizes]
    kept = tuple((np.full(len(each), e.WriteEnd.FAILED, np.uint8), each, each) for each in nowhere)
    return e.SegmentFreed(segment, False, kept, 0)


_ENDS: Final = np.full(256, e.WriteEnd.FAILED, np.uint8)
_ENDS[Outcome.OK], _ENDS[Outcome.NO_ROOM], _ENDS[Outcome.MISMATCH] = (
    e.WriteEnd.OK,
    e.WriteEnd.NO_ROOM,
    e.WriteEnd.CORRUPT,
)

_READ_ENDS: Final = np.full(256, e.ReadEnd.FAILED, np.uint8)
_READ_ENDS[list(_LOST)], _READ_ENDS[Outcome.OK] = e.ReadEnd.LOST, e.ReadEnd.OK


def _write_ends(outcomes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return _ENDS[outcomes]
