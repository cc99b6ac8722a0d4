"""Priorities, the same for every policy: low leaves go first, high ones last, the policy decides among all others.

Rules: only leaves are divided, by the priority of their tail, so a prefix still loses its tail first and what is in
front of a high block stays with it. Low and high leaves wait in an LRU order of their own; the policy is told of all
blocks, whatever their priority, so it knows all there is to know when a leaf comes to it. Nothing is kept for ever and
nothing is starved: what was not used for `fades_s` has no priority any more: a high leaf is the policy's then, and a
leaf of the policy's goes before a low one that was used since. Where nobody asks for one this costs a step or two.
Which order has a leaf is in `Node.band`. Must not know: who asks for which priority.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from prefixcache.core.ids import Rows
from prefixcache.core.policy.base import Bids, Birth, Clock, EvictionPolicy, equal_tail, tail_row
from prefixcache.core.policy.lru import LeafLru
from prefixcache.core.radix import NOT_QUEUED, Node
from prefixcache.core.table import HIGH, LOW, NORMAL

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace

_SAMPLES: Final = 16  # of time, within `fades_s`: a leaf fades up to a sixteenth of it late


class Prioritised:
    """An `EvictionPolicy` around another one."""

    def __init__(self, policy: EvictionPolicy, clock: Clock, fades_s: float) -> None:
        self.policy = policy
        self.remembers = policy.remembers
        self.low = LeafLru()
        self.high = LeafLru()
        self._chosen: EvictionPolicy = policy
        self._clock = clock
        self._fades_s = fades_s
        self._times: list[float] = []
        self._ticks: list[int] = []

    def add_leaf(self, node: Node, tick: int) -> None:
        space = node.space
        if space is None or not space.table.prioritised:
            node.band = NORMAL
            self.policy.add_leaf(node, tick)
            return
        self._note_time()
        node.band = int(space.table.priority[tail_row(node)])
        self._order(node).add_leaf(node, tick)

    def touch_leaf(self, node: Node, tick: int) -> None:
        space = node.space
        if space is None or not space.table.prioritised:
            self.policy.touch_leaf(node, tick)
            return
        self._note_time()
        if node.band == NORMAL and node.rank != NOT_QUEUED and space.table.priority[tail_row(node)] != NORMAL:
            self.retick_leaf(node, tick)  # it had faded
        else:
            self._order(node).touch_leaf(node, tick)

    def retick_leaf(self, node: Node, tick: int) -> None:
        if node.band == NORMAL and (node.space is None or not node.space.table.prioritised):
            self.policy.retick_leaf(node, tick)
        else:
            self.remove_leaf(node)
            self.add_leaf(node, tick)

    def remove_leaf(self, node: Node) -> None:
        self._order(node).remove_leaf(node)
        node.band = NORMAL

    def victim(self) -> Node | None:
        if self.high.leaf_count():
            self._let_fade()
        low = self.low.victim()
        self._chosen = self.policy
        node = self.policy.victim()
        if low is not None and (node is None or not self._is_older(node, low)):
            self._chosen, node = self.low, low
        elif node is None:
            self._chosen, node = self.high, self.high.victim()
        return node

    def victim_worth(self) -> float:
        return self._chosen.victim_worth()

    def run_length(self, node: Node, most: int) -> int:
        run = self._order(node).run_length(node, most)
        space = node.space
        if run == 1 or space is None or not space.table.prioritised:
            return run
        priorities = space.table.priority[node.row_array()[-run:]]
        return equal_tail(priorities != priorities[-1])

    def leaf_count(self) -> int:
        return self.low.leaf_count() + self.policy.leaf_count() + self.high.leaf_count()

    def expected(self, space: Namespace, keys: bytes, birth: Birth) -> Bids | None:
        return self.policy.expected(space, keys, birth)

    def refused(self, space: Namespace, keys: bytes, birth: Birth) -> None:
        self.policy.refused(space, keys, birth)

    def used(self, space: Namespace, rows: Rows) -> None:
        self.policy.used(space, rows)

    def stored(self, space: Namespace, node: Node, birth: Birth) -> None:
        self.policy.stored(space, node, birth)

    def evicted(self, space: Namespace, node: Node, count: int) -> None:
        self.policy.evicted(space, node, count)

    def forgotten(self, space: Namespace, rows: Rows) -> None:
        self.policy.forgotten(space, rows)

    def faded_tick(self) -> int:
        """What was not used since this tick has no priority any more."""
        self._note_time()
        known = bisect_right(self._times, self._clock.now - self._fades_s)
        return self._ticks[known - 1] if known else -1

    def _order(self, node: Node) -> EvictionPolicy:
        if node.band == NORMAL:
            return self.policy
        return self.low if node.band == LOW else self.high

    def _is_older(self, node: Node, low: Node) -> bool:
        """Whether a leaf of the policy's was not used for so long that it goes before a low one."""
        return node.tick < low.tick and node.tick <= self.faded_tick()

    def _let_fade(self) -> None:
        faded = self.faded_tick()
        while (node := self.high.victim()) is not None and node.tick <= faded:
            assert node.band == HIGH
            self.high.remove_leaf(node)
            node.band = NORMAL
            self.policy.add_leaf(node, node.tick)

    def _note_time(self) -> None:
        """Times are ends of short spans, each with the last tick in it: so what is seen as old is at least as old."""
        now, times, ticks = self._clock.now, self._times, self._ticks
        if times and now < times[-1]:
            ticks[-1] = self._clock.tick
            return
        times.append(now + self._fades_s / _SAMPLES)
        ticks.append(self._clock.tick)
        if len(times) > 4 * _SAMPLES:
            # Only the last sample before the fading time, and those behind it, will ever be asked for again.
            needless = max(bisect_right(times, now - self._fades_s) - 1, 0)
            del times[:needless], ticks[:needless]
