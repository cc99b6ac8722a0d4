"""The planner beside a plain dict from prefix to what became of it, in a pool that is never full."""

from __future__ import annotations

import hashlib
from functools import cache

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixcache.core import invariants
from prefixcache.core.commands import Aborted, Acquired, Cleared, Command, Committed, Refused, Released, Reply, Reserved
from prefixcache.core.events import (
    AbortRequested,
    AcquireRequested,
    ClearRequested,
    CommitRequested,
    Event,
    LeaseReleased,
    NamespaceOpened,
    ReserveRequested,
    SessionOpened,
    TimePassed,
)
from prefixcache.core.ids import GroupKind
from prefixcache.core.planner import Planner
from prefixcache.core.reasons import Miss, Refusal, Skip
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec, PlannerConfig, PoolSpec

SESSION = b"s" * 16
TOKENS = 4
SPEC = NamespaceSpec(TOKENS, (GroupSpec(GroupKind.FULL),), (PartSpec(0, 1, 4096),))
VISIBLE, WAITING = b"visible", b"waiting"  # anything else: the id of the reservation that fills it
prompts = st.text("ab", min_size=1, max_size=6)


@cache
def key(prefix: str) -> bytes:
    return hashlib.sha256(prefix.encode()).digest()


def chain(prompt: str) -> bytes:
    return b"".join(key(prompt[: end + 1]) for end in range(len(prompt)))


class PlannerBesideDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.planner = Planner(PlannerConfig((PoolSpec(4096 * 4096, 64 * 4096),)))
        self.now = 0.0
        self.ids = 0
        self.blocks: dict[str, bytes] = {}
        self.open: dict[bytes, tuple[str, list[int], float]] = {}  # reservation -> prompt, blocks, deadline
        self.expired: set[bytes] = set()
        self.leases: dict[bytes, int] = {}
        self.looked_up = self.hit = self.pending = 0
        self.send(SessionOpened(SESSION, True))
        self.send(NamespaceOpened(1, bytes(32), SPEC))

    def send(self, event: Event) -> Command | None:
        commands = self.planner.handle(event, self.now)
        return next((command for command in commands if isinstance(command, Reply)), None)

    def new_id(self) -> bytes:
        self.ids += 1
        return self.ids.to_bytes(16, "big")

    def leading(self, prompt: str, *, only_visible: bool) -> int:
        length = 0
        while length < len(prompt) and prompt[: length + 1] in self.blocks:
            if only_visible and self.blocks[prompt[: length + 1]] != VISIBLE:
                break
            length += 1
        return length

    def remove(self, prefix: str) -> int:
        """With all that follows; answers how many of them could be seen."""
        gone = [each for each in self.blocks if each.startswith(prefix)]
        return sum(self.blocks.pop(each) == VISIBLE for each in gone)

    def withdraw(self, reservation: bytes) -> None:
        for prefix in [prefix for prefix, owner in self.blocks.items() if owner == reservation]:
            if prefix in self.blocks:
                self.remove(prefix)

    @rule(prompt=prompts, ttl=st.integers(1, 9))
    def reserve(self, prompt: str, ttl: int) -> None:
        name = self.new_id()
        reply = self.send(ReserveRequested(SESSION, name, 1, chain(prompt), 0, float(ttl)))
        assert isinstance(reply, Reserved)
        known, visible = self.leading(prompt, only_visible=False), self.leading(prompt, only_visible=True)
        assert reply.blocks.tolist() == list(range(known, len(prompt)))
        skipped = {Skip.ALREADY_STORED: visible, Skip.BEING_WRITTEN: known - visible}
        assert reply.skipped == {reason: count for reason, count in skipped.items() if count}
        if known < len(prompt):
            self.open[name] = (prompt, list(range(known, len(prompt))), self.now + ttl)
            for end in range(known, len(prompt)):
                self.blocks[prompt[: end + 1]] = name

    @rule(which=st.integers(0, 20))
    def commit(self, which: int) -> None:
        if not self.open:
            return
        name = list(self.open)[which % len(self.open)]
        prompt, blocks, _ = self.open.pop(name)
        reply = self.send(CommitRequested(SESSION, name))
        if name in self.expired:
            self.expired.discard(name)
            assert isinstance(reply, Refused)
            assert reply.reason is Refusal.RESERVATION_EXPIRED
            return
        mine = [prompt[: block + 1] for block in blocks if self.blocks.get(prompt[: block + 1]) == name]
        assert isinstance(reply, Committed)
        assert (reply.stored, sum(reply.dropped.values())) == (len(mine), len(blocks) - len(mine))
        for prefix in mine:
            self.blocks[prefix] = WAITING
        for prefix in sorted(self.blocks, key=len):
            parent = self.blocks.get(prefix[:-1], VISIBLE if len(prefix) == 1 else WAITING)
            if self.blocks[prefix] == WAITING and parent == VISIBLE:
                self.blocks[prefix] = VISIBLE

    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        if self.open:
            name = list(self.open)[which % len(self.open)]
            del self.open[name]
            assert isinstance(self.send(AbortRequested(SESSION, name)), Aborted)
            self.expired.discard(name)
            self.withdraw(name)

    @rule(seconds=st.integers(0, 4))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.send(TimePassed())
        for name, (_, _, deadline) in self.open.items():
            if deadline <= self.now and name not in self.expired:
                self.expired.add(name)
                self.withdraw(name)

    @rule(prompt=prompts, from_block=st.integers(0, 6), limit=st.one_of(st.none(), st.integers(0, 4)))
    def acquire(self, prompt: str, from_block: int, limit: int | None) -> None:
        from_block = min(from_block, len(prompt))
        name = self.new_id()
        total = len(prompt) * TOKENS + 1
        reply = self.send(AcquireRequested(SESSION, name, 1, chain(prompt), from_block, total, 1e3, limit))
        assert isinstance(reply, Acquired)
        visible, known = self.leading(prompt, only_visible=True), self.leading(prompt, only_visible=False)
        there = max(0, visible - from_block)
        planned = there if limit is None else min(there, limit)
        assert reply.planned_blocks == planned
        if planned < there:
            assert reply.stop is Miss.BEYOND_LIMIT
        elif max(visible, from_block) < len(prompt):
            assert reply.stop is (Miss.BEING_WRITTEN if known > visible else Miss.NOT_STORED)
        self.looked_up += total - from_block * TOKENS
        if planned:
            self.leases[name] = planned
            self.pending += planned * TOKENS

    @rule(which=st.integers(0, 20), used=st.integers(0, 6))
    def release(self, which: int, used: int) -> None:
        if self.leases:
            name = list(self.leases)[which % len(self.leases)]
            planned = self.leases.pop(name)
            assert isinstance(self.send(LeaseReleased(SESSION, name, used)), Released)
            self.pending -= planned * TOKENS
            self.hit += min(used, planned) * TOKENS

    @rule(prompt=prompts)
    def clear(self, prompt: str) -> None:
        reply = self.send(ClearRequested(1, chain(prompt)))
        assert isinstance(reply, Cleared)
        assert reply.blocks == self.remove(prompt)

    @invariant()
    def holds(self) -> None:
        invariants.check(self.planner)
        tokens = self.planner.state.stats.tokens
        assert (tokens.looked_up, sum(tokens.hit), tokens.pending) == (self.looked_up, self.hit, self.pending)


TestPlanner = PlannerBesideDict.TestCase
TestPlanner.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
