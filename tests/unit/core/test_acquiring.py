"""Acquire, renew, release: promises and the closed sum."""

from __future__ import annotations

import pytest

from prefixcache.core.commands import Acquired, LeaseEnded, LeaseExtended, LookedUp
from prefixcache.core.events import AcquireRequested, LeaseReleased, LeaseRenewed, LookupRequested, TimePassed
from prefixcache.core.ids import GroupKind, Tier
from prefixcache.core.reasons import Kind, Miss, Refusal
from prefixcache.core.spec import GroupSpec, Limits, NamespaceSpec, PartSpec
from tests.unit.core.harness import FULL, GRANULE, TOKENS, A, B, Harness, chain, name, slots_of


def test_a_hit_names_the_slots_that_were_committed() -> None:
    h = Harness()
    stored = h.store("abc")
    acquired = h.acquire("abcx")
    assert acquired.planned_blocks == acquired.ready_blocks == 3
    assert acquired.stop is Miss.NOT_STORED
    assert acquired.tokens == (0, 3 * TOKENS, 0, 0)
    (run,) = acquired.runs
    assert (run.part, run.first_block) == (0, 0)
    assert run.slots.tolist() == slots_of(stored)
    assert set(run.generations.tolist()) == {stored.generation}


def test_nothing_stored_makes_no_lease() -> None:
    h = Harness()
    acquired = h.acquire("ab")
    assert acquired.planned_blocks == 0
    h.refused(LeaseReleased(A, acquired.lease), Kind.NOT_FOUND, Refusal.LEASE_UNKNOWN)


def test_the_sum_closes_at_every_instant() -> None:
    h = Harness()
    h.store("abcd")
    tokens = h.planner.state.stats.ledgers[1]
    acquired = h.acquire("abcdxx", prompt_tokens=6 * TOKENS + 5)
    assert tokens.looked_up == 6 * TOKENS + 5
    assert tokens.pending == 4 * TOKENS
    assert tokens.miss == {Miss.NOT_STORED: 2 * TOKENS, Miss.PARTIAL_BLOCK: 5}
    released = h.release(acquired, used=3)
    assert (released.hit_tokens, released.missed_tokens) == (3 * TOKENS, TOKENS)
    assert tokens.pending == 0
    assert tokens.hit[Tier.HOST] == 3 * TOKENS
    assert tokens.miss[Miss.UNUSED] == TOKENS


def test_blocks_the_engine_has_itself_are_not_looked_up() -> None:
    h = Harness()
    h.store("abcd")
    acquired = h.acquire("abcd", from_block=3)
    assert acquired.planned_blocks == 1
    assert acquired.runs[0].first_block == 3
    assert h.planner.state.stats.tokens.looked_up == TOKENS


def test_nothing_behind_the_engines_own_hit() -> None:
    h = Harness()
    h.store("ab")
    acquired = h.acquire("abcd", from_block=3)
    assert acquired.planned_blocks == 0
    assert h.planner.state.stats.tokens.miss == {Miss.NOT_STORED: TOKENS}


def test_a_limit_is_a_reason_of_its_own() -> None:
    h = Harness()
    h.store("abcd")
    acquired = h.acquire("abcd", max_blocks=3)
    assert (acquired.planned_blocks, acquired.stop) == (3, Miss.BEYOND_LIMIT)
    assert h.planner.state.stats.tokens.miss[Miss.BEYOND_LIMIT] == TOKENS


def test_a_retry_is_answered_the_same_and_counted_once() -> None:
    h = Harness()
    h.store("ab")
    event = AcquireRequested(A, name(99), 1, chain("ab"), 0, 2 * TOKENS, 5.0)
    first = h.ask(event, Acquired)
    assert h.ask(event, Acquired) is first
    assert h.planner.state.stats.tokens.looked_up == 2 * TOKENS
    h.refused(
        AcquireRequested(B, name(99), 1, chain("ab"), 0, 2 * TOKENS, 5.0), Kind.ALREADY_EXISTS, Refusal.LEASE_TAKEN
    )


def test_released_twice() -> None:
    h = Harness()
    h.store("ab")
    acquired = h.acquire("ab")
    h.release(acquired)
    refusal = h.refused(LeaseReleased(A, acquired.lease), Kind.NOT_FOUND, Refusal.LEASE_UNKNOWN)
    assert refusal.subject == acquired.lease


def test_only_its_session_ends_a_lease() -> None:
    h = Harness()
    h.store("ab")
    acquired = h.acquire("ab")
    h.refused(LeaseReleased(B, acquired.lease), Kind.PERMISSION_DENIED, Refusal.FOREIGN_SESSION)
    h.refused(LeaseRenewed(B, acquired.lease, 1.0), Kind.PERMISSION_DENIED, Refusal.FOREIGN_SESSION)
    assert h.release(acquired).hit_tokens == 2 * TOKENS


@pytest.mark.parametrize("used", [-5, 0, 2, 99])
def test_used_blocks_beyond_the_plan_count_no_more_than_planned(used: int) -> None:
    h = Harness()
    h.store("ab")
    released = h.release(h.acquire("ab"), used=used)
    assert released.hit_tokens == min(max(used, 0), 2) * TOKENS


def test_an_expired_lease_is_a_miss_and_frees_its_blocks() -> None:
    h = Harness(slots=2, slab_slots=2)
    h.store("ab")
    acquired = h.acquire("ab", ttl_s=5.0)
    assert len(h.reserve("xy").blocks) == 0, "leased blocks were given away"
    h.now = 5.0
    commands = h.send(TimePassed())
    assert commands == [LeaseEnded(acquired.lease, A, Miss.LEASE_EXPIRED)]
    assert h.planner.state.stats.tokens.miss[Miss.LEASE_EXPIRED] == 2 * TOKENS
    h.refused(LeaseReleased(A, acquired.lease), Kind.NOT_FOUND, Refusal.LEASE_EXPIRED)
    assert len(h.reserve("xy").blocks) == 2


def test_a_renewed_lease_lives_on_and_is_never_shortened() -> None:
    h = Harness()
    h.store("ab")
    acquired = h.acquire("ab", ttl_s=5.0)
    assert h.ask(LeaseRenewed(A, acquired.lease, 1.0), LeaseExtended).expires_at == 5.0
    assert h.ask(LeaseRenewed(A, acquired.lease, 9.0), LeaseExtended).expires_at == 9.0
    h.now = 8.9
    assert h.send(TimePassed()) == []
    h.now = 9.0
    assert len(h.send(TimePassed())) == 1


def test_every_event_notices_that_time_is_over() -> None:
    h = Harness()
    h.store("ab")
    acquired = h.acquire("ab", ttl_s=1.0)
    h.now = 2.0
    h.refused(LeaseRenewed(A, acquired.lease, 5.0), Kind.NOT_FOUND, Refusal.LEASE_EXPIRED)


def test_sliding_and_state_groups_only_need_their_end() -> None:
    """A prompt sharing 2,000 of 2,100 tokens also hits: the window is whole wherever it may end."""
    sliding = GroupSpec(GroupKind.SLIDING, 2 * TOKENS)
    parts = (PartSpec(0, 1, GRANULE), PartSpec(1, 1, GRANULE), PartSpec(2, 1, GRANULE))
    h = Harness(spec=NamespaceSpec(TOKENS, (FULL, sliding, GroupSpec(GroupKind.STATE)), parts))
    h.store("abcdef")
    acquired = h.acquire("abcdxx")
    assert acquired.planned_blocks == 4
    assert [(run.part, run.first_block, len(run.slots)) for run in acquired.runs] == [(0, 0, 4), (1, 2, 2), (2, 3, 1)]
    assert h.acquire("abcdef", from_block=5).runs[1].first_block == 5


def test_a_gap_in_a_window_is_a_reason_of_its_own() -> None:
    sliding = GroupSpec(GroupKind.SLIDING, 2 * TOKENS)
    h = Harness(spec=NamespaceSpec(TOKENS, (FULL, sliding), (PartSpec(0, 1, GRANULE), PartSpec(1, 1, GRANULE))))
    h.store("ab")
    h.store("abcd", part_mask=0b01)
    acquired = h.acquire("abcd")
    assert (acquired.planned_blocks, acquired.stop) == (2, Miss.GROUP_GAP)
    h.store("abcd")
    assert h.acquire("abcd").planned_blocks == 4


def test_lookup_changes_nothing() -> None:
    h = Harness(slots=2, slab_slots=1)
    h.store("a")
    h.store("b")
    looked_up = h.ask(LookupRequested(1, chain("ax")), LookedUp)
    assert (looked_up.matched_blocks, looked_up.stop) == (1, Miss.NOT_STORED)
    assert looked_up.tokens == (0, TOKENS, 0, 0)
    assert h.planner.state.stats.tokens.looked_up == 0
    h.store("c")
    assert (h.hit("a"), h.hit("b")) == (0, 1), "a lookup must not count as a use"


def test_lookup_tells_what_is_being_written() -> None:
    h = Harness()
    h.reserve("ab")
    assert h.ask(LookupRequested(1, chain("ab")), LookedUp).stop is Miss.BEING_WRITTEN
    assert h.acquire("ab").stop is Miss.BEING_WRITTEN


def test_too_many_leases() -> None:
    h = Harness(limits=Limits(max_leases_per_session=2))
    h.store("a")
    h.acquire("a")
    h.acquire("a")
    event = AcquireRequested(A, name(7), 1, chain("a"), 0, TOKENS, 1.0)
    h.refused(event, Kind.RESOURCE_EXHAUSTED, Refusal.TOO_MANY)


def test_times_out_of_bounds_are_clipped() -> None:
    h = Harness(limits=Limits(max_ttl_s=10.0, min_ttl_s=0.5))
    h.store("a")
    assert h.acquire("a", ttl_s=1e9).expires_at == 10.0
    assert h.acquire("a", ttl_s=-1.0).expires_at == 0.5
    assert h.acquire("a", ttl_s=float("nan")).expires_at == 0.5


def test_bad_arguments() -> None:
    h = Harness()
    good = AcquireRequested(A, name(1), 1, chain("ab"), 0, 2 * TOKENS, 1.0)
    cases = [
        ("lease", b"x", Kind.INVALID_ARGUMENT, Refusal.ID_INVALID),
        ("session", name(9), Kind.NOT_FOUND, Refusal.SESSION_UNKNOWN),
        ("namespace", 9, Kind.NOT_FOUND, Refusal.NAMESPACE_UNKNOWN),
        ("keys", chain("ab")[:-1], Kind.INVALID_ARGUMENT, Refusal.KEYS_INVALID),
        ("from_block", 3, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID),
        ("from_block", -1, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID),
        ("max_blocks", -1, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID),
        ("prompt_tokens", 2 * TOKENS - 1, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID),
    ]
    for field, value, kind, reason in cases:
        right = getattr(good, field)
        setattr(good, field, value)
        h.refused(good, kind, reason)
        setattr(good, field, right)
    assert h.planner.state.stats.tokens.looked_up == 0
    h.ask(good, Acquired)


def test_too_many_keys() -> None:
    h = Harness(limits=Limits(max_keys=3))
    h.refused(LookupRequested(1, chain("abcd")), Kind.INVALID_ARGUMENT, Refusal.KEYS_INVALID)
