"""Leaves in the order of a priority: a heap whose entries go stale instead of being moved.

Rules: an entry counts while the node's rank is its serial, so a change is one push and a removal is one assignment.
Stale entries are swept out when they are more than those that were there after the last sweep.
Must not know: what a priority means.
"""

from __future__ import annotations

import heapq
from typing import Any

from prefixcache.core.policy.base import SERIALS, Forgetful, run_of_one_use
from prefixcache.core.radix import NOT_QUEUED, Node

_TOLERATED = 64


class LeafHeap:
    """One order. A node is in the one it was pushed to last, of all there are."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, Node]] = []
        self._limit = _TOLERATED

    def push(self, node: Node, priority: Any) -> None:
        """Puts `node` in its place; among equals the one pushed first goes first."""
        node.rank = next(SERIALS)
        heapq.heappush(self._entries, (priority, node.rank, node))
        if len(self._entries) > self._limit:
            self._entries = [entry for entry in self._entries if entry[2].rank == entry[1]]
            heapq.heapify(self._entries)
            self._limit = 2 * len(self._entries) + _TOLERATED

    def first(self) -> Node | None:
        """The node with the least priority."""
        entries = self._entries
        while entries:
            node = entries[0][2]
            if node.rank == entries[0][1]:
                return node
            heapq.heappop(entries)
        return None

    def __len__(self) -> int:
        """Entries, stale ones included (for checks)."""
        return len(self._entries)


class HeapPolicy(Forgetful):
    """The leaf side of a policy that gives each leaf a place in a heap. It says which by `_place`."""

    remembers = True

    def __init__(self) -> None:
        self._leaves = 0

    def _place(self, node: Node) -> None:
        """Pushes a leaf to where it belongs now."""
        raise AssertionError("every heap policy places its leaves")

    def add_leaf(self, node: Node, tick: int) -> None:
        node.tick = tick
        self._leaves += 1
        self._place(node)

    def touch_leaf(self, node: Node, tick: int) -> None:
        node.tick = tick
        if node.rank != NOT_QUEUED:
            self._place(node)

    def retick_leaf(self, node: Node, tick: int) -> None:
        self.touch_leaf(node, tick)

    def remove_leaf(self, node: Node) -> None:
        if node.rank != NOT_QUEUED:
            self._leaves -= 1
            node.rank = NOT_QUEUED

    def run_length(self, node: Node, most: int) -> int:
        """Only as many as were used together, or the order would not be exact."""
        return run_of_one_use(node, most)

    def leaf_count(self) -> int:
        return self._leaves
