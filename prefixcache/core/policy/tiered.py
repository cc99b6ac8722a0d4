"""Two orders of leaves where there is a disk: those whose tail is on disk already, and the others.

Rules: where the disk brings a block back faster than it is computed (`clean_first`, told by the loader), room is made
from clean leaves first, because that loses nothing. Where it does not, what is on disk is as good as gone, and the two
are one order: of the two victims the one of lower priority goes, of equal ones the one that is worth less, at last the
older, as without a disk; clean ones first would take what is hit most. Within each of the two the policy decides, of
which there is one instance each. Leaves are divided between them, blocks are told to both, so both know all there is to
know. A block that leaves memory for the disk is evicted for them, one that comes back is stored again.
Which one has a leaf is in `Node.clean`: how many blocks off its tail are on disk, 0 for the other order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from prefixcache.core.ids import Rows
from prefixcache.core.namespaces import Namespace
from prefixcache.core.policy.base import Bids, Birth, EvictionPolicy, equal_tail
from prefixcache.core.radix import NOT_QUEUED, Node

_LOOKED_AT = 256  # blocks off a tail; a longer clean stretch counts as this long


class TieredLeaves:
    """An `EvictionPolicy` made of two. `clean_blocks`: blocks that could leave memory now and lose nothing."""

    def __init__(self, make: Callable[[], EvictionPolicy]) -> None:
        self.clean = make()
        self.dirty = make()
        self.both = (self.clean, self.dirty)
        self.clean_blocks = 0
        self.clean_first = True  # until somebody says how long computing takes
        self._chosen = self.dirty

    @property
    def remembers(self) -> bool:
        return self.dirty.remembers

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
        clean = self.clean.victim()
        self._chosen = self.clean
        if clean is not None and self.clean_first:
            return clean
        dirty = self.dirty.victim()
        if dirty is None or (clean is not None and self._goes_before(clean, dirty)):
            return clean
        self._chosen = self.dirty
        return dirty

    def victim_worth(self) -> float:
        return self._chosen.victim_worth()

    def run_length(self, node: Node, most: int) -> int:
        run = self._side(node).run_length(node, most)
        space = node.space
        if run == 1 or space is None or not space.on_disk:
            return run
        ways = space.ways_out(node.row_array()[-run:])
        return equal_tail(ways != ways[-1])

    def leaf_count(self) -> int:
        return self.clean.leaf_count() + self.dirty.leaf_count()

    def expected(self, space: Namespace, keys: bytes, birth: Birth) -> Bids | None:
        """Nothing stays out where the disk is fast: what is worth little in memory may be worth its place on disk,
        which it reaches through memory only."""
        self.clean.expected(space, keys, birth)
        bids = self.dirty.expected(space, keys, birth)
        return None if self.clean_first else bids

    def refused(self, space: Namespace, keys: bytes, birth: Birth) -> None:
        for policy in self.both:
            policy.refused(space, keys, birth)

    def used(self, space: Namespace, rows: Rows) -> None:
        for policy in self.both:
            policy.used(space, rows)

    def stored(self, space: Namespace, node: Node, birth: Birth) -> None:
        for policy in self.both:
            policy.stored(space, node, birth)

    def evicted(self, space: Namespace, node: Node, count: int) -> None:
        for policy in self.both:
            policy.evicted(space, node, count)

    def forgotten(self, space: Namespace, rows: Rows) -> None:
        for policy in self.both:
            policy.forgotten(space, rows)

    def _goes_before(self, clean: Node, dirty: Node) -> bool:
        """Which of the two victims goes, where both are as good as gone then."""
        if clean.band != dirty.band:
            return clean.band < dirty.band
        worths = self.clean.victim_worth(), self.dirty.victim_worth()
        return clean.tick <= dirty.tick if worths[0] == worths[1] else worths[0] < worths[1]

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
