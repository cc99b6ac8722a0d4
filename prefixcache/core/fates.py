"""What would become of a segment's blocks if it were given back: which must be kept, from where on a path may leave.

Rules: looks only, and at some nodes at a time, deepest first: a block may leave when nothing stays below it, it is not
pinned and, with mercy, was not hit. All blocks of the nodes are looked at in one go, because a look at each node costs
ten times as much. A number of a node may name nothing any more when its turn comes: then there is nothing to look at.
Must not know: why room is wanted, who gives it back.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.disk import Disk, Segment
from prefixcache.core.ids import NO_SLOT, Rows
from prefixcache.core.namespaces import Namespace
from prefixcache.core.radix import ROW_DTYPE, Node


class NodesOf:
    """The nodes that have records in a segment, namespace by namespace, deepest first, to be taken piece by piece."""

    def __init__(self, disk: Disk, segment: Segment) -> None:
        spaces: dict[Namespace, list[Rows]] = {}
        for space, _, rows, _ in disk.live_in(segment):
            spaces.setdefault(space, []).append(rows)
        self._left: deque[tuple[Namespace, list[int]]] = deque()
        for space, pieces in spaces.items():
            self.add(space, np.concatenate(pieces))

    def __bool__(self) -> bool:
        return bool(self._left)

    def add(self, space: Namespace, rows: Rows) -> None:
        """The nodes of some more rows, behind all others."""
        index = space.tree.index
        assert index is not None
        known = [number for number in np.unique(index.numbers(rows)).tolist() if number in index.by_number]
        if known:
            self._left.append((space, sorted(known, key=lambda number: index.by_number[number].start)))

    def take(self, most: int) -> tuple[Namespace, list[Node]]:
        """Up to `most` nodes of one namespace, those of them that are still there (DETACHED ones as well), deepest
        first."""
        space, numbers = self._left[0]
        index = space.tree.index
        assert index is not None
        mine = numbers[-most:]
        del numbers[-most:]
        if not numbers:
            self._left.popleft()
        return space, [index.by_number[number] for number in reversed(mine) if number in index.by_number]


class Look:
    """Some nodes of one namespace (at least one), deepest first, seen from one segment. Arrays hold all their blocks,
    node after node: `rows`; `here`: nothing but the segment has them (or, of a node in memory, a part of them)."""

    def __init__(self, space: Namespace, nodes: list[Node], segment: int) -> None:
        self.space = space
        self.nodes = nodes
        self.rows: Rows = np.frombuffer(b"".join([node.rows for node in nodes]), ROW_DTYPE)
        counts = np.array([node.count for node in nodes])
        self.first: NDArray[np.int64] = np.cumsum(counts) - counts
        self.node_of: NDArray[np.int64] = np.repeat(np.arange(len(nodes)), counts)
        self.places: NDArray[np.int64] = np.arange(len(self.rows)) - self.first[self.node_of]
        self.cold: NDArray[np.bool_] = space.table.cold[self.rows]
        self.here: NDArray[np.bool_] = np.zeros(len(self.rows), np.bool_)
        for column in space.table.parts:
            # Of a block in memory: a part that was not asked for when the others were loaded.
            self.here |= (column.segments[self.rows] == segment) & (self.cold | (column.slots[self.rows] == NO_SLOT))
        depths = np.array([node.pinned_depth() - node.start if node.pins else 0 for node in nodes])
        self._pinned: NDArray[np.bool_] = self.places < depths[self.node_of]
        self._hit: NDArray[np.bool_] = space.table.hits[self.rows] > 0

    def judge(self, gone: set[Node], *, mercy: bool) -> tuple[list[int], NDArray[np.bool_]]:
        """(place in each node from which on all its blocks may leave, its count where none may; bool[n]: blocks that
        must be kept). gone: nodes below these that are to leave as a whole; those of these that do are added."""
        stays = self._pinned | self._hit if mercy else self._pinned
        ends = np.maximum.reduceat(np.where(~self.here | stays, self.places + 1, 0), self.first).tolist()
        cuts = []
        for node, end in zip(self.nodes, ends, strict=True):
            cut = end if may_leave(node, gone) else node.count
            if not cut:
                gone.add(node)
            cuts.append(cut)
        kept: NDArray[np.bool_] = self.here & np.where(self.cold, self.places < np.array(cuts)[self.node_of], stays)
        return cuts, kept

    def of_node(self, place: int) -> slice:
        """Where the blocks of a node, by its place in `nodes`, are in the arrays."""
        first = int(self.first[place])
        return slice(first, first + self.nodes[place].count)


def may_leave(node: Node, gone: set[Node]) -> bool:
    """Whether the tail of a node may leave: it is on disk only and nothing below it stays."""
    return node.cold and not node.held and all(child in gone for child in (node.children or {}).values())
