"""What is told of blocks that come, move and go, and tours of a tree that changes under them."""

from __future__ import annotations

import pytest

from prefixcache.core.commands import Change, Published
from prefixcache.core.events import ClearRequested
from prefixcache.core.ids import KEY_BYTES, Tier
from prefixcache.core.telling import Tour, tours
from tests.unit.core.harness import Harness, chain


def keys_of(told: list[Published]) -> set[bytes]:
    return {each.keys[at : at + KEY_BYTES] for each in told for at in range(0, len(each.keys), KEY_BYTES)}


def keys(*prompts: str) -> set[bytes]:
    return {chain(prompt)[at : at + KEY_BYTES] for prompt in prompts for at in range(0, len(prompt) * KEY_BYTES, 32)}


def tour_of(h: Harness) -> Tour:
    return Tour(h.planner.state.namespaces[1].tree)


def test_a_tour_tells_all_parents_first() -> None:
    h = Harness()
    for prompt in ("abc", "abd", "xy"):
        h.store(prompt)
    told: list[Published] = []
    with tour_of(h) as tour:
        while not tour.done:
            news = tour.next(1)
            assert all(not each.parent or each.parent in keys_of(told) for each in news)
            told += news
    assert {(each.change, each.tier, each.fingerprint) for each in told} == {
        (Change.STORED, Tier.HOST, (1).to_bytes(32, "big"))
    }
    assert keys_of(told) == keys("abc", "abd", "xy")
    starts = {each.keys[:KEY_BYTES]: each.first_block for each in told}
    assert starts[chain("abd")[64:]] == 2


def test_what_is_split_in_mid_tour_is_told_whole() -> None:
    h = Harness()
    h.store("abcd")
    h.store("xyz")
    with tour_of(h) as tour:
        told = tour.next(1)
        h.store("abq")  # splits what was told already, or not yet
        h.store("xq")
        while not tour.done:
            told += tour.next(1)
    assert keys_of(told) >= keys("abcd", "xyz")


def test_what_is_joined_in_mid_tour_is_not_told_under_its_old_shape() -> None:
    h = Harness(publish=True)
    h.store("a")
    with tour_of(h) as tour:
        h.store("ab")  # one node now: the one that waited is no more
        h.send(ClearRequested(1, chain("ab")))
        told = tour.next(10)
        assert tour.done
    assert keys_of(told) == keys("a")


def test_a_closed_tour_is_told_nothing_more() -> None:
    h = Harness()
    h.store("abcd")
    tree = h.planner.state.namespaces[1].tree
    first, second = tour_of(h), tour_of(h)
    first.close()
    first.close()
    assert len(tree.reshaped) == 1
    h.store("abq")
    assert len(tree.reshaped[0]) == 2
    second.close()
    assert not tree.reshaped
    assert first.next(10) == second.next(10) == []


def test_what_is_being_written_is_not_told() -> None:
    h = Harness(publish=True)
    h.reserve("ab")
    with tour_of(h) as tour:
        assert tour.next(10) == []
        assert tour.done


def test_a_tour_of_every_pool() -> None:
    h = Harness(gpu_slots=8)
    chosen = tours(h.planner.state.namespaces[1])
    assert len(chosen) == 2
    for tour in chosen:
        tour.close()


@pytest.mark.parametrize("publish", [True, False])
def test_nothing_is_told_where_nobody_asked(*, publish: bool) -> None:
    h = Harness(publish=publish, slots=2, slab_slots=2)
    h.store("ab")
    h.store("xy")
    assert any(isinstance(command, Published) for command in h.all) is publish
    assert not h.planner.state.news
