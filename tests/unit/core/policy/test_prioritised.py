"""Priorities under every policy, through the planner: low goes first, high last, and a prefix loses its tail first."""

from __future__ import annotations

import pytest

from prefixcache.core.events import TimePassed
from prefixcache.core.ids import NamespaceKind
from prefixcache.core.policy.names import NAMES
from prefixcache.core.spec import NamespaceSpec, PartSpec
from prefixcache.core.table import HIGH, LOW, NORMAL
from tests.unit.core.disk_harness import DiskHarness
from tests.unit.core.harness import FULL, GRANULE, TOKENS, Harness, chain


@pytest.fixture(params=NAMES)
def cache(request: pytest.FixtureRequest) -> Harness:
    """Eight blocks."""
    return Harness(8, 4, policy=request.param, policy_seed=1, priority_fades_s=100.0)


def stays(cache: Harness, *prompts: str) -> dict[str, int]:
    """How many blocks of each are there, without counting as use."""
    tree = cache.planner.state.namespaces[1].tree
    return {prompt: tree.walk(chain(prompt)).blocks for prompt in prompts}


def fill(cache: Harness) -> None:
    """High first and low last, so that age alone would say the opposite."""
    cache.store("hh", priority=HIGH)
    cache.store("nnn", priority=NORMAL)
    cache.store("lll", priority=LOW)


def test_low_goes_first_and_high_last(cache: Harness) -> None:
    fill(cache)
    cache.store("xxx", priority=HIGH)
    assert stays(cache, "hh", "nnn", "lll") == {"hh": 2, "nnn": 3, "lll": 0}
    cache.store("yyy", priority=HIGH)
    assert stays(cache, "hh", "xxx", "nnn") == {"hh": 2, "xxx": 3, "nnn": 0}
    cache.store("zz", priority=HIGH)
    assert stays(cache, "hh", "xxx", "yyy", "zz")["zz"] == 2


def test_a_tail_goes_before_what_is_in_front_of_it(cache: Harness) -> None:
    cache.store("ab", priority=LOW)
    cache.store("abcd", priority=HIGH)
    cache.store("nnnn")
    cache.store("xx", priority=HIGH)
    assert stays(cache, "abcd", "nnnn") == {"abcd": 4, "nnnn": 2}


def test_a_low_tail_goes_and_its_high_prefix_stays(cache: Harness) -> None:
    cache.store("ab", priority=HIGH)
    cache.store("abcd", priority=LOW)
    cache.store("nnnn")
    cache.store("xx", priority=HIGH)
    assert stays(cache, "abcd", "nnnn") == {"abcd": 2, "nnnn": 4}


def test_who_stores_it_again_may_raise_it_and_not_lower_it(cache: Harness) -> None:
    fill(cache)
    cache.store("lll", priority=HIGH)
    cache.store("hh", priority=LOW)
    cache.store("xxx", priority=HIGH)
    assert stays(cache, "hh", "nnn", "lll") == {"hh": 2, "nnn": 0, "lll": 3}


def test_what_nobody_used_for_long_has_no_priority_any_more(cache: Harness) -> None:
    fill(cache)
    cache.now = 150.0
    cache.send(TimePassed())
    cache.store("lll", priority=LOW)  # used now
    cache.store("xx", priority=HIGH)
    assert stays(cache, "lll")["lll"] == 3
    assert sum(stays(cache, "hh", "nnn").values()) == 3


def test_a_block_that_takes_the_place_of_another_is_of_its_own_priority(cache: Harness) -> None:
    cache.store("hhhhhhhh", priority=LOW)
    cache.store("nnnnnnnn", priority=NORMAL)
    table = cache.planner.state.namespaces[1].table
    rows = cache.planner.state.namespaces[1].tree.root.children
    assert rows is not None
    assert all((table.priority[node.row_array()] == NORMAL).all() for node in rows.values())


def test_foreign_blocks_have_priorities_as_well() -> None:
    spec = NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 4, GRANULE),), NamespaceKind.FOREIGN)
    cache = Harness(4, 4, spec)
    cache.store("ab", priority=HIGH)
    cache.store("xy", priority=LOW)
    cache.store("yz"[:1], priority=LOW)
    cache.store("pq", priority=NORMAL)
    assert cache.hit_of(chain("ab")) == [True, True]
    assert cache.hit_of(chain("xy")) != [True, True]


def test_with_a_disk_what_is_clean_goes_first_and_within_that_what_is_low() -> None:
    cache = DiskHarness(8)
    cache.store("hh", priority=HIGH)
    cache.store("lll", priority=LOW)
    cache.store("nnn")
    cache.flush()
    cache.store("xxx")
    assert [cache.planner.state.namespaces[1].cold_blocks, stays(cache, "hh")["hh"]] == [3, 2]
    cold = cache.acquire("lll")
    assert cold.planned_blocks == 0
