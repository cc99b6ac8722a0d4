"""Leaf-first LRU.

Rules: exact order by the tick of each leaf's tail. A leaf used now goes to the end of a linked order in O(1), so a
lookup costs nothing that grows. A leaf that comes with an older tick (its children went, its tail went, its pin went)
waits in a heap beside it; the next victim is the older of the two fronts. A heap alone would be refilled all at once
by the first eviction after many lookups, which was the slowest call by far.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from prefixcache.core.policy.base import SERIALS, Forgetful, run_of_one_use
from prefixcache.core.radix import NOT_QUEUED, Node

_IN_ORDER = -2
_TOLERATED = 64  # stale heap entries that are not worth a clean-up


class LeafLru(Forgetful):
    """See `EvictionPolicy`. `rank` is _IN_ORDER, the serial of its heap entry, or NOT_QUEUED."""

    def __init__(self) -> None:
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._newest = -1  # tick at the end of the order
        self._aged: list[tuple[int, int, Node]] = []
        self._aged_live = 0

    def add_leaf(self, node: Node, tick: int) -> None:
        node.tick = tick
        if tick >= self._newest or not self._order:
            node.rank = _IN_ORDER
            self._order[node] = None
            self._newest = tick
            return
        node.rank = next(SERIALS)
        self._aged_live += 1
        heapq.heappush(self._aged, (tick, node.rank, node))
        self._compact()

    def touch_leaf(self, node: Node, tick: int) -> None:
        rank = node.rank
        if rank == _IN_ORDER:
            self._order.move_to_end(node)
        elif rank == NOT_QUEUED:
            node.tick = tick
            return
        else:
            self._aged_live -= 1
            node.rank = _IN_ORDER
            self._order[node] = None
        node.tick = tick
        self._newest = tick

    def retick_leaf(self, node: Node, tick: int) -> None:
        if tick != node.tick:
            self.remove_leaf(node)
            self.add_leaf(node, tick)

    def remove_leaf(self, node: Node) -> None:
        if node.rank == _IN_ORDER:
            del self._order[node]
        elif node.rank != NOT_QUEUED:
            self._aged_live -= 1
        node.rank = NOT_QUEUED

    def victim(self) -> Node | None:
        aged = self._aged
        while aged and aged[0][2].rank != aged[0][1]:
            heapq.heappop(aged)
        first = next(iter(self._order), None)
        if aged and (first is None or aged[0][0] < first.tick):
            return aged[0][2]
        return first

    def run_length(self, node: Node, most: int) -> int:
        return run_of_one_use(node, most)

    def leaf_count(self) -> int:
        return len(self._order) + self._aged_live

    def _compact(self) -> None:
        """Entries of leaves that moved on must not pile up beyond those that count."""
        if len(self._aged) > _TOLERATED and len(self._aged) > 2 * self._aged_live:
            self._aged = [entry for entry in self._aged if entry[2].rank == entry[1]]
            heapq.heapify(self._aged)
