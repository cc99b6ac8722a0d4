"""Shared reservations beside a plain model: who may still write what, what is visible, what is in quarantine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixcache.core import invariants
from prefixcache.core.commands import Aborted, Committed, LookedUp, Refused, Reply, Reserved
from prefixcache.core.events import (
    AbortRequested,
    CommitRequested,
    Coverage,
    Event,
    LookupRequested,
    NamespaceOpened,
    ProcessExited,
    ReserveRequested,
    SessionEnded,
    SessionOpened,
    TimePassed,
)
from prefixcache.core.ids import GroupKind
from prefixcache.core.planner import Planner
from prefixcache.core.reasons import Refusal
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec, PlannerConfig, PoolSpec

HEADS, BLOCKS, TICKETS = 3, 2, 4
SPEC = NamespaceSpec(4, (GroupSpec(GroupKind.FULL),), (PartSpec(0, HEADS, 4096),))
tickets = st.integers(0, TICKETS - 1)
people = st.integers(0, 2)  # the last one cannot map


@dataclass
class Ticket:
    """`covered`: heads committed. `writers`: who asked and has not spoken last; `spoken`: who has."""

    keys: bytes
    begun: bool = False
    over: bool = False
    deadline: int = 0
    covered: set[int] = field(default_factory=set)
    writers: set[bytes] = field(default_factory=set)
    spoken: set[bytes] = field(default_factory=set)

    @property
    def whole(self) -> bool:
        return len(self.covered) == HEADS


class SharingBesideModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.planner = Planner(PlannerConfig((PoolSpec(1024 * 4096, 64 * 4096),)))
        self.now = 0
        self.ids = 0
        self.tickets: dict[bytes, Ticket] = {}
        self.names: list[bytes] = [self.new_ticket() for _ in range(TICKETS)]
        self.sessions = [self.new_session(can_map=number < 2) for number in range(3)]
        self.send(NamespaceOpened(1, bytes(32), SPEC))

    def new_id(self) -> bytes:
        self.ids += 1
        return self.ids.to_bytes(16, "big")

    def new_ticket(self) -> bytes:
        name = self.new_id()
        keys = b"".join(hashlib.sha256(name + bytes([block])).digest() for block in range(BLOCKS))
        self.tickets[name] = Ticket(keys)
        return name

    def new_session(self, *, can_map: bool) -> bytes:
        session = self.new_id()
        self.send(SessionOpened(session, can_map))
        return session

    def send(self, event: Event) -> object:
        commands = self.planner.handle(event, float(self.now))
        return next((command for command in commands if isinstance(command, Reply)), None)

    def close(self, ticket: Ticket) -> None:
        """Nothing more of it becomes visible; those who map may still be writing."""
        if ticket.begun and not ticket.over:
            ticket.over = True
            ticket.writers.discard(self.sessions[2])
            if ticket.whole:
                ticket.writers.clear()

    @rule(who=people, which=tickets, ttl=st.integers(2, 9))
    def ask(self, who: int, which: int, ttl: int) -> None:
        name, session = self.names[which], self.sessions[who]
        ticket = self.tickets[name]
        reply = self.send(ReserveRequested(session, name, 1, ticket.keys, 0, float(ttl), shared=True))
        if ticket.over or session in ticket.spoken:
            assert isinstance(reply, Refused)
            return
        assert isinstance(reply, Reserved)
        assert reply.blocks.tolist() == list(range(BLOCKS))
        if not ticket.begun:
            ticket.begun, ticket.deadline = True, self.now + ttl
        ticket.writers.add(session)

    @rule(who=people, which=tickets, head=st.integers(0, HEADS - 1), more=st.booleans())
    def commit(self, who: int, which: int, head: int, *, more: bool) -> None:
        name, session = self.names[which], self.sessions[who]
        ticket = self.tickets[name]
        whole = ticket.whole
        reply = self.send(CommitRequested(session, name, (Coverage(0, BLOCKS, 0, head, 1),), more))
        if session not in ticket.writers:
            assert isinstance(reply, Refused) or session in ticket.spoken
            return
        if not ticket.over:
            ticket.covered.add(head)
            assert isinstance(reply, Committed)
            assert reply.stored == (BLOCKS if ticket.whole and not whole else 0)
        else:
            assert isinstance(reply, Refused)
            assert reply.reason is Refusal.RESERVATION_EXPIRED
        if not more:
            ticket.writers.discard(session)
            ticket.spoken.add(session)
            ticket.over |= ticket.whole and not ticket.writers

    @rule(who=people, which=tickets, shared=st.booleans())
    def abort(self, who: int, which: int, *, shared: bool) -> None:
        name, session = self.names[which], self.sessions[who]
        ticket = self.tickets[name]
        reply = self.send(AbortRequested(session, name, shared))
        if session in ticket.writers:
            assert isinstance(reply, Aborted)
            ticket.writers.discard(session)
            ticket.spoken.add(session)
            self.close(ticket)
        elif shared:
            assert isinstance(reply, Aborted)
            ticket.begun = True
            self.close(ticket)

    @rule(seconds=st.integers(0, 4))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.send(TimePassed())
        for ticket in self.tickets.values():
            if ticket.begun and ticket.deadline <= self.now:
                self.close(ticket)

    @rule(who=people, politely=st.booleans())
    def go(self, who: int, *, politely: bool) -> None:
        """The session ends first, or the process is gone at once; either way another worker takes its place."""
        session = self.sessions[who]
        if politely:
            self.send(SessionEnded(session))
        for ticket in self.tickets.values():
            if session in ticket.writers:
                self.close(ticket)
        assert self.quarantined() == self.planner.state.stats.slots_quarantined or not politely
        self.send(ProcessExited(session))
        for ticket in self.tickets.values():
            ticket.writers.discard(session)
        self.sessions[who] = self.new_session(can_map=who < 2)

    @rule(which=tickets)
    def another(self, which: int) -> None:
        self.names[which] = self.new_ticket()

    def quarantined(self) -> int:
        return sum(BLOCKS for each in self.tickets.values() if each.over and not each.whole and each.writers)

    @invariant()
    def holds(self) -> None:
        invariants.check(self.planner)
        assert self.quarantined() == self.planner.state.stats.slots_quarantined
        for ticket in self.tickets.values():
            seen = self.send(LookupRequested(1, ticket.keys))
            assert isinstance(seen, LookedUp)
            assert seen.matched_blocks == (BLOCKS if ticket.whole else 0)
        filling = sum(BLOCKS for each in self.tickets.values() if each.begun and not each.over and not each.whole)
        stored = sum(BLOCKS for each in self.tickets.values() if each.whole)
        used = self.planner.state.host.used_bytes // 4096
        assert used == filling + stored + self.quarantined()


TestSharing = SharingBesideModel.TestCase
TestSharing.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
