"""Leaf-first S3-FIFO: a small queue that new blocks must survive, a main queue, and ghosts of those that did not.

Rules: as Yang et al. have it, counted in blocks: the small queue gives way while it is over a tenth of the capacity;
its leaves that were hit more than once move on to the main queue; leaves of the main queue that were hit go round
again, with one hit less. A block whose ghost is still known goes to the main queue at once. "Oldest" is the oldest
*leaf*. Capacity is the most blocks there ever were, and that many ghosts are kept. Must not know: time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from prefixcache.core.ids import Rows
from prefixcache.core.policy.base import Birth, equal_tail, tail_row
from prefixcache.core.policy.heap import HeapPolicy, LeafHeap
from prefixcache.core.policy.memory import Columns, Ghosts, Population, ghost_keys, tail_keys
from prefixcache.core.radix import Node

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace

_SMALL: Final = 1
_MAIN: Final = 2
_SMALL_SHARE: Final = 10
_MOST_HITS: Final = 3


class LeafS3Fifo(HeapPolicy):
    """See the module's rules. Columns: queue, hits since it came or went round, place in its queue."""

    def __init__(self) -> None:
        super().__init__()
        self._columns = Columns([("queue", "u1"), ("hits", "u1"), ("place", "<i8")])
        self._heaps = {_SMALL: LeafHeap(), _MAIN: LeafHeap()}
        self._small = 0
        self._ghosts: Ghosts[bool] = Ghosts()
        self._population = Population()
        self._places = 0

    def victim(self) -> Node | None:
        """Ends: a leaf is passed over at most once for each of its hits, and once to leave the small queue."""
        while True:
            small = self._heaps[_SMALL].first()
            main = self._heaps[_MAIN].first()
            node = small if small and (self._small * _SMALL_SHARE > self._population.peak or main is None) else main
            if node is None or not self._passed_over(node):
                return node

    def run_length(self, node: Node, most: int) -> int:
        """As many as came together and would not be passed over, and not more than the small queue is too long."""
        if most == 1 or node.space is None:
            return 1
        tail = self._columns.of(node.space)[node.row_array()[-most:]]
        queue = tail["queue"][-1]
        places = tail["place"] + np.arange(len(tail))
        run = equal_tail((tail["queue"] != queue) | (tail["hits"] > (queue == _SMALL)) | (places != places[-1]))
        surplus = -(-(self._small * _SMALL_SHARE - self._population.peak) // _SMALL_SHARE)
        return run if queue == _MAIN else min(run, max(surplus, 1))

    def used(self, space: Namespace, rows: Rows) -> None:
        hits = self._columns.of(space)["hits"]
        hits[rows] = np.minimum(hits[rows] + 1, _MOST_HITS)

    def stored(self, space: Namespace, node: Node, birth: Birth) -> None:
        rows = node.row_array()
        columns = self._columns.of(space)
        queues = [_MAIN if self._ghosts.pop(key) else _SMALL for key in ghost_keys(node.edge)]
        columns["queue"][rows] = queues
        columns["hits"][rows] = 0
        # The tail came first: it is the one that may go first.
        columns["place"][rows] = np.arange(self._places + len(rows), self._places, -1)
        self._places += len(rows)
        self._small += queues.count(_SMALL)
        self._population.add(len(rows))

    def evicted(self, space: Namespace, node: Node, count: int) -> None:
        queues = self._columns.of(space)["queue"][node.row_array()[-count:]].tolist()
        for key, queue in zip(tail_keys(node, count), reversed(queues), strict=True):
            if queue == _SMALL:
                self._ghosts.add(key, True)
        self._ghosts.trim(self._population.peak)

    def forgotten(self, space: Namespace, rows: Rows) -> None:
        queues = self._columns.of(space)["queue"]
        self._small -= int(np.count_nonzero(queues[rows] == _SMALL))
        self._population.live -= int(np.count_nonzero(queues[rows]))
        queues[rows] = 0

    def _passed_over(self, node: Node) -> bool:
        space = node.space
        assert space is not None
        columns = self._columns.of(space)
        row = tail_row(node)
        hits, small = int(columns["hits"][row]), columns["queue"][row] == _SMALL
        if hits <= small:
            return False
        columns["queue"][row] = _MAIN
        columns["hits"][row] = 0 if small else hits - 1
        self._places += 1
        columns["place"][row] = self._places
        self._small -= int(small)
        self._place(node)
        return True

    def _place(self, node: Node) -> None:
        space = node.space
        assert space is not None
        entry = self._columns.of(space)[tail_row(node)]
        self._heaps[int(entry["queue"]) or _SMALL].push(node, int(entry["place"]))
