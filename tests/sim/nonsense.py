"""Events that no good client sends (unknown ids, torn keys, other people's leases), and those good ones send twice.

Every one of them has to be answered, and none may change anything that `check` would notice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prefixcache.core.commands import Command, Refused, Reserved
from prefixcache.core.events import (
    AbortRequested,
    AcquireRequested,
    CapacityReady,
    ChecksumDone,
    ClearRequested,
    CommitRequested,
    CopyDone,
    Coverage,
    Event,
    LeaseReleased,
    LeaseRenewed,
    LookupRequested,
    NamespaceOpened,
    PartFailedVerification,
    ProcessExited,
    ReserveRequested,
    SessionEnded,
    SessionOpened,
    SnapshotRestored,
    VerifyDone,
)
from prefixcache.core.ids import GroupKind
from prefixcache.core.pin_messages import PinRequested, PrefetchRequested, UnpinRequested
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec
from tests.sim.fakes import SimError

if TYPE_CHECKING:
    from tests.sim.simulator import Simulator

_BAD_ID = b"short"


class Nonsense:
    """Sends one bad event at a time into a simulator's planner."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator

    def send_some(self) -> None:
        sim = self.simulator
        if sim.rng.random() < 0.4 and sim.history:
            self._repeat()
            return
        event = sim.rng.choice(self._bad_events())
        commands = sim.send(event)
        if not any(isinstance(command, Refused) for command in commands) and not isinstance(event, ChecksumDone):
            raise SimError(f"{type(event).__name__} was not refused")

    def _repeat(self) -> None:
        """A retry of an Acquire, Reserve, Commit or Abort whose answer got lost."""
        sim = self.simulator
        kinds = (ReserveRequested, CommitRequested, AbortRequested, LeaseReleased, SessionEnded, ProcessExited)
        last = [(event, commands) for _, event, commands in sim.history[-12:] if isinstance(event, kinds)]
        if not last:
            return
        event, before = sim.rng.choice(last)
        if isinstance(event, ReserveRequested):
            self._repeat_reserve(event, before)
        elif isinstance(event, (CommitRequested, AbortRequested)):
            if event.reservation not in sim.planner.state.reservations:
                sim.send(event)
        elif isinstance(event, LeaseReleased):
            if not any(isinstance(command, Refused) for command in sim.send(event)):
                raise SimError("a lease was released twice")
        elif all(worker.session != event.session or worker.gone for worker in sim.workers):
            sim.send(event)

    def _repeat_reserve(self, event: ReserveRequested, before: list[Command]) -> None:
        sim = self.simulator
        granted = next((each for each in before if isinstance(each, Reserved) and len(each.blocks)), None)
        reservation = sim.planner.state.reservations.get(event.reservation)
        if granted is None or reservation is None or reservation.deadline <= sim.now:
            return
        again = sim.send(event)
        if not any(each is granted or isinstance(each, Refused) for each in again):
            raise SimError("a retried Reserve was answered otherwise")

    def _bad_events(self) -> list[Event]:
        sim = self.simulator
        session = sim.workers[0].session if sim.workers else sim.new_id()
        number = next(iter(sim.specs))
        keys = sim.prompt(number).keys
        other = sim.new_id()
        spec = sim.specs[number]
        events: list[Event] = [
            SessionOpened(_BAD_ID, True),
            SessionEnded(other),
            ProcessExited(other),
            NamespaceOpened(number, b"f" * 32, spec),
            NamespaceOpened(99, b"f" * 31, spec),
            NamespaceOpened(99, b"f" * 32, NamespaceSpec(0, spec.groups, spec.parts)),
            NamespaceOpened(99, b"f" * 32, NamespaceSpec(4, spec.groups, (PartSpec(0, 1, 1 << 30),) * 3)),
            NamespaceOpened(98, number.to_bytes(32, "big"), NamespaceSpec(9, spec.groups, spec.parts, spec.kind)),
            NamespaceOpened(99, b"f" * 32, NamespaceSpec(4, (GroupSpec(GroupKind.SLIDING),), (PartSpec(0, 1, 1),))),
            AcquireRequested(session, _BAD_ID, number, keys, 0, 1 << 40, 1.0),
            AcquireRequested(other, sim.new_id(), number, keys, 0, 1 << 40, 1.0),
            AcquireRequested(session, sim.new_id(), 77, keys, 0, 1 << 40, 1.0),
            AcquireRequested(session, sim.new_id(), number, keys[:-1], 0, 1 << 40, 1.0),
            AcquireRequested(session, sim.new_id(), number, keys, 99, 1 << 40, 1.0),
            AcquireRequested(session, sim.new_id(), number, keys, -1, 1 << 40, 1.0),
            AcquireRequested(session, sim.new_id(), number, keys, 0, 1, 1.0),
            AcquireRequested(session, sim.new_id(), number, keys, 0, 1 << 40, 1.0, -1),
            LeaseRenewed(session, other, 1.0),
            LeaseReleased(session, other),
            LookupRequested(77, keys),
            LookupRequested(number, keys + b"x"),
            ReserveRequested(session, _BAD_ID, number, keys, 0, 1.0),
            ReserveRequested(session, sim.new_id(), 77, keys, 0, 1.0),
            ReserveRequested(session, sim.new_id(), number, keys + b"x", 0, 1.0),
            ReserveRequested(session, sim.new_id(), number, keys, 0, float("nan"), part_mask=0),
            CommitRequested(session, other),
            AbortRequested(session, other),
            PinRequested(_BAD_ID, number, keys),
            PinRequested(sim.new_id(), 77, keys),
            PinRequested(sim.new_id(), number, keys[:-1]),
            PinRequested(sim.new_id(), number, b""),
            PinRequested(sim.new_id(), number, keys, "x" * 201),
            PinRequested(sim.new_id(), number, keys, "", float("nan")),
            PinRequested(sim.new_id(), number, keys, "", -1.0),
            UnpinRequested(other),
            PrefetchRequested(77, keys),
            PrefetchRequested(number, keys + b"x"),
            ClearRequested(number, None, gently=True),
            CopyDone(9999, True),
            VerifyDone(9999),
            PartFailedVerification(number, 0, 1 << 31, 3),
            PartFailedVerification(number, 9, 0, 0),
            CapacityReady(7, 1),
            ClearRequested(None, keys),
            ClearRequested(number, keys + b"x"),
            SnapshotRestored({"version": 9}),
            ChecksumDone(number, 0, np.array([1 << 30], np.uint32), np.array([1], np.uint64), None),
        ]
        return events + self._thefts(other)

    def _thefts(self, other: bytes) -> list[Event]:
        """Somebody else's lease and reservation, and coverage that was not granted."""
        sim = self.simulator
        events: list[Event] = []
        for worker in sim.workers:
            for lease, reading in worker.readings.items():
                if not reading.over:
                    events += [LeaseReleased(other, lease), LeaseRenewed(other, lease, 1.0)]
            for name, writing in worker.writings.items():
                events += [CommitRequested(other, name), AbortRequested(other, name)]
                if not writing.over:
                    pieces = (Coverage(90, 1, 0), Coverage(0, 1, 50), Coverage(0, 0, 0), Coverage(0, 1, 0, 5))
                    events += [CommitRequested(worker.session, name, (piece,)) for piece in pieces]
        return events
