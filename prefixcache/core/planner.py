"""The one door into the core: `handle(event, now) -> commands`.

Belongs here: wiring and dispatch. Must not know: how any one event is decided (the modules by concern do).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefixcache.core import events
from prefixcache.core import pin_messages as m
from prefixcache.core.acquiring import Acquiring
from prefixcache.core.checks import Checks
from prefixcache.core.chores import Chores
from prefixcache.core.clearing import Clearing
from prefixcache.core.commands import Command
from prefixcache.core.demoting import Demoter
from prefixcache.core.disk import UNKNOWN_ROOM
from prefixcache.core.events import WriteEnd
from prefixcache.core.eviction import Evictor
from prefixcache.core.filling import Filling
from prefixcache.core.foreign import ForeignGranting
from prefixcache.core.foreign_loading import ForeignLoader
from prefixcache.core.freeing import Freer
from prefixcache.core.granting import Granting
from prefixcache.core.landing import Lander
from prefixcache.core.leases import Lease
from prefixcache.core.loading import Loader
from prefixcache.core.pinning import Pinning
from prefixcache.core.pins import Term
from prefixcache.core.prefetching import Prefetcher
from prefixcache.core.promoting import Promoter
from prefixcache.core.reasons import Kind, Miss, Refusal
from prefixcache.core.recovering import Recoverer
from prefixcache.core.removal import Remover
from prefixcache.core.reservations import Reservation
from prefixcache.core.room import RoomMaker
from prefixcache.core.sessions import Sessions
from prefixcache.core.slabs import SlabMover
from prefixcache.core.snapshot import Snapshots
from prefixcache.core.spec import DiskSpec, PlannerConfig
from prefixcache.core.state import State
from prefixcache.core.transfers import Transfers

Handler = Callable[[Any, float, list[Command]], None]


class Planner:
    """All state of one daemon. Not thread-safe: one owner calls it. Never raises on what a client can send."""

    def __init__(self, config: PlannerConfig) -> None:
        self.config = config
        self.state = State(config)
        state = self.state
        self.mover = SlabMover(state)
        self.remover = Remover(state, self.mover)
        evictor = Evictor(state, self.remover)
        self.transfers = Transfers(state, evictor, self.mover)
        room = RoomMaker(state, self.remover, evictor, self.transfers)
        self.clearing = Clearing(state, self.remover)
        self.checks = Checks(state, self.clearing)
        self.acquiring = Acquiring(state, self.remover, self.mover, self.checks)
        self.granting = Granting(state, self.remover, room)
        self.foreign = ForeignGranting(state, self.granting, room)
        self.filling = Filling(state, self.remover)
        self.sessions = Sessions(state, self.acquiring, self.filling)
        self.snapshots = Snapshots(state, self.sessions, self.remover)
        self.pinning = self.clearing.pinning = Pinning(state, self.remover)
        self.prefetcher = Prefetcher(state, self.acquiring.touch)
        self.demoter: Demoter | None = None
        self.loader: Loader | None = None
        self.lander: Lander | None = None
        self.freer: Freer | None = None
        self.chores: Chores | None = None
        self.recoverer: Recoverer | None = None
        self.promoter: Promoter | None = None
        if state.gpus:
            self.promoter = self.acquiring.promoter = Promoter(state, self.remover, config.gpu)
        if config.disk is not None:
            self._add_disk(config.disk, room)
        self._handlers = self._wire()

    def _add_disk(self, spec: DiskSpec, room: RoomMaker) -> None:
        self.demoter = self.acquiring.demoter = Demoter(self.state, self.remover, spec)
        self.loader = self.acquiring.loader = Loader(self.state, self.remover, room, spec)
        self.acquiring.foreign.loader = ForeignLoader(self.state, self.remover, self.loader)
        self.prefetcher.foreign_loader = self.acquiring.foreign.loader
        self.lander = Lander(self.state, self.remover, self.loader)
        self.prefetcher.loader, self.pinning.prefetcher = self.loader, self.prefetcher
        self.pinning.demoter = self.demoter
        self.freer = Freer(self.state, self.remover, spec)
        self.chores = Chores(self.demoter, self.freer)
        self.recoverer = self.clearing.recoverer = Recoverer(self.state, self.remover)

    def handle(self, event: events.Event, now: float) -> list[Command]:
        """What is to be done about `event` at time `now` (seconds, monotonic, never going back), in this order.

        At most one command is the reply to the event's sender (see `commands.Reply`); it may come in a later call
        only where the event's docstring says so. Others may concern anybody (leases that ended, slabs that move).
        """
        out: list[Command] = []
        state = self.state
        state.tick += 1
        clock = state.clock
        clock.now, clock.tick = now, state.tick
        if state.deadlines.next_due <= now:
            self._end_due(now, out)
        handler = self._handlers.get(type(event))
        if handler is None:
            text = f"no such event: {type(event).__name__}"
            state.refuse(out, Kind.INVALID_ARGUMENT, Refusal.EVENT_UNKNOWN, text)
        else:
            handler(event, now, out)
            if state.appeared:
                self.pinning.settle()
        if state.news:
            out[:0] = state.news
            state.news.clear()
        if self.chores is not None:
            self.chores.tell(out)
        return out

    def _end_due(self, now: float, out: list[Command]) -> None:
        while (thing := self.state.deadlines.pop_due(now)) is not None:
            if isinstance(thing, Lease):
                self.acquiring.end_unreleased(thing, Miss.LEASE_EXPIRED, out)
            elif isinstance(thing, Reservation):
                self.filling.run_out(thing, out, expired=True)
            elif isinstance(thing, Term):
                self.pinning.run_out(thing, out)

    def _wire(self) -> dict[type, Handler]:
        sessions, acquiring, filling, clearing = self.sessions, self.acquiring, self.filling, self.clearing
        return self._wire_disk() | self._wire_gpu() | {
            events.AcquireRequested: acquiring.acquire,
            events.LeaseReleased: lambda event, now, out: acquiring.release(event, out),
            events.LeaseRenewed: acquiring.renew,
            events.LookupRequested: lambda event, now, out: acquiring.lookup(event, out),
            events.ReserveRequested: self._reserve,
            events.CommitRequested: lambda event, now, out: filling.commit(event, out),
            events.AbortRequested: lambda event, now, out: filling.abort(event, out),
            events.SessionOpened: lambda event, now, out: sessions.open(event, out),
            events.SessionEnded: lambda event, now, out: sessions.end(event, out),
            events.ProcessExited: lambda event, now, out: sessions.exit(event, out),
            events.NamespaceOpened: lambda event, now, out: sessions.open_namespace(event, out),
            events.ClearRequested: lambda event, now, out: clearing.clear(event, out),
            m.PinRequested: self.pinning.pin,
            m.UnpinRequested: lambda event, now, out: self.pinning.unpin(event, out),
            m.PrefetchRequested: self.prefetcher.request,
            events.PartFailedVerification: lambda event, now, out: clearing.part_failed(event, out),
            events.CopyDone: lambda event, now, out: self._copy_done(event, out),
            events.ChecksumDone: lambda event, now, out: self._checksum_done(event),
            events.VerifyDone: lambda event, now, out: self.checks.done(event, now, out, acquiring.acquire),
            events.SnapshotRequested: lambda event, now, out: self.snapshots.take(out),
            events.SnapshotRestored: lambda event, now, out: self.snapshots.restore(event, out),
            events.CapacityReady: lambda event, now, out: self._capacity_ready(event, out),
            events.DrainStarted: lambda event, now, out: self._drain(out),
            events.TimePassed: self._time_passed,
        }  # fmt: skip

    def _wire_disk(self) -> dict[type, Handler]:
        demoter, loader, freer, recoverer = self.demoter, self.loader, self.freer, self.recoverer
        lander, chores = self.lander, self.chores
        if demoter is None or loader is None or lander is None or freer is None or recoverer is None or chores is None:
            return {}
        return {
            events.ArrivalsCancelled: lambda event, now, out: loader.give_up(event, out),
            events.RecordsWritten: lambda event, now, out: self._records_written(event, out),
            events.RecordsRead: lambda event, now, out: lander.done(event, now, out),
            events.SegmentFreed: lambda event, now, out: freer.done(event, out),
            events.DiskRecovered: lambda event, now, out: recoverer.found(event),
            events.RecoveryDone: lambda event, now, out: recoverer.finish(event, out),
            events.SegmentLost: lambda event, now, out: freer.lost(event),
            events.DiskForgotten: lambda event, now, out: self._disk_forgotten(),
            events.DiskMeasured: lambda event, now, out: loader.meter.believe(event.read_bytes_per_s),
            events.DiskChanged: lambda event, now, out: self._disk_changed(event, out),
            events.FlushStarted: lambda event, now, out: self._flush_started(),
            events.WorkResumed: lambda event, now, out: chores.resume(now, out),
        }

    def _wire_gpu(self) -> dict[type, Handler]:
        promoter = self.promoter
        if promoter is None:
            return {}
        return {
            events.PromotionDone: lambda event, now, out: promoter.done(event, out),
            events.DeviceLost: lambda event, now, out: promoter.lost(event, out),
        }

    def _records_written(self, event: events.RecordsWritten, out: list[Command]) -> None:
        assert self.demoter is not None
        assert self.freer is not None
        assert self.chores is not None
        self.demoter.done(event, out)
        self.freer.note_written()
        if (event.ends == WriteEnd.OK).all():
            self.chores.note()
        else:
            self.chores.note_failed()

    def _flush_started(self) -> None:
        assert self.demoter is not None
        assert self.chores is not None
        self.demoter.flush()
        self.chores.note()

    def _disk_forgotten(self) -> None:
        assert self.freer is not None
        assert self.recoverer is not None
        self.freer.lose_all()
        self.recoverer.begin_anew()
        self.state.disk.room_bytes = UNKNOWN_ROOM

    def _disk_changed(self, event: events.DiskChanged, out: list[Command]) -> None:
        disk = self.state.disk
        disk.reads_on, disk.writes_on, disk.reason = event.reads_on, event.writes_on, event.reason
        if event.writes_on and self.demoter is not None:
            self.demoter.note_new_reason()
        if not event.reads_on and self.loader is not None:
            self.loader.turn_off(out)
        if self.demoter is not None and self.chores is not None:
            self.demoter.note_working()
            self.chores.note()

    def _time_passed(self, event: events.TimePassed, now: float, out: list[Command]) -> None:
        if self.demoter is not None and self.chores is not None and self.loader is not None:
            self.chores.note()
            self.pinning.tend(now, out)
            if not self.loader.loads:
                self.demoter.write_early(now, out)

    def _reserve(self, event: events.ReserveRequested, now: float, out: list[Command]) -> None:
        space = self.state.namespaces.get(event.namespace)
        if space is not None and space.foreign is not None:
            self.foreign.reserve(event, now, out)
        else:
            self.granting.reserve(event, now, out)
        if self.chores is not None:
            self.chores.note()

    def _copy_done(self, event: events.CopyDone, out: list[Command]) -> None:
        if event.copy in self.mover.moves:
            self.mover.finish(event.copy, out, ok=event.ok)
        else:
            text = f"no copy {event.copy} is under way"
            self.state.refuse(out, Kind.NOT_FOUND, Refusal.COPY_UNKNOWN, text)

    def _checksum_done(self, event: events.ChecksumDone) -> None:
        space = self.state.namespaces.get(event.namespace)
        if space is not None and event.digests is not None and 0 <= event.part < len(space.strides):
            space.table.set_digests(event.part, event.rows, event.generations, event.digests)

    def _capacity_ready(self, event: events.CapacityReady, out: list[Command]) -> None:
        pool = self.state.pools.get(event.pool)
        if pool is not None:
            pool.grow_ready(event.ready_bytes)
        else:
            self.state.refuse(out, Kind.NOT_FOUND, Refusal.ARGUMENT_INVALID, f"no pool {event.pool}")

    def _drain(self, out: list[Command]) -> None:
        self.state.draining = True
        self.filling.tell_drained(out)
