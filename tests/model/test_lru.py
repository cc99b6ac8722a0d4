"""Leaf-first LRU beside a plain dict of ticks: the victim is always one that was not used for longest."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixcache.core.policy.lru import LeafLru
from prefixcache.core.radix import NOT_QUEUED, Node


class LruBesideDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.lru = LeafLru()
        self.ticks: dict[Node, int] = {}
        self.gone: list[Node] = []
        self.now = 0

    def pick(self, which: int) -> Node | None:
        nodes = list(self.ticks)
        return nodes[which % len(nodes)] if nodes else None

    @rule(age=st.one_of(st.just(0), st.integers(0, 20)))
    def add(self, age: int) -> None:
        """New leaves are used now; a leaf that becomes one again may be of any age."""
        self.now += 1
        node = Node(None, None, 0, b"", b"")
        tick = max(0, self.now - age)
        self.lru.add_leaf(node, tick)
        self.ticks[node] = tick

    @rule(which=st.integers(0, 50))
    def touch(self, which: int) -> None:
        self.now += 1
        node = self.pick(which)
        if node is not None:
            self.lru.touch_leaf(node, self.now)
            self.ticks[node] = self.now

    @rule(which=st.integers(0, 50))
    def touch_unknown(self, which: int) -> None:
        if self.gone:
            self.lru.touch_leaf(self.gone[which % len(self.gone)], self.now)

    @rule(which=st.integers(0, 50), gain=st.integers(0, 5))
    def lose_tail(self, which: int, gain: int) -> None:
        """The tail in front of an old tail was used later, never after now."""
        node = self.pick(which)
        if node is not None:
            tick = min(self.now, self.ticks[node] + gain)
            self.lru.retick_leaf(node, tick)
            self.ticks[node] = tick

    @rule(which=st.integers(0, 50))
    def remove(self, which: int) -> None:
        node = self.pick(which)
        if node is not None:
            self.lru.remove_leaf(node)
            self.lru.remove_leaf(node)  # twice is fine
            del self.ticks[node]
            self.gone.append(node)

    @rule()
    def evict(self) -> None:
        node = self.lru.victim()
        if node is not None:
            self.lru.remove_leaf(node)
            del self.ticks[node]

    @invariant()
    def oldest_first(self) -> None:
        victim = self.lru.victim()
        assert self.lru.leaf_count() == len(self.ticks)
        if victim is None:
            assert not self.ticks
        else:
            assert self.ticks[victim] == min(self.ticks.values())
        assert all(node.tick == tick for node, tick in self.ticks.items())
        assert all(node.rank == NOT_QUEUED for node in self.gone)


TestLru = LruBesideDict.TestCase
TestLru.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
