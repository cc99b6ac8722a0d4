"""Held children and rows' nodes stay right through every change of the tree."""

from __future__ import annotations

import numpy as np

from prefixcache.core.namespaces import Namespace
from prefixcache.core.radix import ROW_DTYPE, Path, Pin, hot_from, pin_path, unpin
from tests.unit.core.disk_harness import DiskHarness
from tests.unit.core.harness import chain


def space_with(letters: str) -> Namespace:
    harness = DiskHarness()
    harness.store(letters)
    return harness.planner.state.namespaces[1]


def test_a_row_is_found_in_its_node_after_splits_and_joins() -> None:
    space = space_with("abcdef")
    index = space.tree.index
    assert index is not None
    (node,) = space.tree.walk(chain("abcdef")).nodes
    rows = node.row_array().tolist()
    upper = space.tree.split(node, 2)
    assert [index.node_of(row) for row in rows] == [upper] * 2 + [node] * 4
    space.tree.join(node)
    assert [index.node_of(row) for row in rows] == [node] * 6
    assert len(index.by_number) == 1


def test_a_released_row_is_in_no_node() -> None:
    space = space_with("ab")
    index = space.tree.index
    assert index is not None
    index.forget(np.array([0], np.uint32))
    assert index.node_of(0) is None
    assert index.node_of(99_999) is None


def test_a_pin_far_below_holds_what_is_in_memory_above() -> None:
    space = space_with("abcdef")
    tree = space.tree
    (node,) = tree.walk(chain("abcdef")).nodes
    upper = tree.split(node, 2)
    middle = tree.split(node, 2)
    tree.set_cold(node, cold=True)
    tree.set_cold(middle, cold=True)
    assert upper.held == 0
    pins: list[Pin] = []
    pin_path(node, 6, pins)
    assert (middle.held, upper.held) == (1, 1)
    assert hot_from(node) is upper
    unpin(pins.pop())
    assert (middle.held, upper.held) == (0, 0)


def test_something_in_memory_below_what_is_not_holds_it() -> None:
    space = space_with("abcd")
    tree = space.tree
    (node,) = tree.walk(chain("abcd")).nodes
    upper = tree.split(node, 2)
    tree.set_cold(upper, cold=True)
    assert (upper.held, upper.is_held) == (1, True)
    rows = space.table.allocate(1).astype(ROW_DTYPE).tobytes()
    below = tree.graft(Path([upper, node], 4), b"k" * 32, rows, cold=True)
    assert (node.held, below.is_held) == (0, False)
    tree.set_cold(node, cold=True)
    assert (upper.held, upper.is_held) == (0, False)
