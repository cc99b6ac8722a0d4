"""Heaps, leaf tables, ghosts, columns and lots: the parts that policies are made of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.core.policy.base import Clock
from prefixcache.core.policy.heap import LeafHeap
from prefixcache.core.policy.leaves import LeafTable
from prefixcache.core.policy.memory import Ghosts, ghost_keys, tail_keys
from prefixcache.core.policy.names import DEFAULT, NAMES
from prefixcache.core.policy.registry import POLICIES, make_policy
from prefixcache.core.policy.sampling import Sampler
from prefixcache.core.radix import NOT_QUEUED, Node


def leaf() -> Node:
    return Node(None, None, 0, b"", b"")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.booleans()), max_size=300))
def test_a_heap_gives_the_least_of_what_is_still_in_it(steps: list[tuple[int, int, bool]]) -> None:
    heap = LeafHeap()
    nodes = [leaf() for _ in range(10)]
    model: dict[int, int] = {}
    for which, priority, leaves in steps:
        if leaves:
            nodes[which].rank = NOT_QUEUED
            model.pop(which, None)
        else:
            heap.push(nodes[which], priority)
            model[which] = priority
        first = heap.first()
        if first is None:
            assert not model
        else:
            assert model[nodes.index(first)] == min(model.values())
        assert len(heap) <= 2 * len(nodes) + 65


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=400))
def test_a_leaf_table_stays_dense_and_right(steps: list[int]) -> None:
    table = LeafTable()
    held: dict[int, tuple[Node, int, float]] = {}
    for number, step in enumerate(steps):
        if step in held:
            table.remove(held.pop(step)[0])
        else:
            node = leaf()
            table.add(node, step, float(number))
            held[step] = (node, step, float(number))
        if held:
            node, kind, _ = held[min(held)]
            table.change(node, kind, -1.0)
            held[min(held)] = (node, kind, -1.0)
    assert len(table) == len(held)
    for node, kind, time_s in held.values():
        kinds, times = table.at(np.array([node.rank]))
        assert (table.node(node.rank), kinds[0], times[0]) == (node, kind, time_s)


def test_a_leaf_table_grows_and_forgets_who_left() -> None:
    table = LeafTable()
    nodes = [leaf() for _ in range(1000)]
    for number, node in enumerate(nodes):
        table.add(node, number, 0.0)
    table.remove(nodes[0])
    assert nodes[0].rank == NOT_QUEUED
    assert table.node(0) is nodes[-1]
    assert table.at(np.array([0]))[0].tolist() == [999]


def test_ghosts_go_oldest_first_and_come_back_newest() -> None:
    ghosts: Ghosts[int] = Ghosts()
    for number, key in enumerate((b"a", b"b", b"c", b"a")):
        ghosts.add(key, number)
    assert ghosts.get(b"a") == 3
    ghosts.trim(2)
    assert (b"b" in ghosts, len(ghosts)) == (False, 2)
    assert ghosts.pop_oldest() == 2
    assert (ghosts.pop(b"a"), ghosts.pop(b"a"), ghosts.get(b"a")) == (3, None, None)


def test_names_of_ghosts_are_whole_keys_beginnings_tail_first() -> None:
    edge = b"".join(bytes([letter]) * 32 for letter in b"abc")
    assert list(ghost_keys(edge)) == [b"a" * 12, b"b" * 12, b"c" * 12]
    assert tail_keys(Node(None, None, 0, edge, bytes(12)), 2) == [b"c" * 12, b"b" * 12]


def test_lots_depend_on_the_seed_alone_and_are_fair() -> None:
    drawn = [np.concatenate([sampler.indices(10) for _ in range(200)]) for sampler in (Sampler(5, 64), Sampler(5, 64))]
    assert (drawn[0] == drawn[1]).all()
    assert not (drawn[0] == np.concatenate([Sampler(6, 64).indices(10)] * 200)).all()
    shares = np.bincount(drawn[0], minlength=10) / len(drawn[0])
    assert len(shares) == 10
    assert shares == pytest.approx(np.full(10, 0.1), abs=0.015)


@given(st.integers(0, 1 << 70), st.integers(1, (1 << 32) - 1))
def test_lots_are_within_bounds(seed: int, bound: int) -> None:
    lots = Sampler(seed, 8).indices(bound)
    assert ((lots >= 0) & (lots < bound)).all()


def test_every_name_makes_a_policy_and_nothing_else_does() -> None:
    assert set(POLICIES) == set(NAMES)
    assert DEFAULT in NAMES
    for name in NAMES:
        policy = make_policy(name, Clock(), 1)
        assert policy.leaf_count() == 0
        assert policy.victim() is None
    with pytest.raises(ValueError, match="no policy 'fifo'; there are lru, "):
        make_policy("fifo", Clock(), 1)
