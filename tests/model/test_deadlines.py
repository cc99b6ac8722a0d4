"""Deadlines beside a plain list: nothing is missed, nothing comes early, nothing comes twice."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixcache.core.deadlines import Deadlines


class Thing:
    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.ended = False


class DeadlinesBesideList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.deadlines = Deadlines()
        self.live: list[Thing] = []
        self.now = 0.0

    @rule(ttl=st.integers(0, 9), times=st.integers(1, 40))
    def add(self, ttl: int, times: int) -> None:
        for _ in range(times):
            thing = Thing(self.now + ttl)
            self.live.append(thing)
            self.deadlines.add(thing)

    @rule(which=st.integers(0, 99), later=st.integers(0, 9))
    def renew(self, which: int, later: int) -> None:
        if self.live:
            self.live[which % len(self.live)].deadline += later

    @rule(which=st.integers(0, 99), times=st.integers(1, 40))
    def end(self, which: int, times: int) -> None:
        for _ in range(min(times, len(self.live))):
            self.live.pop(which % len(self.live)).ended = True
            self.deadlines.note_ended()

    @rule(seconds=st.integers(0, 5))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        due = {thing for thing in self.live if thing.deadline <= self.now}
        came = set()
        while (thing := self.deadlines.pop_due(self.now)) is not None:
            assert thing not in came
            came.add(thing)
            thing.ended = True
        assert came == due
        self.live = [thing for thing in self.live if thing not in due]

    @invariant()
    def watched_and_bounded(self) -> None:
        assert self.deadlines.next_due <= min((thing.deadline for thing in self.live), default=float("inf"))
        assert len(self.deadlines) <= 2 * len(self.live) + 130


TestDeadlines = DeadlinesBesideList.TestCase
TestDeadlines.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
