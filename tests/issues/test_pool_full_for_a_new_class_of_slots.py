"""A store into a class of slots that had none was answered `pool_full` although everything could have been evicted: the
oldest leaves of the other class lay in all slabs, and after two slabs' worth of evictions none was empty."""

from __future__ import annotations

import pytest

from prefixcache.core import emptying
from prefixcache.core.pin_messages import PinRequested
from prefixcache.core.spec import NamespaceSpec, PartSpec
from tests.unit.core.harness import FULL, GRANULE, TOKENS, Harness, chain

WIDE = NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 1, 4 * GRANULE),))


def scattered(**config: int) -> Harness:
    """16 blocks in 4 slabs, the oldest in all of them."""
    cache = Harness(16, 4, **config)
    cache.open(2, WIDE)
    for letter in "abcdefghijklmnop":
        cache.store(letter)
    for letter in "aeimbfjncgkodhlp":
        cache.hit(letter)
    return cache


def left(cache: Harness) -> int:
    return sum(cache.hit(letter) for letter in "abcdefghijklmnop")


def test_room_is_made_at_once() -> None:
    cache = scattered()
    assert len(cache.reserve("x", namespace=2).blocks) == 1
    assert left(cache) == 16 - 8 - 2


def test_as_much_as_is_wanted() -> None:
    cache = scattered()
    assert len(cache.reserve("xyz", namespace=2).blocks) == 3


def test_what_is_leased_or_pinned_stays() -> None:
    cache = scattered(pin_bytes=4 * GRANULE)
    for letter in "cd":
        cache.acquire(letter)
    cache.send(PinRequested(cache.new_id(), 1, chain("g")))
    assert len(cache.reserve("xyzw", namespace=2).blocks) == 2
    assert [cache.hit(letter) for letter in "cdg"] == [1, 1, 1]


def test_a_slab_full_of_the_fronts_of_long_prompts_takes_their_tails_along() -> None:
    cache = Harness(16, 4)
    cache.open(2, WIDE)
    for letter in "abcd":
        cache.store(letter)
    for letter in "abcd":
        cache.store(letter * 4)
    assert len(cache.reserve("x", namespace=2).blocks) == 1


def test_a_namespace_too_large_to_look_at_is_left_to_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emptying, "MOST_ROWS", 4)
    cache = scattered()
    assert len(cache.reserve("x", namespace=2).blocks) == 0
