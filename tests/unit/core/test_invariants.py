"""The checker sees what is wrong: each case breaks one thing by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from prefixcache.core import invariants
from prefixcache.core.ids import NO_SLOT
from prefixcache.core.planner import Planner
from prefixcache.core.radix import FILLING, NOT_QUEUED, WAITING, Node
from prefixcache.core.reasons import Miss
from prefixcache.core.spec import PartSpec
from tests.unit.core.harness import Harness, chain


def node_of(planner: Planner, letters: str) -> Node:
    return planner.state.namespaces[1].tree.walk(chain(letters), FILLING).nodes[-1]


def sum_opened(planner: Planner) -> None:
    planner.state.stats.ledgers[1].looked_up += 1


def pending_forgotten(planner: Planner) -> None:
    planner.state.stats.ledgers[1].pending -= 16
    planner.state.stats.ledgers[1].miss[Miss.UNUSED] += 16


def slot_leaked(planner: Planner) -> None:
    planner.state.host.allocate(4096, 1)


def slot_lost(planner: Planner) -> None:
    planner.state.host.release(planner.state.namespaces[1].table.parts[0].slots[:1])


def slot_shared(planner: Planner) -> None:
    slots = planner.state.namespaces[1].table.parts[0].slots
    slots[1] = slots[0]


def bytes_miscounted(planner: Planner) -> None:
    planner.state.host.used_bytes += 4096


def part_missing(planner: Planner) -> None:
    column = planner.state.namespaces[1].table.parts[0]
    planner.state.host.release(column.slots[:1].copy())
    column.slots[0] = NO_SLOT


def generation_from_nowhere(planner: Planner) -> None:
    planner.state.namespaces[1].table.parts[0].generations[0] = 10_000


def edge_torn(planner: Planner) -> None:
    node_of(planner, "xy").edge = chain("x")


def child_below_nothing(planner: Planner) -> None:
    node_of(planner, "ab").state = WAITING


def wrong_start(planner: Planner) -> None:
    node_of(planner, "abcd").start += 1


def leaf_forgotten(planner: Planner) -> None:
    node = node_of(planner, "xy")
    planner.state.namespaces[1].policy.remove_leaf(node)


def leaf_invented(planner: Planner) -> None:
    planner.state.namespaces[1].policy.add_leaf(node_of(planner, "ab"), 1)


def tick_forgotten(planner: Planner) -> None:
    planner.state.namespaces[1].table.touched[node_of(planner, "xy").row_array()] += np.uint64(5)


def pin_lost(planner: Planner) -> None:
    for node in planner.state.namespaces[1].tree.walk(chain("abcd")).nodes:
        node.pins = None


def lease_unknown_to_its_session(planner: Planner) -> None:
    next(iter(planner.state.sessions.values())).leases.clear()


def deadline_unwatched(planner: Planner) -> None:
    planner.state.deadlines.next_due = 1e9


def quarantine_miscounted(planner: Planner) -> None:
    planner.state.stats.slots_quarantined += 1


def writer_forgotten(planner: Planner) -> None:
    next(iter(planner.state.reservations.values())).nodes.clear()


def row_leaked(planner: Planner) -> None:
    planner.state.namespaces[1].table.allocate(1)


def unverified_miscounted(planner: Planner) -> None:
    planner.state.namespaces[1].table.unverified = 3


BROKEN: tuple[Callable[[Planner], None], ...] = (
    sum_opened,
    pending_forgotten,
    slot_leaked,
    slot_lost,
    slot_shared,
    bytes_miscounted,
    part_missing,
    generation_from_nowhere,
    edge_torn,
    child_below_nothing,
    wrong_start,
    leaf_forgotten,
    leaf_invented,
    tick_forgotten,
    pin_lost,
    lease_unknown_to_its_session,
    deadline_unwatched,
    quarantine_miscounted,
    writer_forgotten,
    row_leaked,
    unverified_miscounted,
)


def busy() -> Harness:
    h = Harness()
    h.store("abcd")
    h.store("abef")
    h.store("xy")
    h.acquire("abcd")
    h.reserve("xyzz")
    h.store("uv")
    assert node_of(h.planner, "uv").rank != NOT_QUEUED
    return h


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda each: each.__name__)
def test_sees_it(break_it: Callable[[Planner], None]) -> None:
    h = busy()
    if break_it in (leaf_forgotten, tick_forgotten):
        h.planner.handle  # noqa: B018 - "xy" has a child being filled; these need a leaf
        h = Harness()
        h.store("abcd")
        h.store("xy")
    invariants.check(h.planner)
    break_it(h.planner)
    with pytest.raises((invariants.InvariantError, AssertionError, KeyError)):
        invariants.check(h.planner)


def test_a_slot_in_a_slab_of_another_class() -> None:
    h = busy()
    space = h.planner.state.namespaces[1]
    space.strides = (8192,)
    with pytest.raises(invariants.InvariantError, match="another class"):
        invariants.check(h.planner)
    assert PartSpec(0, 1, 4097).stride_bytes == 8192
