"""Leaf-first ARC: blocks used once and blocks used again in two LRU orders whose shares adapt to what is missed.

Rules: as Megiddo and Modha have it, counted in blocks, except that the victim of a list is its least recently used
*leaf*, and the other list's where a list has none. Ghosts of both lists together never exceed the capacity by more than
the blocks there are. Capacity is the most blocks there ever were. Must not know: time in seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from prefixcache.core.ids import Rows
from prefixcache.core.policy.base import Bids, Birth, equal_tail, tail_row
from prefixcache.core.policy.heap import HeapPolicy, LeafHeap
from prefixcache.core.policy.memory import Columns, Ghosts, Population, ghost_keys, tail_keys
from prefixcache.core.radix import Node

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace

_ONCE: Final = 1
_AGAIN: Final = 2


class LeafArc(HeapPolicy):
    """See the module's rules. `_share` is the target size of the list of blocks used once."""

    def __init__(self) -> None:
        super().__init__()
        self._columns = Columns([("list", "u1")])
        self._heaps = {_ONCE: LeafHeap(), _AGAIN: LeafHeap()}
        self._sizes = {_ONCE: 0, _AGAIN: 0}
        self._ghosts: dict[int, Ghosts[None]] = {_ONCE: Ghosts(), _AGAIN: Ghosts()}
        self._population = Population()
        self._share = 0.0

    def victim(self) -> Node | None:
        first = _ONCE if self._sizes[_ONCE] > self._share else _AGAIN
        return self._heaps[first].first() or self._heaps[_ONCE + _AGAIN - first].first()

    def run_length(self, node: Node, most: int) -> int:
        """Of one use and one list, and not more than the list is too long."""
        run = super().run_length(node, most)
        if run == 1 or node.space is None:
            return run
        lists = self._columns.of(node.space)["list"][node.row_array()[-run:]]
        surplus = self._sizes[_ONCE] - int(self._share)
        return min(equal_tail(lists != lists[-1]), surplus if lists[-1] == _ONCE and surplus > 0 else run)

    def expected(self, space: Namespace, keys: bytes, birth: Birth) -> Bids | None:
        """A ghost that is wanted back says which list is too short."""
        once, again = self._ghosts[_ONCE], self._ghosts[_AGAIN]
        for key in ghost_keys(keys):
            if key in once:
                self._share = min(self._share + max(1.0, len(again) / len(once)), float(self._population.peak))
            elif key in again:
                self._share = max(self._share - max(1.0, len(once) / len(again)), 0.0)
        return None

    def used(self, space: Namespace, rows: Rows) -> None:
        lists = self._columns.of(space)["list"]
        promoted = int(np.count_nonzero(lists[rows] == _ONCE))
        self._sizes[_ONCE] -= promoted
        self._sizes[_AGAIN] += promoted
        lists[rows] = _AGAIN

    def stored(self, space: Namespace, node: Node, birth: Birth) -> None:
        rows = node.row_array()
        came = [self._list_of_new(key) for key in ghost_keys(node.edge)]
        self._columns.of(space)["list"][rows] = came
        once = came.count(_ONCE)
        self._sizes[_ONCE] += once
        self._sizes[_AGAIN] += len(came) - once
        self._population.add(len(came))

    def evicted(self, space: Namespace, node: Node, count: int) -> None:
        lists = self._columns.of(space)["list"][node.row_array()[-count:]].tolist()
        for key, which in zip(tail_keys(node, count), reversed(lists), strict=True):
            if which:
                self._ghosts[which].add(key, None)
        capacity = self._population.peak
        self._ghosts[_ONCE].trim(max(0, capacity - self._sizes[_ONCE] + lists.count(_ONCE)))
        self._ghosts[_AGAIN].trim(capacity - min(capacity, len(self._ghosts[_ONCE])))

    def forgotten(self, space: Namespace, rows: Rows) -> None:
        lists = self._columns.of(space)["list"]
        for which in (_ONCE, _AGAIN):
            count = int(np.count_nonzero(lists[rows] == which))
            self._sizes[which] -= count
            self._population.live -= count
        lists[rows] = 0

    def _list_of_new(self, key: bytes) -> int:
        for ghosts in self._ghosts.values():
            if key in ghosts:
                ghosts.pop(key)
                return _AGAIN
        return _ONCE

    def _place(self, node: Node) -> None:
        space = node.space
        assert space is not None
        which = int(self._columns.of(space)["list"][tail_row(node)])
        self._heaps[which or _ONCE].push(node, node.tick)
