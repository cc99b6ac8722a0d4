"""Pins in the simulator: somebody pins, unpins and prefetches, and knows by himself which pins must be there.

The shell keeps pins over a restart, so this does: it pins anew what is left of their time. What is checked: exactly the
pins are there that should be, each holds what the published events say is stored, what is pinned in memory stays there,
and nothing pinned is ever removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prefixcache.core.commands import Cleared, Command, Refused
from prefixcache.core.events import ClearRequested, Event, TimePassed
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, NamespaceKind
from prefixcache.core.pin_messages import (
    PinEnded,
    Pinned,
    PinRequested,
    Prefetched,
    PrefetchRequested,
    Unpinned,
    UnpinRequested,
)
from prefixcache.core.reasons import PinEnd, Refusal
from tests.sim.audit import visible_nodes
from tests.sim.fakes import SimError

if TYPE_CHECKING:
    from tests.sim.simulator import Simulator

FOREVER = float("inf")


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


@dataclass
class Kept:
    namespace: int
    keys: bytes
    deadline: float
    hot: set[bytes] = field(default_factory=set)


class Pins:
    """`live`: what must be pinned now, in the planner that runs."""

    def __init__(self, simulator: Simulator) -> None:
        self.sim = simulator
        self.live: dict[bytes, Kept] = {}
        self.kept: dict[bytes, Kept] = {}  # while one planner is gone and the next one does not know them yet
        self.ended: set[bytes] = set()  # may or must be told to have ended, during the event under way

    # -- what somebody does --------------------------------------------------------------------------------------

    def act(self) -> None:
        choice = self.sim.rng.random()
        if choice < 0.45:
            self.pin()
        elif choice < 0.55 and self.live:
            self.unpin()
        elif choice < 0.75:
            self.sim.send(TimePassed())
        else:
            self.prefetch()

    def pin(self) -> None:
        sim = self.sim
        prompt = sim.prompt()
        known = next((name for name, kept in self.live.items() if self._is(kept, prompt.namespace, prompt.keys)), None)
        ttl_s = sim.rng.choice((None, 0.2, 1.0, 4.0))
        name = sim.new_id()
        event = PinRequested(name, prompt.namespace, prompt.keys, "some label", ttl_s)
        reply = self._reply(sim.send(event))
        if isinstance(reply, Refused):
            self._check_refusal(reply, prompt.namespace, prompt.keys, known)
            return
        if not isinstance(reply, Pinned) or reply.pin != (known or name):
            raise SimError("a pin was answered with another")
        deadline = FOREVER if ttl_s is None else sim.now + ttl_s
        if reply.expires_at != deadline or reply.held_blocks != self._stored(prompt.namespace, prompt.keys):
            raise SimError("a pin was promised otherwise than asked for")
        hot = self.live[known].hot if known else set()
        self.live[known or name] = Kept(prompt.namespace, prompt.keys, deadline, hot)

    def unpin(self) -> None:
        name = self.sim.rng.choice(list(self.live))
        if self.live[name].deadline <= self.sim.now:
            return
        if not isinstance(self._reply(self.sim.send(UnpinRequested(name))), Unpinned):
            raise SimError("a pin could not be ended")
        del self.live[name]

    def prefetch(self) -> None:
        prompt = self.sim.prompt()
        reply = self._reply(self.sim.send(PrefetchRequested(prompt.namespace, prompt.keys)))
        stored = self._stored(prompt.namespace, prompt.keys)
        if self.sim.specs[prompt.namespace].kind is NamespaceKind.FOREIGN:
            return
        if not isinstance(reply, Prefetched) or reply.ready_blocks + reply.coming_blocks > prompt.blocks:
            raise SimError("more is said to come than was asked for")
        if self.sim.disk is None and reply.ready_blocks < stored:
            raise SimError("what is in memory is not said to be")

    # -- what happens --------------------------------------------------------------------------------------------

    def before(self, event: Event) -> None:
        """Which pins end with this event, for sure or maybe."""
        self.ended = {name for name, kept in self.live.items() if kept.deadline <= self.sim.now}
        if isinstance(event, ClearRequested):
            self.ended |= {name for name, kept in self.live.items() if self._may_clear(event, kept)}

    def told(self, command: PinEnded) -> None:
        if command.pin not in self.ended or command.pin not in self.live:
            raise SimError("a pin ended that should not")
        expired = self.live.pop(command.pin).deadline <= self.sim.now
        if expired != (command.reason is PinEnd.EXPIRED):
            raise SimError("a pin ended for another reason")

    def after(self, event: Event, before: dict[int, set[bytes]]) -> None:
        """Who should have been told to have ended was."""
        for name, kept in self.live.items():
            if kept.deadline <= self.sim.now:
                raise SimError("a pin outlived its time")
            if isinstance(event, ClearRequested) and self._must_clear(event, kept, before):
                raise SimError(f"pin {name.hex()} survived a clear")

    def check_eviction(self, event: ClearRequested, replies: list[Command], before: dict[int, set[bytes]]) -> None:
        """What is evicted gently was nobody's, and of a prefix's own tail only its own blocks go."""
        cleared = next((reply for reply in replies if isinstance(reply, Cleared)), None)
        ended = any(isinstance(reply, PinEnded) and reply.reason is PinEnd.CLEARED for reply in replies)
        if event.gently and cleared is not None and (cleared.leased_blocks or ended):
            raise SimError("what was leased or pinned was evicted")
        gone = set().union(*(before[space] - visible for space, visible in self.sim.visible.items()))
        if cleared is None and gone:
            raise SimError("an eviction was refused and took place")
        if event.own_tail and event.keys is not None and not gone <= set(split(event.keys)):
            raise SimError("blocks of other prompts were evicted")

    def removed(self, namespace: int, keys: set[bytes]) -> None:
        """Blocks were evicted for good."""
        for kept in self.live.values():
            if kept.namespace == namespace and kept.deadline > self.sim.now and keys & set(split(kept.keys)):
                raise SimError("a pinned block was evicted")

    def stopped(self) -> None:
        """The planner that knew them is gone; the next one knows of no pin until it is told of it."""
        self.kept, self.live = self.live, {}

    def restarted(self) -> None:
        """A new planner: what is left of each pin is pinned anew."""
        sim = self.sim
        kept_over, self.kept = self.kept, {}
        for name, kept in kept_over.items():
            if kept.deadline <= sim.now:
                continue
            ttl_s = None if kept.deadline == FOREVER else kept.deadline - sim.now
            if not isinstance(self._reply(sim.send(PinRequested(name, kept.namespace, kept.keys, "", ttl_s))), Pinned):
                raise SimError("a pin did not survive a restart")
            self.live[name] = Kept(kept.namespace, kept.keys, kept.deadline)

    def check(self) -> None:
        state = self.sim.planner.state
        if set(state.prefix_pins) != set(self.live):
            raise SimError("other pins are there than should be")
        if not self.live:
            return
        hot = {space.number: self._hot(space.number) for space in state.namespaces.values()}
        for kept in self.live.values():
            visible = self.sim.visible[kept.namespace]
            if (kept.hot & visible) - hot[kept.namespace]:
                raise SimError("a pinned block left memory")
            kept.hot = hot[kept.namespace] & set(split(kept.keys))

    # -- helpers -------------------------------------------------------------------------------------------------

    def _hot(self, number: int) -> set[bytes]:
        space = self.sim.planner.state.namespaces[number]
        slots = space.table.parts[0].slots
        return {
            key
            for rows, keys in visible_nodes(space)
            for key, slot in zip(keys, slots[rows].tolist(), strict=True)
            if slot != NO_SLOT
        }

    def _stored(self, number: int, keys: bytes) -> int:
        """Leading blocks that can be seen."""
        return self.sim.planner.state.namespaces[number].tree.walk(keys).blocks

    def _check_refusal(self, reply: Refused, number: int, keys: bytes, known: bytes | None) -> None:
        sim = self.sim
        if sim.specs[number].kind is NamespaceKind.FOREIGN:
            return
        pinned = {(kept.namespace, key) for kept in self.live.values() for key in split(kept.keys)}
        wanted = pinned | {(number, key) for key in split(keys)}
        sizes = {space.number: sum(space.strides) for space in sim.planner.state.namespaces.values()}
        needed = sum(sizes[namespace] for namespace, _ in wanted)
        if known or reply.reason is not Refusal.PIN_BUDGET or needed <= sim.config.pin_bytes:
            raise SimError("a pin was refused that fits")

    def _may_clear(self, event: ClearRequested, kept: Kept) -> bool:
        if event.namespace not in (None, kept.namespace):
            return False
        return event.keys is None or bool(set(split(event.keys)) & set(split(kept.keys)))

    def _must_clear(self, event: ClearRequested, kept: Kept, before: dict[int, set[bytes]]) -> bool:
        if event.namespace not in (None, kept.namespace):
            return False
        if event.keys is None or event.namespace is None:
            return event.keys is None and not event.gently
        mine = set(split(kept.keys))
        gone = before[kept.namespace] - self.sim.visible[kept.namespace]
        named = not event.own_tail and not event.gently and event.keys[-KEY_BYTES:] in mine
        return named or bool(gone & mine)

    def _is(self, kept: Kept, namespace: int, keys: bytes) -> bool:
        return kept.namespace == namespace and kept.keys == keys and kept.deadline > self.sim.now

    @staticmethod
    def _reply(commands: list[Command]) -> Command | None:
        kinds = (Pinned, Unpinned, Prefetched, Refused)
        return next((command for command in commands if isinstance(command, kinds)), None)
