"""Two orders of leaves where there is a disk: those whose tail is on disk already, and the others.

Rules: room is made from clean leaves first, because that loses nothing; within each of the two the policy decides.
Which one has a leaf is in `Node.clean`: how many blocks off its tail are on disk, 0 for the other order.
"""

from __future__ import annotations

import numpy as np

from prefixcache.core.policy.base import EvictionPolicy, Forgetful, equal_tail
from prefixcache.core.radix import NOT_QUEUED, Node

_LOOKED_AT = 256  # blocks off a tail; a longer clean stretch counts as this long


class TieredLeaves(Forgetful):
    """An `EvictionPolicy` made of two. `clean_blocks`: blocks that could leave memory now and lose nothing."""

    def __init__(self, clean: EvictionPolicy, dirty: EvictionPolicy) -> None:
        self.clean = clean
        self.dirty = dirty
        self.clean_blocks = 0

    def add_leaf(self, node: Node, tick: int) -> None:
        node.clean = _clean_tail(node)
        self.clean_blocks += node.clean
        self._side(node).add_leaf(node, tick)

    def touch_leaf(self, node: Node, tick: int) -> None:
        self._side(node).touch_leaf(node, tick)

    def retick_leaf(self, node: Node, tick: int) -> None:
        self.remove_leaf(node)
        self.add_leaf(node, tick)

    def remove_leaf(self, node: Node) -> None:
        if node.rank != NOT_QUEUED:
            self.clean_blocks -= node.clean
        self._side(node).remove_leaf(node)
        node.clean = 0

    def victim(self) -> Node | None:
        return self.clean.victim() or self.dirty.victim()

    def run_length(self, node: Node, most: int) -> int:
        space = node.space
        if most == 1 or space is None:
            return 1
        tail = node.row_array()[-most:]
        touched = space.table.touched[tail]
        differs = touched != touched[-1]
        if space.on_disk:
            clean = space.table.is_clean(tail)
            differs |= clean != clean[-1]
        return equal_tail(differs)

    def leaf_count(self) -> int:
        return self.clean.leaf_count() + self.dirty.leaf_count()

    def _side(self, node: Node) -> EvictionPolicy:
        return self.clean if node.clean else self.dirty


def _clean_tail(node: Node) -> int:
    """How many blocks off its tail are on disk."""
    space = node.space
    if space is None or not space.on_disk:
        return 0
    dirty = np.flatnonzero(~space.table.is_clean(node.row_array()[-_LOOKED_AT:]))
    looked_at = min(node.count, _LOOKED_AT)
    return looked_at - (int(dirty[-1]) + 1 if len(dirty) else 0)
