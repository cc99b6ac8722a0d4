"""Leaf-first LRU-2: the leaf whose use before the last lies furthest back goes first.

Rules: a use is a prompt that hit the block, or its storing. Blocks used once go before all others, the longest unused
first. Evicted blocks keep the tick of their last use as ghosts, 4 for each block that fits, so a block that comes back
counts as used twice. Must not know: time in seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prefixcache.core.ids import Rows
from prefixcache.core.policy.base import Birth, Clock, equal_tail, tail_row
from prefixcache.core.policy.heap import HeapPolicy, LeafHeap
from prefixcache.core.policy.memory import GHOSTS_PER_BLOCK, Columns, Ghosts, Population, ghost_keys, tail_keys
from prefixcache.core.radix import Node

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace


class LeafLru2(HeapPolicy):
    """See the module's rules. Columns: last and last but one use (ticks; 0: never)."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._heap = LeafHeap()
        self._columns = Columns([("last", "<u8"), ("before", "<u8")])
        self._ghosts: Ghosts[int] = Ghosts()
        self._population = Population()

    def victim(self) -> Node | None:
        return self._heap.first()

    def run_length(self, node: Node, most: int) -> int:
        if most == 1 or node.space is None:
            return 1
        tail = self._columns.of(node.space)[node.row_array()[-most:]]
        return equal_tail(tail != tail[-1])

    def used(self, space: Namespace, rows: Rows) -> None:
        columns = self._columns.of(space)
        columns["before"][rows] = columns["last"][rows]
        columns["last"][rows] = self._clock.tick

    def stored(self, space: Namespace, node: Node, birth: Birth) -> None:
        rows = node.row_array()
        columns = self._columns.of(space)
        columns["before"][rows] = [self._ghosts.pop(key) or 0 for key in ghost_keys(node.edge)]
        columns["last"][rows] = self._clock.tick
        self._population.add(len(rows))

    def evicted(self, space: Namespace, node: Node, count: int) -> None:
        last = self._columns.of(space)["last"][node.row_array()[-count:]].tolist()
        for key, tick in zip(tail_keys(node, count), reversed(last), strict=True):
            self._ghosts.add(key, tick)
        self._ghosts.trim(GHOSTS_PER_BLOCK * self._population.peak)

    def forgotten(self, space: Namespace, rows: Rows) -> None:
        last = self._columns.of(space)["last"]
        self._population.live -= int(np.count_nonzero(last[rows]))
        last[rows] = 0

    def _place(self, node: Node) -> None:
        space = node.space
        assert space is not None
        row = tail_row(node)
        entry = self._columns.of(space)[row]
        self._heap.push(node, (int(entry["before"]), int(entry["last"])))
