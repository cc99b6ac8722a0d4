"""A leaf that moved from one order to another could be seen in both: an entry that it had left behind in the first had
the same number as its place in the second, because each order counted for itself."""

from __future__ import annotations

from prefixcache.core.policy.heap import LeafHeap
from prefixcache.core.policy.lru import LeafLru
from prefixcache.core.radix import Node


def leaf() -> Node:
    return Node(None, None, 0, b"", b"")


def test_an_order_forgets_a_leaf_that_went_to_another() -> None:
    first, second = LeafLru(), LeafLru()
    node = leaf()
    for order in (first, second):
        order.add_leaf(leaf(), 10)
    first.add_leaf(node, 1)  # older than the order's end: it waits in the heap
    first.remove_leaf(node)
    second.add_leaf(node, 1)
    assert second.victim() is node
    assert first.victim() is not node


def test_a_heap_forgets_a_leaf_that_was_pushed_to_another() -> None:
    first, second = LeafHeap(), LeafHeap()
    node = leaf()
    first.push(node, 1)
    second.push(node, 1)
    assert second.first() is node
    assert first.first() is None
