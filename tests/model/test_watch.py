"""Watchers beside a planner that stores, evicts and clears at random: what a replay of their events knows is what a
Lookup answers, whenever nothing is left to tell."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixcache.core.commands import Command, LookedUp, Published
from prefixcache.core.events import ClearRequested, Event, LookupRequested
from prefixcache.server.event_log import EventLog
from prefixcache.server.watch import Source, Watch, Wish
from prefixcache.v1 import admin_pb2
from prefixcache_client.events import EventKind, KnownBlocks, event_of
from tests.unit.core.harness import Harness, chain

FINGERPRINT = (1).to_bytes(32, "big")
prompts = st.text("ab", min_size=1, max_size=6)
INCARNATION = b"i" * 16


class Logged(Harness):
    def __init__(self) -> None:
        self.events = EventLog(1_500)  # about four events
        super().__init__(slots=12, slab_slots=4, publish=True)

    def send(self, event: Event) -> list[Command]:
        commands = super().send(event)
        for command in commands:
            if isinstance(command, Published):
                self.events.append(command)
        return commands


class WatchBesideLookup(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.h = Logged()
        self.source = Source(self.h.events, self.h.planner.state, threading.RLock(), INCARNATION)
        self.known = KnownBlocks()
        self.seen: set[str] = set()
        self.up_to_date = False
        self.stream = self.connect(resume=False)

    def connect(self, *, resume: bool) -> Iterator[admin_pb2.WatchEventsResponse | None]:
        incarnation = INCARNATION if resume else b""
        wish = Wish(True, frozenset([FINGERPRINT]), incarnation, self.known.sequence)
        return Watch(self.source, wish, slice_nodes=1).messages()

    @rule(prompt=prompts)
    def store(self, prompt: str) -> None:
        self.h.store(prompt)
        self.seen.add(prompt)
        self.up_to_date = False

    @rule(prompt=prompts)
    def clear(self, prompt: str) -> None:
        self.h.send(ClearRequested(1, chain(prompt)))
        self.up_to_date = False

    @rule()
    def clear_all(self) -> None:
        self.h.send(ClearRequested(1))
        self.up_to_date = False

    @rule(resume=st.booleans())
    def reconnect(self, *, resume: bool) -> None:
        self.stream.close()  # type: ignore[attr-defined]  # it is a generator
        self.stream = self.connect(resume=resume and self.known.synced)
        self.up_to_date = False

    @rule(most=st.integers(1, 40))
    def read(self, most: int) -> None:
        for _ in range(most):
            message = next(self.stream)
            if message is None:
                self.up_to_date = True
                return
            event = event_of(message)
            assert event.kind is not EventKind.UNKNOWN
            self.known.apply(event)

    @invariant()
    def knows_what_lookup_answers(self) -> None:
        if not self.up_to_date:
            return
        assert self.known.synced
        for prompt in self.seen:
            looked = self.h.ask(LookupRequested(1, chain(prompt)), LookedUp)
            assert self.known.leading(FINGERPRINT, chain(prompt)) == looked.matched_blocks

    def teardown(self) -> None:
        self.stream.close()  # type: ignore[attr-defined]  # it is a generator
        assert not self.h.planner.state.namespaces[1].tree.reshaped


TestWatchBesideLookup = WatchBesideLookup.TestCase
TestWatchBesideLookup.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
