"""Reserve: what is granted, and the reason for what is not."""

from __future__ import annotations

from prefixcache.core.commands import DrainFinished, Reserved, SetGenerations
from prefixcache.core.events import AbortRequested, DrainStarted, ReserveRequested
from prefixcache.core.ids import NO_SLOT, GroupKind
from prefixcache.core.reasons import Kind, Refusal, Skip
from prefixcache.core.spec import GroupSpec, Limits, NamespaceSpec, PartSpec
from tests.unit.core.harness import FOREVER, FULL, GRANULE, TOKENS, A, B, Harness, chain, name, slots_of

SLIDING = NamespaceSpec(
    TOKENS, (FULL, GroupSpec(GroupKind.SLIDING, 2 * TOKENS)), (PartSpec(0, 1, GRANULE), PartSpec(1, 1, 2 * GRANULE))
)
ONLY_SLIDING = NamespaceSpec(TOKENS, (GroupSpec(GroupKind.SLIDING, 2 * TOKENS),), (PartSpec(0, 1, GRANULE),))


def test_generations_are_set_before_the_grant_leaves() -> None:
    h = Harness()
    reserved = h.reserve("abc")
    order, reply = h.all
    assert isinstance(order, SetGenerations)
    assert reply is reserved
    assert order.slots.tolist() == slots_of(reserved)
    assert order.generation == reserved.generation


def test_generations_are_never_drawn_twice() -> None:
    h = Harness(first_generation=500)
    assert [h.reserve(letter).generation for letter in "abc"] == [500, 501, 502]


def test_slots_come_in_one_ascending_run() -> None:
    h = Harness(slots=64, slab_slots=16)
    h.store("ab")
    slots = slots_of(h.reserve("xyzuvw"))
    assert slots == list(range(slots[0], slots[0] + 6))


def test_only_what_is_missing_is_granted() -> None:
    h = Harness()
    h.store("abc")
    reserved = h.reserve("abcde")
    assert reserved.blocks.tolist() == [3, 4]
    assert reserved.skipped == {Skip.ALREADY_STORED: 3}


def test_two_reservations_never_cover_one_key() -> None:
    h = Harness()
    h.reserve("abc")
    other = h.reserve("abcd", B)
    assert other.blocks.tolist() == [3]
    assert other.skipped == {Skip.BEING_WRITTEN: 3}
    diverging = h.reserve("abxy", B)
    assert diverging.blocks.tolist() == [2, 3]
    assert diverging.skipped == {Skip.BEING_WRITTEN: 2}


def test_nothing_missing_makes_no_reservation() -> None:
    h = Harness()
    h.store("ab")
    reserved = h.reserve("ab")
    assert len(reserved.blocks) == 0
    h.refused(AbortRequested(A, reserved.reservation), Kind.NOT_FOUND, Refusal.RESERVATION_UNKNOWN)


def test_a_retry_is_answered_the_same() -> None:
    h = Harness()
    event = ReserveRequested(A, name(50), 1, chain("ab"), 0, FOREVER)
    first = h.ask(event, Reserved)
    assert h.ask(event, Reserved) is first
    assert h.used == 2
    stolen = ReserveRequested(B, name(50), 1, chain("xy"), 0, FOREVER)
    h.refused(stolen, Kind.ALREADY_EXISTS, Refusal.RESERVATION_TAKEN)


def test_a_full_pool_grants_fewer_and_says_so() -> None:
    h = Harness(slots=4, slab_slots=4)
    held = h.store("abc")
    assert h.acquire("abc").planned_blocks == len(held.blocks)
    reserved = h.reserve("xyz")
    assert reserved.blocks.tolist() == [0]
    assert reserved.skipped == {Skip.POOL_FULL: 2}


def test_the_longest_unused_leaf_goes_first_from_its_tail() -> None:
    h = Harness(slots=6, slab_slots=6)
    h.store("abc")
    h.store("xyz")
    assert h.hit("abc") == 3
    h.store("q")
    assert (h.hit("xyz"), h.hit("abc")) == (2, 3)


def test_its_own_prefix_is_never_evicted_to_extend_it() -> None:
    h = Harness(slots=4, slab_slots=4)
    h.store("ab")
    h.store("cd")
    reserved = h.reserve("abxyzuv")
    assert reserved.blocks.tolist() == [2, 3]
    h.commit(reserved)
    assert h.hit("abxyz") == 4
    assert h.hit("cd") == 0


def test_a_prompt_larger_than_the_pool_stores_its_head() -> None:
    h = Harness(slots=4, slab_slots=4)
    h.store("zz")
    reserved = h.store("abcdefgh")
    assert reserved.blocks.tolist() == [0, 1, 2, 3]
    assert h.hit("abcdefgh") == 4


def test_a_block_without_its_parent_is_of_no_use() -> None:
    h = Harness()
    h.store("a")
    reserved = h.reserve("abcd", from_block=2)
    assert reserved.skipped == {Skip.PARENT_MISSING: 2}


def test_every_full_part_must_be_written() -> None:
    two = NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 1, GRANULE), PartSpec(0, 1, GRANULE)))
    h = Harness(spec=two)
    assert h.reserve("ab", part_mask=0b01).skipped == {Skip.PARTS_MISSING: 2}
    both = h.reserve("ab")
    assert not set(slots_of(both, 0)) & set(slots_of(both, 1))


def test_missing_parts_of_a_window_can_be_filled_in_later() -> None:
    h = Harness(spec=SLIDING)
    h.store("abc", part_mask=0b01)
    patch = h.reserve("abcd")
    assert patch.blocks.tolist() == [0, 1, 2, 3]
    assert slots_of(patch, 0)[:3] == [NO_SLOT] * 3
    assert NO_SLOT not in slots_of(patch, 1)
    assert h.reserve("abc", B).skipped == {Skip.BEING_WRITTEN: 3}
    assert h.acquire("abc").planned_blocks == 0
    h.commit(patch)
    assert h.acquire("abcd").planned_blocks == 4


def test_a_layout_of_windows_alone_stores_the_end_only() -> None:
    h = Harness(spec=ONLY_SLIDING)
    reserved = h.store("abcdef", from_block=4)
    assert reserved.blocks.tolist() == [4, 5]
    assert h.used == 2
    acquired = h.acquire("abcdef")
    assert acquired.planned_blocks == 6
    assert acquired.runs[0].first_block == 4
    assert h.acquire("abcde").planned_blocks == 0


def test_links_without_parts_are_bounded() -> None:
    h = Harness(spec=ONLY_SLIDING, limits=Limits(max_bare_blocks=4))
    assert h.reserve("abcdef", from_block=5).skipped == {Skip.QUOTA: 1}


def test_draining_grants_nothing() -> None:
    h = Harness()
    reserved = h.reserve("ab")
    assert h.send(DrainStarted()) == []
    assert h.reserve("xyz").skipped == {Skip.DRAINING: 3}
    h.commit(reserved)
    assert isinstance(h.all[-1], DrainFinished)
    assert h.hit("ab") == 2


def test_draining_with_nothing_open_is_done_at_once() -> None:
    h = Harness()
    assert h.send(DrainStarted()) == [DrainFinished()]


def test_slots_only_where_memory_is_ready() -> None:
    h = Harness(slots=16, slab_slots=4, ready_bytes=4 * GRANULE)
    assert h.reserve("abcdefgh").skipped == {Skip.POOL_FULL: 4}


def test_too_many_reservations() -> None:
    h = Harness(limits=Limits(max_reservations_per_session=1))
    h.reserve("a")
    event = ReserveRequested(A, name(9), 1, chain("b"), 0, FOREVER)
    h.refused(event, Kind.RESOURCE_EXHAUSTED, Refusal.TOO_MANY)


def test_bad_arguments() -> None:
    h = Harness()
    cases = [
        ("reservation", b"x", Kind.INVALID_ARGUMENT, Refusal.ID_INVALID),
        ("session", name(9), Kind.NOT_FOUND, Refusal.SESSION_UNKNOWN),
        ("namespace", 9, Kind.NOT_FOUND, Refusal.NAMESPACE_UNKNOWN),
        ("keys", b"x" * 33, Kind.INVALID_ARGUMENT, Refusal.KEYS_INVALID),
        ("from_block", 3, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID),
        ("part_mask", 0b10, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID),
    ]
    for field, value, kind, reason in cases:
        event = ReserveRequested(A, name(1), 1, chain("ab"), 0, FOREVER)
        setattr(event, field, value)
        h.refused(event, kind, reason)
    assert h.used == 0
