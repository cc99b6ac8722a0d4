"""Which node a row is in, for those who come with a row: a record that was read, a segment that is freed.

Rules: kept only where a namespace may be on disk, so that nobody else pays for it. A number per node, a number per row;
never looked up on a request's path. Must not know: what is in a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.ids import Rows
from prefixcache.core.radix import ROW_BYTES, Node, subtree

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace


class NodeIndex:
    """See the module's rules."""

    def __init__(self) -> None:
        self.by_number: dict[int, Node] = {}
        self._of_row: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._next = 1

    def add(self, node: Node) -> None:
        """A new node, with the rows it has now."""
        node.number = self._next
        self._next += 1
        self.by_number[node.number] = node
        self._put(node.row_array(), node.first_row, node.number)

    def move(self, source: Node, target: Node) -> None:
        """All rows of `source` become `target`'s, and `source` is no more."""
        self._put(source.row_array(), source.first_row, target.number)
        del self.by_number[source.number]

    def drop(self, node: Node) -> None:
        """The node is no more; its rows are forgotten one by one as they are released."""
        del self.by_number[node.number]

    def forget(self, rows: Rows) -> None:
        """Rows were released."""
        self._of_row[rows] = 0

    def node_of(self, row: int) -> Node | None:
        """The node of a row in use."""
        return self.by_number.get(int(self._of_row[row])) if row < len(self._of_row) else None

    def numbers(self, rows: Rows) -> NDArray[np.uint32]:
        """Numbers of the nodes of some rows in use."""
        return self._of_row[rows]

    def _put(self, rows: Rows, first_row: int, number: int) -> None:
        top = first_row + len(rows) if first_row >= 0 else int(rows.max()) + 1
        if top > len(self._of_row):
            grown = np.zeros(max(top, len(self._of_row) * 3 // 2, 1024), np.uint32)
            grown[: len(self._of_row)] = self._of_row
            self._of_row = grown
        if first_row >= 0:
            self._of_row[first_row:top] = number
        else:
            self._of_row[rows] = number


def find_row(space: Namespace, row: int) -> Node | None:
    """The node of a row by looking through the tree: rare, so no link is kept per block."""
    packed = row.to_bytes(ROW_BYTES, "little")
    for node in subtree(space.tree.root):
        if packed in node.rows and place_of(node, row) >= 0:
            return node
    return None


def place_of(node: Node, row: int) -> int:
    """Index of a row in a node, -1 if it is not in it."""
    packed = row.to_bytes(ROW_BYTES, "little")
    at = node.rows.find(packed)
    while at >= 0 and at % ROW_BYTES:
        at = node.rows.find(packed, at + 1)
    return at // ROW_BYTES if at >= 0 else -1


def run_in(node: Node, rows: Rows) -> tuple[int, int]:
    """(place of the first of `rows` in its node, how many of them follow each other there)."""
    place = place_of(node, int(rows[0]))
    mine = node.row_array()[place : place + len(rows)]
    same = mine == rows[: len(mine)]
    return place, len(mine) if same.all() else int(np.argmin(same))
