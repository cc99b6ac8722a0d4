"""The disk tier of a running daemon: its data directory is opened, told to the planner, watched, and opened anew where
another one has taken its place.

Rules:
1. A directory that is somebody else's, or of another format, ends the start with its reason. One that cannot be used
   now (read-only, full, gone) turns the tier off with the reason, is tried again, and never stops the service; so does
   whatever takes the directory's place later.
2. What an earlier run left is told while calls are answered already.
3. Of a directory that is gone nothing is believed any more before another one is opened: all its jobs have ended, and
   the planner has forgotten what lay in it.
What is done with records: disk_orders.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache.core.demoting import Demoter
from prefixcache.core.ids import SLOT_GRANULE, NamespaceKind
from prefixcache.core.spec import DiskSpec, SpecError
from prefixcache.server.config import Config, ConfigError
from prefixcache.server.disk_orders import DiskOrders
from prefixcache.server.disk_report import DiskReport
from prefixcache.server.disk_specs import unpack_spec
from prefixcache.server.loop import Owner
from prefixcache.server.service import Shell
from prefixcache_offload.disk import DiskOptions, DiskRefused, Entries, Refusal
from prefixcache_offload.disk.health import HealthReport
from prefixcache_offload.disk.options import DiskCodec
from prefixcache_offload.disk.recovery import Recovered
from prefixcache_offload.disk.tier import DiskTier
from prefixcache_offload.pool import HostPool

log = logging.getLogger(__name__)

_FLUSH_LOOK_S: Final = 0.01
_LOOK_S: Final = 0.25  # whether another directory is in place
_CLOSE_S: Final = 10.0
# Of one DiskRecovered, in records that follow another in one node of the tree: 4 ms of the owner's lock at most.
_TOLD_AT_ONCE: Final = 1024
_ALONE_COSTS: Final = 8  # a record that does not
_SEGMENT: Final = 256 << 20
_LEAST_SEGMENT: Final = 1 << 20
_SEGMENTS: Final = 16  # a small cap is still cut into so many


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
    """The tier, and the thread that opens it and tells what is in it; `table` goes into the table of `loop.Owner`."""

    def __init__(self, config: Config, pool: HostPool, beat: Callable[[], None]) -> None:
        """Open the data directory; nothing is read yet. Raises ConfigError where it can never be used."""
        self.options = disk_options(config)
        self._path = config.disk
        self._early_bytes = config.disk_early_bytes
        self.report = DiskReport()
        self._orders = DiskOrders(pool.data, self.report, beat)
        self.table = self._orders.table
        self.wait_revoked = self._orders.wait_revoked
        self._stopping = threading.Event()
        self.namespaces_known: Callable[[], None] = lambda: None
        """Told before anything that is in a directory that was opened."""
        self._leaving: DiskTier | None = None
        """Whose directory is gone, until all its calls have come back."""
        self._open()
        self._recovery = threading.Thread(target=self._run, name="prefixcache-recovery", daemon=True)

    @property
    def tier(self) -> DiskTier | None:
        """The open directory."""
        return self._orders.tier

    def start(self, shell: Shell) -> None:
        """Begin to work, and to tell what is there."""
        self._orders.start(shell)
        self._recovery.start()

    def stop(self) -> bool:
        """Finish what was ordered and close. False: a call hangs in the kernel; the pool must not be unmapped."""
        self._stopping.set()
        self._orders.stop()
        if self._recovery.ident is not None:
            self._recovery.join(_CLOSE_S)
        closed = [tier.close(_CLOSE_S) for tier in (self._leaving, self.tier) if tier is not None]
        if all(closed):
            self._orders.let_go()
        return all(closed)

    def spec(self) -> DiskSpec:
        """What the planner has to know of it."""
        return DiskSpec(self.options.new_segment_bytes, early_bytes_per_day=self._early_bytes)

    def usable_folder(self) -> Path | None:
        """The data directory, once it is ours."""
        return Path(self._path) if self.tier is not None else None

    def trouble(self) -> str:
        """Why the tier does not work as it should; empty where it does."""
        return self.report.trouble

    # -- opening and what is there -------------------------------------------------------------------------------

    def _open(self) -> None:
        """Raises ConfigError where the directory can never be used."""
        try:
            tier = DiskTier(self._path, self.options, counters=self.report.counted)
        except DiskRefused as refused:
            if str(refused) != self.report.why_off:
                log.warning("the disk tier is off", extra={"facts": {"reason": str(refused)}})
            self.report.off(str(refused))
            if refused.reason is not Refusal.UNUSABLE:
                raise ConfigError(f"disk: {refused}") from refused
            return
        self._orders.tier = tier
        self.report.on(tier)
        tier.watch(self._health_changed)

    def _run(self) -> None:
        """The recovery thread: opens the directory if that failed, tells what is in it, and does so anew whenever
        another one has taken its place."""
        if self.tier is None:
            self._orders.send(e.DiskChanged(reads_on=False, writes_on=False, reason=self.report.why_off))
        while self._opened():
            tier = self.tier
            assert tier is not None
            self._tell_all(tier)
            while not tier.replaced:
                if self._stopping.wait(_LOOK_S):
                    return
            if not self._leave(tier):
                return

    def _opened(self) -> bool:
        """Tries until it works. False: the daemon stops."""
        while self.tier is None:
            if self._stopping.wait(self.options.retry_s):
                return False
            try:
                self._open()
            except ConfigError:
                continue  # it was fine when the daemon started, so it may be once more; the report says why not
        return True

    def _tell_all(self, tier: DiskTier) -> None:
        shell = self._orders.shell
        assert shell is not None
        clock, began = shell.owner.clock, shell.owner.clock()
        self.report.recovery_s = 0.0
        self.report.recovery_began_s = began - shell.started_at
        self._open_namespaces(shell, tier)
        self._orders.clear_again()
        self._orders.pass_all()  # then nothing that was cleared is told
        self.namespaces_known()
        self.report.probed_bytes_per_s = tier.probe_read()
        self._orders.send(e.DiskMeasured(self.report.probed_bytes_per_s))
        self._orders.send(e.DiskChanged(reads_on=True, writes_on=True))
        for told in tier.recovery:
            if self._stopping.is_set():
                return
            self._tell(told)
        self.report.recovery = counters = tier.recovery.counters
        if counters.unknown_codec:
            log.warning(
                "blocks on disk are in a form that this version cannot read; they stay until their room is needed",
                extra={"facts": {"records": counters.unknown_codec}},
            )
        self._orders.send(e.RecoveryDone(not counters.unreadable, tier.free_bytes))
        self.report.recovery_s = max(clock() - began, 1e-6)
        log.info("the disk was read", extra={"facts": {"records": counters.records}})

    def _open_namespaces(self, shell: Shell, tier: DiskTier) -> None:
        """Namespaces of earlier runs, so that their blocks are found by whoever opens them again."""
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
                    self._orders.names[reply.namespace] = name

    def _tell(self, told: Recovered) -> None:
        untold = set(told.segments)
        shell = self._orders.shell
        assert shell is not None
        numbers = {name: number for number, name in list(self._orders.names.items())}  # others may add to them
        names = told.entries["namespace"]
        alone = len(names) > 0 and bool((names == names[0]).all())
        for name in [int(names[0])] if alone else np.unique(names).tolist():
            number = numbers.get(name)
            if number is None:
                continue
            mine = told.entries if alone else told.entries[names == name]
            spec = shell.namespaces[number].spec
            joined = len(spec.parts) == 1 and spec.kind is not NamespaceKind.FOREIGN
            for some in _in_pieces(mine, joined=joined):
                keys, parents = some["key"].tobytes(), some["parent"].tobytes()
                parts, depths = some["part"].astype(np.uint16), some["depth"].astype(np.uint32)
                segments, pages = some["segment"].astype(np.uint32), some["page"].astype(np.uint32)
                self._orders.send(e.DiskRecovered(number, parts, segments, pages, keys, parents, depths))
                untold.difference_update(segments.tolist())
        if untold:
            self._orders.send(_empty(tuple(untold)))

    # -- while it runs -------------------------------------------------------------------------------------------

    def _health_changed(self, health: HealthReport) -> None:
        reason = str(health.reads_off or health.writes_off or "")
        if health.writes_off is None:
            self._orders.clear_again()
        self._orders.send(e.DiskChanged(health.reads_off is None, health.writes_off is None, reason))
        log.warning("the disk tier changed", extra={"facts": {"trouble": reason or "none"}})

    def _leave(self, tier: DiskTier) -> bool:
        """Another directory is where this one was: ends and forgets all that was in it. False: the daemon stops."""
        log.warning("the data directory was replaced by another one", extra={"facts": {"path": self._path}})
        self._orders.send(e.DiskChanged(reads_on=False, writes_on=False, reason="directory_gone"))
        self._leaving, self._orders.tier = tier, None
        self.report.gone()
        self._orders.pass_all()
        while not tier.close(_CLOSE_S, drain=False):  # a call hangs, and whatever it was to bring may still come
            if self._stopping.wait(self.options.retry_s):
                return False
        self._leaving = None
        for segment in tier.segments():
            self._orders.send(e.SegmentLost(segment.number))
        self._orders.send(e.DiskForgotten())
        self._orders.names.clear()
        return not self._stopping.is_set()


def flush(owner: Owner, demoter: Demoter, timeout_s: float, hurry: threading.Event) -> tuple[int, int]:
    """Write what only memory holds, as far as time and the disk allow. Answers blocks (written, left): what is left is
    leased, not verified yet, or was not taken by the disk in time."""
    if owner.failure or timeout_s <= 0:
        return 0, 0
    with owner.lock:
        before = demoter.state.stats.blocks_demoted
    owner.call(e.FlushStarted())
    until = owner.clock() + timeout_s
    while True:
        with owner.lock:
            if not demoter.is_flushing or owner.clock() >= until or hurry.is_set():
                spaces = demoter.state.namespaces.values()
                left = sum(space.table.unwritten_count for space in spaces if space.on_disk)
                return demoter.state.stats.blocks_demoted - before, left
        hurry.wait(_FLUSH_LOOK_S)


def _in_pieces(entries: Entries, *, joined: bool) -> list[Entries]:
    """For one DiskRecovered each: as many as cost so much. joined: what follows each other becomes one node, a record
    a block."""
    costs = np.full(len(entries), _ALONE_COSTS)
    if joined:  # newest first: what follows a block stands before it
        costs[:-1][(entries["parent"][:-1] == entries["key"][1:]).all(axis=1)] = 1
    spent = np.cumsum(costs)
    return np.split(entries, np.flatnonzero(np.diff(spent // _TOLD_AT_ONCE)) + 1)


def _empty(segments: tuple[int, ...]) -> e.DiskRecovered:
    """Segments in which is nothing that anybody knows take room all the same, so the planner has to know them."""
    nothing = np.zeros(0, np.uint32)
    return e.DiskRecovered(0, nothing.astype(np.uint16), nothing, nothing, b"", b"", nothing, empty=segments)
