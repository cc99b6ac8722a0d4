"""Pin and Unpin: prefixes that stay until their time is over, somebody ends them, or they are cleared.

Rules: a pin is accepted whole or not at all: the bytes of all its blocks, stored or not yet, count against one budget
from the start, blocks of several pins once; so a pin never grows beyond what was granted, and what is left of memory is
always free for stores. What is stored of it is held as a lease holds it; the rest is held at the moment it is stored.
A pin never outlives a clear of what it holds; blocks that are lost otherwise are waited for. Must not know: who keeps
pins over a restart (the shell does), how blocks are loaded or written.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from prefixcache.core.commands import Command
from prefixcache.core.ids import KEY_BYTES
from prefixcache.core.namespaces import Namespace
from prefixcache.core.pin_messages import PinEnded, Pinned, PinRequested, Unpinned, UnpinRequested
from prefixcache.core.pins import PrefixPin, Term
from prefixcache.core.radix import ROW_DTYPE, Node, Path, node_at, subtree
from prefixcache.core.reasons import Kind, PinEnd, Refusal
from prefixcache.core.removal import Remover
from prefixcache.core.state import State
from prefixcache.core.survey import Survey

if TYPE_CHECKING:
    from prefixcache.core.demoting import Demoter
    from prefixcache.core.prefetching import Prefetcher

MOST_LABEL = 200  # characters
_TENDED_AT_ONCE = 8  # pins looked at whenever time passes


class Pinning:
    """Handlers of PinRequested and UnpinRequested; told of what appears, leaves and is cleared."""

    def __init__(self, state: State, remover: Remover) -> None:
        self.state = state
        self.remover = remover
        remover.shorten_pins = self.shorten
        self.prefetcher: Prefetcher | None = None  # where there is a disk
        self.demoter: Demoter | None = None
        self._tended = 0

    def pin(self, event: PinRequested, now: float, out: list[Command]) -> None:
        space = self._admitted(event, out)
        if space is None:
            return
        deadline = math.inf if event.ttl_s is None else now + event.ttl_s
        pin = space.prefix_pins.get(event.keys[-KEY_BYTES:])
        if pin is not None:
            self._renew(pin, deadline)
            pin.label = event.label
        elif self._affordable(event, space, out):
            pin = self._begin(event, space, deadline)
        if pin is not None:
            out.append(self._answer(pin))

    def unpin(self, event: UnpinRequested, out: list[Command]) -> None:
        pin = self.state.prefix_pins.get(event.pin)
        if pin is None:
            text = "no such pin; it ended or never was"
            self.state.refuse(out, Kind.NOT_FOUND, Refusal.PIN_UNKNOWN, text, event.pin)
            return
        blocks = pin.depth
        self._end(pin)
        out.append(Unpinned(event.pin, blocks))

    def run_out(self, term: Term, out: list[Command]) -> None:
        """Its time is over."""
        self._end(term.pin)
        self._tell(term.pin, PinEnd.EXPIRED, out)

    def cleared(self, space: Namespace, cut: tuple[bytes, int] | None, out: list[Command]) -> None:
        """A namespace was cleared, or (key, block) with all that follows it: pins that reach there end."""
        for pin in list(space.prefix_pins.values()):
            if cut is None or pin.key(cut[1]) == cut[0]:
                self._end(pin)
                self._tell(pin, PinEnd.CLEARED, out)

    def settle(self) -> None:
        """Blocks became visible: pins that waited for them hold them from now on."""
        state = self.state
        while state.appeared:
            space, key = state.appeared.pop()
            for pin in space.wanted.pop(key, ()):
                self._hold(pin)

    def shorten(self, node: Node) -> None:
        """A subtree is about to be detached: pins let go of it, and wait for what they lose."""
        space, above = node.space, node.parent
        assert space is not None
        assert above is not None
        if not space.prefix_pins:
            return
        below = set(subtree(node))
        for pin in [each for each in space.prefix_pins.values() if each.pins and each.pins[0].node in below]:
            self._unwant(pin)
            held, pin.pins, pin.depth = pin.pins, [], node.start
            if node.start:
                self.remover.pin(above, above.end, pin.pins)
            self.remover.unpin_all(held)
            self._want(pin)

    def tend(self, now: float, out: list[Command]) -> None:
        """A few pins at a time: what is on disk only is brought to memory, what is in memory only is written early."""
        pins = self.state.prefix_pins
        if not pins or self.demoter is None or self.prefetcher is None:
            return
        listed = list(pins.values())
        for turn in range(min(_TENDED_AT_ONCE, len(listed))):
            pin = listed[(self._tended + turn) % len(listed)]
            if pin.pins and pin.space.on_disk:
                self._tend(pin, now, out)
        self._tended = (self._tended + _TENDED_AT_ONCE) % len(listed)

    def _tend(self, pin: PrefixPin, now: float, out: list[Command]) -> None:
        assert self.demoter is not None
        assert self.prefetcher is not None
        table, disk = pin.space.table, self.state.disk
        rows = np.frombuffer(pin.space.tree.walk(pin.keys[: pin.depth * KEY_BYTES]).packed_rows(), ROW_DTYPE)
        survey = Survey(pin.space, rows, 0)
        if disk.reads_on and survey.longest(survey.in_memory) < survey.longest(survey.stored):
            self.prefetcher.bring(pin.space, pin.keys[: pin.depth * KEY_BYTES], now, out)
        elif disk.writes_on and not self.demoter.jobs and not table.is_clean(rows).all():
            self.demoter.note_wanted(pin.pins[0].node, pin.pins[0].depth)

    def _admitted(self, event: PinRequested, out: list[Command]) -> Namespace | None:
        state = self.state
        if not state.good_id(event.pin, out):
            return None
        space = state.known_namespace(event.namespace, out, event.pin)
        if space is None or not state.good_keys(event.keys, 0, out, event.pin):
            return None
        if space.foreign is not None:
            text = "keys of a foreign namespace are no chain; nothing in it can be pinned"
        elif not event.keys:
            text = "a pin needs at least one whole block"
        elif len(event.label) > MOST_LABEL:
            text = f"a label has at most {MOST_LABEL} characters"
        elif event.ttl_s is not None and not 0 < event.ttl_s < math.inf:
            text = "a pin holds for a time above 0, or for ever"
        else:
            return space
        state.refuse(out, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID, text, event.pin)
        return None

    def _affordable(self, event: PinRequested, space: Namespace, out: list[Command]) -> bool:
        state = self.state
        budget = state.config.pin_bytes
        fresh = {event.keys[at : at + KEY_BYTES] for at in range(0, len(event.keys), KEY_BYTES)}
        needed = len(fresh - space.pinned_keys.keys()) * sum(space.strides)
        if len(state.prefix_pins) >= state.limits.max_pins:
            text = f"at most {state.limits.max_pins} pins at once"
            state.refuse(out, Kind.RESOURCE_EXHAUSTED, Refusal.TOO_MANY, text, event.pin)
        elif event.pin in state.prefix_pins:
            text = "this pin id is in use for another prefix"
            state.refuse(out, Kind.ALREADY_EXISTS, Refusal.PIN_TAKEN, text, event.pin)
        elif state.pinned_bytes + needed > budget:
            free = max(budget - state.pinned_bytes, 0)
            text = (
                f"the prefix takes {needed} bytes; {free} of the {budget} bytes for pins are free: "
                "unpin another one, pin fewer tokens, or raise pin_bytes"
            )
            state.refuse(out, Kind.RESOURCE_EXHAUSTED, Refusal.PIN_BUDGET, text, event.pin)
        else:
            return True
        return False

    def _begin(self, event: PinRequested, space: Namespace, deadline: float) -> PrefixPin:
        state = self.state
        pin = PrefixPin(event.pin, space, event.keys, event.label, Term(deadline))
        self._watch(pin.term)
        state.prefix_pins[pin.pin] = pin
        space.prefix_pins[pin.keys[-KEY_BYTES:]] = pin
        before = len(space.pinned_keys)
        space.pinned_keys.update(pin.each_key())
        state.pinned_bytes += (len(space.pinned_keys) - before) * sum(space.strides)
        self._hold(pin)
        return pin

    def _end(self, pin: PrefixPin) -> None:
        state, space = self.state, pin.space
        self._unwatch(pin.term)
        self._unwant(pin)
        del state.prefix_pins[pin.pin]
        del space.prefix_pins[pin.keys[-KEY_BYTES:]]
        for key in pin.each_key():
            left = space.pinned_keys[key] - 1
            if left:
                space.pinned_keys[key] = left
            else:
                del space.pinned_keys[key]
                state.pinned_bytes -= sum(space.strides)
        self.remover.unpin_all(pin.pins)

    def _renew(self, pin: PrefixPin, deadline: float) -> None:
        self._unwatch(pin.term)
        pin.term = Term(deadline)
        pin.term.pin = pin
        self._watch(pin.term)

    def _watch(self, term: Term) -> None:
        if term.deadline < math.inf:
            self.state.deadlines.add(term)

    def _unwatch(self, term: Term) -> None:
        if not term.ended and term.deadline < math.inf:
            self.state.deadlines.note_ended()
        term.ended = True

    def _hold(self, pin: PrefixPin) -> None:
        """Holds what can be seen of its prefix by now, and waits for the next block of the rest."""
        path: Path = pin.space.tree.walk(pin.keys)
        if path.blocks > pin.depth:
            held, pin.pins, pin.depth = pin.pins, [], path.blocks
            self.remover.pin(node_at(path, path.blocks), path.blocks, pin.pins)
            self.remover.unpin_all(held)
        self._want(pin)

    def _want(self, pin: PrefixPin) -> None:
        if pin.depth < pin.blocks:
            pin.space.wanted.setdefault(pin.key(pin.depth), []).append(pin)

    def _unwant(self, pin: PrefixPin) -> None:
        waiting = pin.space.wanted.get(pin.key(pin.depth), [])
        if pin in waiting:
            waiting.remove(pin)
            if not waiting:
                del pin.space.wanted[pin.key(pin.depth)]

    def _answer(self, pin: PrefixPin) -> Pinned:
        size = pin.blocks * sum(pin.space.strides)
        return Pinned(pin.pin, pin.depth, pin.blocks, size, pin.term.deadline)

    def _tell(self, pin: PrefixPin, why: PinEnd, out: list[Command]) -> None:
        self.state.stats.pins_ended[why] += 1
        out.append(PinEnded(pin.pin, why))
