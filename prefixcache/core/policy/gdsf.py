"""Leaf-first GDSF: the leaf with the least (uses x recompute cost / bytes) goes first, with an age that rises; the
longest unused first among equals.

Rules: a token costs more to recompute the further back it can look; `ATTENTION_TOKENS` is the depth at which attention
costs as much as all else. Bytes are what the block's slots take. The age is the priority of the last victim, so what
was worth much once does not stay for ever. Must not know: time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from prefixcache.core.ids import Rows
from prefixcache.core.policy.base import Birth, equal_tail, tail_row
from prefixcache.core.policy.heap import HeapPolicy, LeafHeap
from prefixcache.core.policy.memory import Columns
from prefixcache.core.radix import Node

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace

ATTENTION_TOKENS: Final = 30_000  # an 8B model: 2 x 8e9 operations a token, and 0.5e6 for each token it looks back at


class LeafGdsf(HeapPolicy):
    """See the module's rules. Columns: cost per byte, uses, priority."""

    def __init__(self) -> None:
        super().__init__()
        self._heap = LeafHeap()
        self._columns = Columns([("cost", "<f8"), ("uses", "<u4"), ("priority", "<f8")])
        self._age = 0.0

    def victim(self) -> Node | None:
        return self._heap.first()

    def run_length(self, node: Node, most: int) -> int:
        """What is worth less than the least of the leaves is the next victim in any case."""
        if most == 1 or node.space is None:
            return 1
        priorities = self._columns.of(node.space)["priority"][node.row_array()[-most:]]
        stays = priorities >= priorities[-1]
        stays[-1] = False
        return equal_tail(stays)

    def used(self, space: Namespace, rows: Rows) -> None:
        columns = self._columns.of(space)
        columns["uses"][rows] += 1
        columns["priority"][rows] = self._age + columns["uses"][rows] * columns["cost"][rows]

    def stored(self, space: Namespace, node: Node, birth: Birth) -> None:
        rows = node.row_array()
        columns = self._columns.of(space)
        depth = (node.start + np.arange(len(rows))) * space.block_tokens
        cost = space.block_tokens * (1 + depth / ATTENTION_TOKENS) / sum(space.strides)
        columns["cost"][rows] = cost
        columns["uses"][rows] = 1
        columns["priority"][rows] = self._age + cost

    def evicted(self, space: Namespace, node: Node, count: int) -> None:
        self._age = max(self._age, float(self._columns.of(space)["priority"][node.row_array()[-count:]].max()))

    def forgotten(self, space: Namespace, rows: Rows) -> None:
        """A row that is given to another block is written anew."""

    def _place(self, node: Node) -> None:
        space = node.space
        assert space is not None
        priority = float(self._columns.of(space)["priority"][tail_row(node)])
        self._heap.push(node, (priority, node.tick))
