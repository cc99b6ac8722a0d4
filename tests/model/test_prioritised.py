"""Priorities around leaf-first LRU beside a plain dict: the victim is always one of those that should go first."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixcache.core.ids import GroupKind
from prefixcache.core.namespaces import Namespace
from prefixcache.core.policy.base import Clock
from prefixcache.core.policy.lru import LeafLru
from prefixcache.core.policy.prioritised import Prioritised
from prefixcache.core.radix import NOT_QUEUED, ROW_DTYPE, Node
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec
from prefixcache.core.table import HIGH, LOW, NORMAL

FADES_S = 8.0
SPEC = NamespaceSpec(4, (GroupSpec(GroupKind.FULL),), (PartSpec(0, 1, 4096),))
priorities = st.sampled_from((LOW, NORMAL, NORMAL, HIGH))


class PrioritisedBesideDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.policy = Prioritised(LeafLru(), self.clock, FADES_S)
        self.space = Namespace(1, bytes(32), SPEC, self.policy)
        self.space.table.set_priority(self.space.table.allocate(1), HIGH)  # time is noted once somebody asks for one
        self.leaves: dict[Node, tuple[int, float, int]] = {}  # tick and time of last use, priority
        self.gone: list[Node] = []

    def now(self) -> tuple[int, float]:
        self.clock.tick += 1
        return self.clock.tick, self.clock.now

    def pick(self, which: int) -> Node | None:
        nodes = list(self.leaves)
        return nodes[which % len(nodes)] if nodes else None

    @rule(priority=priorities)
    def add(self, priority: int) -> None:
        tick, now = self.now()
        rows = self.space.table.allocate(1)
        self.space.table.set_priority(rows, priority)
        node = Node(self.space, None, 0, bytes(32), rows.astype(ROW_DTYPE).tobytes())
        self.policy.add_leaf(node, tick)
        self.leaves[node] = tick, now, priority

    @rule(which=st.integers(0, 50))
    def touch(self, which: int) -> None:
        node = self.pick(which)
        if node is not None:
            tick, now = self.now()
            self.policy.touch_leaf(node, tick)
            self.leaves[node] = tick, now, self.leaves[node][2]

    @rule(which=st.integers(0, 50), priority=priorities)
    def raised(self, which: int, priority: int) -> None:
        """Somebody stores it again, and wants it to be of this priority at least."""
        node = self.pick(which)
        if node is not None:
            tick, now = self.now()
            if self.space.table.raise_priority(node.row_array(), priority):
                self.policy.retick_leaf(node, tick)
            else:
                self.policy.touch_leaf(node, tick)
            self.leaves[node] = tick, now, max(priority, self.leaves[node][2])

    @rule(which=st.integers(0, 50))
    def remove(self, which: int) -> None:
        node = self.pick(which)
        if node is not None:
            self.policy.remove_leaf(node)
            self.policy.remove_leaf(node)  # twice is fine
            del self.leaves[node]
            self.gone.append(node)
            self.space.table.release(node.row_array())

    @rule()
    def evict(self) -> None:
        node = self.policy.victim()
        if node is not None:
            self.policy.remove_leaf(node)
            del self.leaves[node]
            self.space.table.release(node.row_array())

    @rule(seconds=st.sampled_from((0.4, 3.0, 9.0)))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def the_right_one_goes_next(self) -> None:
        victim = self.policy.victim()
        assert self.policy.leaf_count() == len(self.leaves)
        assert all(node.tick == told[0] for node, told in self.leaves.items())
        assert all(node.rank == NOT_QUEUED for node in self.gone)
        if victim is None:
            assert not self.leaves
            return
        # Time is sampled, so what was used between a little more than `fades_s` ago and that may be seen either way.
        slack = FADES_S / 8
        expected = {self.first(FADES_S), self.first(FADES_S + slack)}
        if len(expected) == 1 or self.is_certain(slack):
            assert victim in expected

    def first(self, fades_s: float) -> Node:
        def rank(node: Node) -> tuple[int, int]:
            tick, used, priority = self.leaves[node]
            return (LOW if self.clock.now - used >= fades_s else priority), tick

        return min(self.leaves, key=rank)

    def is_certain(self, slack: float) -> bool:
        ages = [self.clock.now - used for _, used, _ in self.leaves.values()]
        return not any(FADES_S <= age < FADES_S + slack for age in ages)


TestPrioritised = PrioritisedBesideDict.TestCase
TestPrioritised.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
