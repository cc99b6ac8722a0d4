"""Foreign namespaces: opaque keys, a bitmap instead of a prefix."""

from __future__ import annotations

from prefixcache.core.commands import Acquired, Cleared, LookedUp
from prefixcache.core.events import AcquireRequested, ClearRequested, DrainStarted, LookupRequested, ReserveRequested
from prefixcache.core.ids import KEY_BYTES, NamespaceKind
from prefixcache.core.reasons import Kind, Miss, Refusal, Skip
from prefixcache.core.spec import NamespaceSpec, PartSpec
from tests.unit.core.harness import FOREVER, FULL, GRANULE, TOKENS, A, Harness, chain, name, slots_of

SPEC = NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 1, GRANULE),), NamespaceKind.FOREIGN)
NO_PARENT = bytes(KEY_BYTES)


def key(letter: str) -> bytes:
    return chain(letter)


def keys(letters: str) -> bytes:
    return b"".join(key(letter) for letter in letters)


def test_every_key_for_itself() -> None:
    h = Harness(spec=SPEC)
    stored = h.store("", keys=keys("ac"))
    slots = slots_of(stored)
    acquired = h.acquire("", keys=keys("abcd"), prompt_tokens=4 * TOKENS)
    assert acquired.present is not None
    assert acquired.present.tolist() == [True, False, True, False]
    assert (acquired.planned_blocks, acquired.stop) == (2, Miss.NOT_STORED)
    assert [(run.first_block, run.slots.tolist()) for run in acquired.runs] == [(0, slots[:1]), (2, slots[1:])]
    assert h.release(acquired).hit_tokens == 2 * TOKENS


def test_a_limit_counts_hits() -> None:
    h = Harness(spec=SPEC)
    h.store("", keys=keys("abc"))
    acquired = h.acquire("", keys=keys("abc"), prompt_tokens=3 * TOKENS, max_blocks=2)
    assert (acquired.planned_blocks, acquired.stop) == (2, Miss.BEYOND_LIMIT)
    assert h.planner.state.stats.tokens.miss[Miss.BEYOND_LIMIT] == TOKENS


def test_a_parent_stays_as_long_as_its_child() -> None:
    h = Harness(slots=3, slab_slots=3, spec=SPEC)
    h.store("", keys=keys("pc"), parents=NO_PARENT + key("p"))
    child = h.acquire("", keys=key("c"), prompt_tokens=TOKENS)
    h.store("", keys=keys("xyz"))
    assert h.hit_of(keys("pc")) == [True, True]
    h.release(child)
    h.store("", keys=keys("uvw"))
    assert h.hit_of(keys("pc")) == [False, False]


def test_a_key_whose_parent_is_not_here_is_not_stored() -> None:
    h = Harness(spec=SPEC)
    reserved = h.reserve("", keys=keys("c"), parents=key("p"))
    assert reserved.skipped == {Skip.PARENT_MISSING: 1}


def test_twice_in_one_call() -> None:
    h = Harness(spec=SPEC)
    reserved = h.reserve("", keys=keys("aa"))
    assert reserved.blocks.tolist() == [0]
    assert reserved.skipped == {Skip.BEING_WRITTEN: 1}
    h.commit(reserved)
    assert h.reserve("", keys=keys("a")).skipped == {Skip.ALREADY_STORED: 1}


def test_a_full_pool_drops_the_last_keys() -> None:
    h = Harness(slots=2, slab_slots=2, spec=SPEC)
    reserved = h.reserve("", keys=keys("abc"), parents=NO_PARENT + keys("ab"))
    assert reserved.blocks.tolist() == [0, 1]
    assert reserved.skipped == {Skip.POOL_FULL: 1}


def test_clear_and_lookup_by_key() -> None:
    h = Harness(spec=SPEC)
    h.store("", keys=keys("abp"), parents=None)
    h.store("", keys=keys("c"), parents=key("p"))
    assert h.ask(ClearRequested(1, keys("apz")), Cleared) == Cleared(3, 0)
    looked_up = h.ask(LookupRequested(1, keys("abcp")), LookedUp)
    assert looked_up.present is not None
    assert looked_up.present.tolist() == [False, True, False, False]
    assert looked_up.matched_blocks == 1


def test_what_is_refused() -> None:
    h = Harness(spec=SPEC)
    event = ReserveRequested(A, name(5), 1, keys("ab"), 0, FOREVER, parents=key("a"))
    h.refused(event, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID)
    two = NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 1, GRANULE),) * 2, NamespaceKind.FOREIGN)
    h.open(2, two)
    assert h.reserve("ab", namespace=2, part_mask=1).skipped == {Skip.PARTS_MISSING: 2}
    h.send(DrainStarted())
    assert h.reserve("ab").skipped == {Skip.DRAINING: 2}


def test_nothing_present_makes_no_lease() -> None:
    h = Harness(spec=SPEC)
    event = AcquireRequested(A, name(5), 1, keys("ab"), 0, 2 * TOKENS, 5.0)
    assert h.ask(event, Acquired).planned_blocks == 0
    assert not h.planner.state.leases
