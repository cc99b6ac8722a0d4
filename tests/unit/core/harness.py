"""A planner in a few words, for tests: every call is one event, checked afterwards, and answers its one reply."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import numpy as np

from prefixcache.core import invariants
from prefixcache.core.commands import (
    Acquired,
    Command,
    Committed,
    LookedUp,
    MoreToDo,
    Refused,
    Released,
    Reply,
    Reserved,
)
from prefixcache.core.events import (
    AcquireRequested,
    CommitRequested,
    Coverage,
    Event,
    LeaseReleased,
    LookupRequested,
    NamespaceOpened,
    ReserveRequested,
    SessionEnded,
    SessionOpened,
    WorkResumed,
)
from prefixcache.core.ids import GroupKind, Tier
from prefixcache.core.planner import Planner
from prefixcache.core.reasons import Kind, Refusal
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec, PlannerConfig, PoolSpec

GRANULE = 4096
TOKENS = 16
FULL = GroupSpec(GroupKind.FULL)
ONE_PART = NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 4, GRANULE),))
A, B = b"a" * 16, b"b" * 16
FOREVER = 1000.0

_Answer = TypeVar("_Answer")


def chain(letters: str) -> bytes:
    """Packed keys of a prompt given as letters, one a block."""
    keys = []
    key = b""
    for letter in letters:
        key = hashlib.sha256(key + letter.encode()).digest()
        keys.append(key)
    return b"".join(keys)


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Harness:
    """`now` moves only when a test says so, and what can be done later is done at once, unless `is_busy`. gpu_slots: of
    a GPU pool (number 1), 0 for none."""

    def __init__(
        self, slots: int = 64, slab_slots: int = 16, spec: NamespaceSpec = ONE_PART, gpu_slots: int = 0, **config: Any
    ) -> None:
        pools = [PoolSpec(slots * GRANULE, slab_slots * GRANULE)]
        if gpu_slots:
            pools.append(PoolSpec(gpu_slots * GRANULE, slab_slots * GRANULE, 1, Tier.GPU))
        self.planner = Planner(PlannerConfig(tuple(pools), **config))
        self.now = 0.0
        self.ids = 0
        self.is_busy = False  # while it is, nothing is resumed
        self.all: list[Command] = []
        self.send(SessionOpened(A, True))
        self.send(SessionOpened(B, False))
        self.open(1, spec)

    @property
    def used(self) -> int:
        """Slots of one granule in use."""
        return self.planner.state.host.used_bytes // GRANULE

    def send(self, event: Event) -> list[Command]:
        self.all = self.planner.handle(event, self.now)
        invariants.check(self.planner)
        while self.all and isinstance(self.all[-1], MoreToDo) and not self.is_busy:
            self.all = self.all[:-1] + self.planner.handle(WorkResumed(), self.now)
            invariants.check(self.planner)
        return self.all

    def ask(self, event: Event, answer: type[_Answer]) -> _Answer:
        """Sends and answers the one reply, which must be of that kind."""
        replies = [command for command in self.send(event) if isinstance(command, Reply)]
        assert len(replies) == 1, replies
        assert isinstance(replies[0], answer), replies
        return replies[0]

    def refused(self, event: Event, kind: Kind, reason: Refusal) -> Refused:
        refusal = self.ask(event, Refused)
        assert (refusal.kind, refusal.reason) == (kind, reason)
        assert refusal.message
        return refusal

    def new_id(self) -> bytes:
        self.ids += 1
        return name(self.ids)

    def open(self, number: int, spec: NamespaceSpec) -> None:
        self.send(NamespaceOpened(number, number.to_bytes(32, "big"), spec))

    def reserve(self, letters: str, session: bytes = A, **fields: Any) -> Reserved:
        event = ReserveRequested(session, self.new_id(), 1, chain(letters), 0, FOREVER)
        for field, value in fields.items():
            setattr(event, field, value)
        return self.ask(event, Reserved)

    def commit(self, reserved: Reserved, *coverage: Coverage, session: bytes = A, more: bool = False) -> Committed:
        event = CommitRequested(session, reserved.reservation, coverage or None, more)
        return self.ask(event, Committed)

    def store(self, letters: str, session: bytes = A, **fields: Any) -> Reserved:
        """Reserves and commits what is missing of a prompt."""
        reserved = self.reserve(letters, session, **fields)
        if len(reserved.blocks):
            self.commit(reserved, session=session)
        return reserved

    def acquire(self, letters: str, session: bytes = A, **fields: Any) -> Acquired:
        event = AcquireRequested(session, self.new_id(), 1, chain(letters), 0, len(letters) * TOKENS, FOREVER)
        for field, value in fields.items():
            setattr(event, field, value)
        return self.ask(event, Acquired)

    def release(self, acquired: Acquired, used: int | None = None, session: bytes = A) -> Released:
        return self.ask(LeaseReleased(session, acquired.lease, used), Released)

    def hit(self, letters: str) -> int:
        """How many blocks of a prompt are there, without keeping a lease."""
        acquired = self.acquire(letters)
        if acquired.planned_blocks:
            self.release(acquired)
        return acquired.planned_blocks

    def hit_of(self, keys: bytes) -> list[bool]:
        """Which keys of a foreign namespace are there."""
        looked_up = self.ask(LookupRequested(1, keys), LookedUp)
        assert looked_up.present is not None
        present: list[bool] = looked_up.present.tolist()
        return present

    def end_session(self, session: bytes = A) -> list[Command]:
        return self.send(SessionEnded(session))


def slots_of(reserved: Reserved, part: int = 0) -> list[int]:
    found: list[int] = next(grant.slots.tolist() for grant in reserved.grants if grant.part == part)
    return found


def digests(count: int, seed: int = 0) -> np.typing.NDArray[np.uint8]:
    return np.frombuffer(hashlib.sha256(bytes([seed])).digest()[:16] * count, np.uint8).reshape(count, 16)
