"""What must hold of pinned prefixes after every event, checked from scratch; called by `invariants.check`.

Rules: as there: reads only, slow on purpose, never in production. Must not know: what other rules there are.
"""

from __future__ import annotations

from collections import Counter

from prefixcache.core.disk_invariants import must
from prefixcache.core.namespaces import Namespace
from prefixcache.core.pins import PrefixPin
from prefixcache.core.planner import Planner
from prefixcache.core.radix import VISIBLE, Pin, path_to
from prefixcache.core.state import State


def check(planner: Planner) -> None:
    """Raises InvariantError if a pin does not hold what it should, or holds more."""
    state = planner.state
    must(not state.appeared, "pins were not told of what became visible")
    charged = sum(_check_space(state, space) for space in state.namespaces.values())
    must(state.pinned_bytes == charged, f"{state.pinned_bytes} bytes are said to be pinned, {charged} are")
    must(charged <= planner.config.pin_bytes, "more is pinned than the budget allows")
    must(len(state.prefix_pins) <= state.limits.max_pins, "too many pins")
    for number, pin in state.prefix_pins.items():
        must(pin.pin == number and pin.term.pin is pin and not pin.term.ended, "a pin that ended is kept")
        must(state.deadlines.next_due <= pin.term.deadline, "rule 3: a pin's end nobody watches")
        _check_held(pin)


def _check_space(state: State, space: Namespace) -> int:
    """Bytes that are pinned in a namespace."""
    mine = [pin for pin in state.prefix_pins.values() if pin.space is space]
    must(sorted(space.prefix_pins) == sorted(pin.keys[-32:] for pin in mine), "a namespace has other pins")
    keys = Counter(key for pin in mine for key in pin.each_key())
    must(space.pinned_keys == keys, "pinned keys are miscounted")
    waiting = [(key, pin) for key, pins in space.wanted.items() for pin in pins]
    expected = [(pin.key(pin.depth), pin) for pin in mine if pin.depth < pin.blocks]
    must(set(waiting) == set(expected) and len(waiting) == len(expected), "a pin waits for the wrong block")
    return len(keys) * sum(space.strides)


def tree_pins(planner: Planner) -> list[Pin]:
    """The tree's pins that pinned prefixes hold."""
    return [pin for prefix in planner.state.prefix_pins.values() for pin in prefix.pins]


def _check_held(pin: PrefixPin) -> None:
    """It holds exactly what can be seen of its prefix."""
    stored = pin.space.tree.walk(pin.keys).blocks
    must(pin.depth == stored, f"a pin holds {pin.depth} blocks of {stored} that are stored")
    must(len(pin.pins) == (pin.depth > 0), "a pin holds twice, or not at all")
    for held in pin.pins:
        path = path_to(held.node, held.depth)
        keys = b"".join(node.edge for node in path.nodes)[: 32 * held.depth]
        must(held.depth == pin.depth and held.node.state == VISIBLE, "a pin on something else")
        must(pin.keys.startswith(keys) and len(keys) == 32 * pin.depth, "a pin on another path")
