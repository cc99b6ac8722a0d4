from __future__ import annotations

import math
from typing import Any

from prefixcache.core.commands import Cleared, Command
from prefixcache.core.events import ClearRequested, PartFailedVerification, TimePassed
from prefixcache.core.ids import NamespaceKind
from prefixcache.core.pin_messages import PinEnded, Pinned, PinRequested, Unpinned, UnpinRequested
from prefixcache.core.reasons import Kind, PinEnd, Refusal
from prefixcache.core.spec import DiskSpec, NamespaceSpec, PartSpec
from tests.unit.core.disk_harness import DiskHarness
from tests.unit.core.harness import FULL, GRANULE, TOKENS, Harness, chain


class PinHarness(Harness):
    """A pool of 8 slots of which pins may take 6."""

    def __init__(self, slots: int = 8, pin_slots: int = 6, **config: Any) -> None:
        super().__init__(slots, 4, pin_bytes=pin_slots * GRANULE, **config)

    def pin(self, letters: str, **fields: Any) -> Pinned:
        return self.ask(PinRequested(self.new_id(), 1, chain(letters), **fields), Pinned)

    def refused_pin(self, letters: str, kind: Kind, reason: Refusal, **fields: Any) -> str:
        return self.refused(PinRequested(self.new_id(), 1, chain(letters), **fields), kind, reason).message

    def unpin(self, pinned: Pinned) -> Unpinned:
        return self.ask(UnpinRequested(pinned.pin), Unpinned)

    @property
    def pinned_slots(self) -> int:
        return self.planner.state.pinned_bytes // GRANULE


def ended(commands: list[Command]) -> list[tuple[bytes, PinEnd]]:
    return [(each.pin, each.reason) for each in commands if isinstance(each, PinEnded)]


def test_a_pinned_prefix_outlives_any_number_of_stores() -> None:
    cache = PinHarness()
    cache.store("abc")
    pinned = cache.pin("abc", label="system prompt v3")
    assert (pinned.held_blocks, pinned.blocks, pinned.size_bytes) == (3, 3, 3 * GRANULE)
    assert pinned.expires_at == math.inf
    for letter in "defghijk":
        cache.store(letter * 5)
    assert cache.hit("abc") == 3
    cache.unpin(pinned)
    for letter in "defghijk":
        cache.store(letter * 8)
    assert cache.hit("abc") == 0


def test_what_follows_a_pinned_prefix_may_go() -> None:
    cache = PinHarness()
    cache.store("abcdef")
    cache.pin("ab")
    cache.store("xyzxyz")
    assert cache.hit("abcdef") == 2


def test_a_prefix_that_is_not_stored_yet_is_held_as_it_is_stored() -> None:
    cache = PinHarness()
    assert cache.pin("abc").held_blocks == 0
    cache.store("a")
    cache.store("ab")
    cache.store("abc")
    cache.store("xxxxx")
    cache.store("yyyyy")
    assert cache.hit("abc") == 3


def test_blocks_of_two_pins_take_their_bytes_once() -> None:
    cache = PinHarness()
    first = cache.pin("abcd")
    second = cache.pin("abxy")
    assert cache.pinned_slots == 6
    cache.refused_pin("q", Kind.RESOURCE_EXHAUSTED, Refusal.PIN_BUDGET)
    cache.unpin(first)
    assert cache.pinned_slots == 4
    cache.unpin(second)
    assert cache.pinned_slots == 0


def test_a_pin_that_does_not_fit_is_refused_and_says_what_would_do() -> None:
    cache = PinHarness()
    text = cache.refused_pin("abcdefg", Kind.RESOURCE_EXHAUSTED, Refusal.PIN_BUDGET)
    assert str(7 * GRANULE) in text
    assert "unpin" in text
    assert cache.pinned_slots == 0


def test_pins_never_take_what_stores_need() -> None:
    cache = PinHarness()
    cache.store("abcdef")
    cache.pin("abcdef")
    assert len(cache.store("xyz").blocks) == 2
    assert cache.hit("xyz") == 2


def test_the_same_prefix_is_the_same_pin_with_a_new_time_and_label() -> None:
    cache = PinHarness()
    first = cache.pin("abc", ttl_s=100.0)
    again = cache.pin("abc", ttl_s=5.0, label="v4")
    assert again.pin == first.pin
    assert again.expires_at == 5.0
    assert cache.pinned_slots == 3
    cache.now = 6.0
    assert ended(cache.send(TimePassed())) == [(first.pin, PinEnd.EXPIRED)]
    assert cache.pinned_slots == 0
    cache.now = 200.0
    assert ended(cache.send(TimePassed())) == []


def test_a_pin_ends_by_its_time() -> None:
    cache = PinHarness()
    cache.store("abc")
    pinned = cache.pin("abc", ttl_s=2.0)
    cache.now = 1.9
    assert ended(cache.send(TimePassed())) == []
    cache.now = 2.0
    assert ended(cache.send(TimePassed())) == [(pinned.pin, PinEnd.EXPIRED)]
    cache.refused(UnpinRequested(pinned.pin), Kind.NOT_FOUND, Refusal.PIN_UNKNOWN)
    cache.store("xxxxxxxx")
    assert cache.hit("abc") == 0


def test_a_clear_ends_the_pins_that_reach_there_and_no_others() -> None:
    cache = PinHarness()
    cache.store("abcd")
    cache.store("axy")
    long, short, other = cache.pin("abcd"), cache.pin("ab"), cache.pin("axy")
    assert ended(cache.send(ClearRequested(1, chain("abc")))) == [(long.pin, PinEnd.CLEARED)]
    assert ended(cache.send(ClearRequested(1, chain("ab")))) == [(short.pin, PinEnd.CLEARED)]
    assert ended(cache.send(ClearRequested(None, None))) == [(other.pin, PinEnd.CLEARED)]


def test_a_clear_of_what_is_not_stored_ends_the_pin_all_the_same() -> None:
    cache = PinHarness()
    pinned = cache.pin("abc")
    assert ended(cache.send(ClearRequested(1, chain("abc")))) == [(pinned.pin, PinEnd.CLEARED)]


def test_evicting_gently_stops_at_leases_pins_and_writers() -> None:
    cache = PinHarness()
    cache.store("abc")
    gently = ClearRequested(1, chain("abc"), gently=True)
    pinned = cache.pin("abc")
    cache.refused(gently, Kind.FAILED_PRECONDITION, Refusal.IN_USE)
    cache.unpin(pinned)
    lease = cache.acquire("abc")
    cache.refused(gently, Kind.FAILED_PRECONDITION, Refusal.IN_USE)
    cache.release(lease)
    writing = cache.reserve("abcd")
    cache.refused(gently, Kind.FAILED_PRECONDITION, Refusal.IN_USE)
    cache.commit(writing)
    assert cache.ask(gently, Cleared).blocks == 2
    assert cache.hit("abc") == 2


def test_the_own_tail_of_a_prompt_is_what_nobody_else_goes_through() -> None:
    cache = Harness(32)
    cache.store("abcd")
    cache.store("abxy")
    assert cache.ask(ClearRequested(1, chain("abcd"), own_tail=True, gently=True), Cleared).blocks == 2
    assert (cache.hit("abcd"), cache.hit("abxy")) == (2, 4)
    assert cache.ask(ClearRequested(1, chain("ab"), own_tail=True), Cleared).blocks == 0
    assert cache.ask(ClearRequested(1, chain("abxy"), own_tail=True), Cleared).blocks == 4


def test_bad_pins_are_refused_with_their_reason() -> None:
    cache = PinHarness()
    cache.refused_pin("", Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID)
    cache.refused_pin("a", Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID, label="x" * 201)
    for ttl_s in (0.0, -1.0, math.nan, math.inf):
        cache.refused_pin("a", Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID, ttl_s=ttl_s)
    cache.refused(PinRequested(cache.new_id(), 9, chain("a")), Kind.NOT_FOUND, Refusal.NAMESPACE_UNKNOWN)
    cache.refused(PinRequested(b"x", 1, chain("a")), Kind.INVALID_ARGUMENT, Refusal.ID_INVALID)
    first = cache.pin("a")
    cache.refused(PinRequested(first.pin, 1, chain("b")), Kind.ALREADY_EXISTS, Refusal.PIN_TAKEN)


def test_nothing_can_be_pinned_in_a_foreign_namespace_or_without_a_budget() -> None:
    foreign = NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 4, GRANULE),), NamespaceKind.FOREIGN)
    cache = PinHarness(spec=foreign)
    cache.refused_pin("a", Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID)
    PinHarness(pin_slots=0).refused_pin("a", Kind.RESOURCE_EXHAUSTED, Refusal.PIN_BUDGET)


class PinnedDisk(DiskHarness):
    """Pins may take 8 slots."""

    def __init__(self, disk: DiskSpec | None = None) -> None:
        super().__init__(16, disk=disk, pin_bytes=8 * GRANULE)

    def pin(self, letters: str) -> Pinned:
        return self.ask(PinRequested(self.new_id(), 1, chain(letters)), Pinned)


def test_what_is_pinned_is_written_at_the_next_idle_moment() -> None:
    cache = PinnedDisk()
    cache.store("abc")
    cache.store("xyz")
    cache.pin("abc")
    cache.pass_time(0.1)
    assert cache.end_writes() == 3
    cache.pass_time(0.1)
    assert cache.end_writes() == 0


def test_what_is_pinned_while_it_is_on_disk_comes_to_memory() -> None:
    cache = PinnedDisk()
    cache.store("abc")
    cache.flush()
    for letter in "uvwxyz":
        cache.store(letter * 4)
        cache.flush()
    assert cache.acquire("abc").planned_blocks == 0
    assert cache.pin("abc").held_blocks == 3
    cache.pass_time(0.1)
    assert cache.end_reads() == 3
    cache.store("q" * 8)
    assert cache.hit("abc") == 3


def test_a_pin_lets_go_of_a_lost_block_and_holds_it_again_when_it_is_stored_again() -> None:
    cache = PinHarness()
    cache.store("abc")
    pinned = cache.pin("abc")
    table = cache.planner.state.namespaces[1].table
    cache.send(PartFailedVerification(1, 0, 1, int(table.parts[0].generations[1])))
    assert cache.planner.state.prefix_pins[pinned.pin].depth == 1
    cache.store("abc")
    assert cache.planner.state.prefix_pins[pinned.pin].depth == 3
