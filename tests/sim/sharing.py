"""Reservations that several workers fill: each asks for the same under one id and writes heads that no other writes.

Faults: writers that never come, come too late, give up before they asked, ask for something else under the same id, or
say that they are done when they are not. That they die, are stopped or give up in the middle happens to all writers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from prefixcache.core.commands import Refused, Reserved
from prefixcache.core.events import AbortRequested, ReserveRequested, TimePassed
from tests.sim.fakes import HEADS, SimError
from tests.sim.workers import Prompt, Worker, Writing

if TYPE_CHECKING:
    from tests.sim.simulator import Simulator


@dataclass
class Ticket:
    """What is asked by all, what the first was answered, who asked, and which heads nobody took yet."""

    prompt: Prompt
    event: ReserveRequested
    reply: Reserved | None = None
    asked: set[bytes] = field(default_factory=set)
    heads: list[int] = field(default_factory=lambda: list(range(HEADS)))


class Sharing:
    """Tickets that may still be joined."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.tickets: list[Ticket] = []

    def act(self, worker: Worker) -> None:
        """A worker asks for one, gives one up, or makes a mistake about one."""
        sim = self.simulator
        open_to_it = [each for each in self.tickets if worker.session not in each.asked]
        if not open_to_it or sim.rng.random() < 0.3:
            open_to_it = [self._new()]
        ticket = sim.rng.choice(open_to_it)
        choice = sim.rng.random()
        if choice < 0.04:
            self.tickets.remove(ticket)
            sim.send(AbortRequested(worker.session, ticket.event.reservation, shared=True))
        elif choice < 0.12 and ticket.reply is not None:
            self._ask_for_something_else(worker, ticket)
        else:
            self._ask(worker, ticket)

    def _new(self) -> Ticket:
        sim = self.simulator
        prompt = sim.prompt()
        from_block = sim.rng.choice((0, 0, 0, sim.rng.randint(0, prompt.blocks)))
        mask = sim.rng.choice(((1 << 64) - 1, (1 << 64) - 1, 0b011, 0b110))
        ttl_s = sim.rng.choice((1.0, 6.0))
        event = ReserveRequested(
            b"", sim.new_id(), prompt.namespace, prompt.keys, from_block, ttl_s, part_mask=mask, shared=True
        )
        ticket = Ticket(prompt, event)
        self.tickets = [*self.tickets[-3:], ticket]
        return ticket

    def _ask(self, worker: Worker, ticket: Ticket) -> None:
        sim = self.simulator
        ticket.asked.add(worker.session)
        heads = ticket.heads if sim.rng.random() < 0.2 else ticket.heads[:1]
        sim.send(TimePassed())  # what is over is over before it is asked for
        event = replace(ticket.event, session=worker.session)
        state = sim.planner.state
        is_first = event.reservation not in state.reservations and event.reservation not in state.recent_ends
        replies = sim.priorities.reserve(event) if is_first else sim.send(event)
        reply = next((each for each in replies if isinstance(each, Reserved)), None)
        if reply is None or not len(reply.blocks):
            return
        if reply is not ticket.reply and not is_first:  # what is over is forgotten after a while
            raise SimError("two writers of one reservation were answered differently")
        ticket.reply = reply
        ticket.heads = ticket.heads[len(heads) :]
        writing = Writing(ticket.prompt, reply, shared=True)
        writing.plan(heads)
        worker.writings[ticket.event.reservation] = writing
        if not ticket.heads:
            self.tickets.remove(ticket)

    def _ask_for_something_else(self, worker: Worker, ticket: Ticket) -> None:
        """Refused; if it were not, it would write its own prompt's bytes."""
        sim = self.simulator
        prompt = sim.prompt(ticket.prompt.namespace)
        if prompt.keys == ticket.prompt.keys:
            return
        replies = sim.send(replace(ticket.event, session=worker.session, keys=prompt.keys))
        if not any(isinstance(each, Refused) for each in replies):
            raise SimError("one reservation for two prompts")
