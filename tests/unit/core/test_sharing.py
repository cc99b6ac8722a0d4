"""Reservations that several sessions fill: joining, the parts of each, and what happens when one of them does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixcache.core.commands import Aborted, Committed, NamespaceReady, Refused, ReservationEnded, Reserved
from prefixcache.core.events import (
    AbortRequested,
    CommitRequested,
    Coverage,
    DrainStarted,
    NamespaceOpened,
    ProcessExited,
    ReserveRequested,
    SessionEnded,
    SessionOpened,
    TimePassed,
)
from prefixcache.core.ids import NamespaceKind
from prefixcache.core.reasons import Kind, Refusal, Skip
from prefixcache.core.spec import Limits, NamespaceSpec, PartSpec
from tests.unit.core.harness import FULL, GRANULE, ONE_PART, TOKENS, A, B, Harness, chain, slots_of

C, TICKET = b"c" * 16, b"t" * 16
"""A and C map the pool, B does not. Parts have four heads."""


def sharing(**config: object) -> Harness:
    h = Harness(**config)  # type: ignore[arg-type] # a planner's settings
    h.send(SessionOpened(C, True))
    return h


def asked(session: bytes, letters: str = "ab", ttl_s: float = 5.0) -> ReserveRequested:
    return ReserveRequested(session, TICKET, 1, chain(letters), 0, ttl_s, shared=True)


def wrote(session: bytes, first: int, count: int, blocks: int = 2, *, more: bool = False) -> CommitRequested:
    return CommitRequested(session, TICKET, (Coverage(0, blocks, 0, first, count),), more)


def both(h: Harness) -> Reserved:
    reserved = h.ask(asked(A), Reserved)
    assert h.ask(asked(C), Reserved) == reserved
    return reserved


def over(h: Harness, session: bytes) -> None:
    h.refused(asked(session), Kind.FAILED_PRECONDITION, Refusal.RESERVATION_EXPIRED)


def skipped(h: Harness, why: Skip) -> int:
    return h.planner.state.stats.blocks_skipped[why]


def test_blocks_are_seen_when_every_writer_wrote_its_heads() -> None:
    h = sharing()
    reserved = both(h)
    assert h.ask(wrote(A, 0, 2), Committed) == Committed(TICKET, 0, {}, 2)
    assert h.hit("ab") == 0
    assert h.ask(wrote(C, 2, 2), Committed) == Committed(TICKET, 2, {}, 0, over=True)
    assert h.hit("ab") == 2
    assert h.acquire("ab").runs[0].slots.tolist() == slots_of(reserved)


def test_a_writer_may_come_when_the_other_is_done_already() -> None:
    h = sharing()
    h.ask(asked(A), Reserved)
    h.ask(wrote(A, 0, 2), Committed)
    h.ask(asked(C), Reserved)
    assert h.ask(wrote(C, 2, 2), Committed).stored == 2
    over(h, B)


def test_the_last_to_write_shows_blocks_the_last_to_speak_ends_it() -> None:
    """A writer that has not said its last word might still write."""
    h = sharing()
    both(h)
    h.ask(wrote(A, 0, 2, more=True), Committed)
    assert h.ask(wrote(C, 2, 2), Committed) == Committed(TICKET, 2, {}, 0, over=False)
    assert h.hit("ab") == 2
    assert TICKET in h.planner.state.reservations
    assert h.ask(CommitRequested(A, TICKET, ()), Committed).over
    assert h.planner.state.reservations == {}


def test_a_retry_learns_what_the_first_try_did() -> None:
    h = sharing()
    both(h)
    first = h.ask(wrote(A, 0, 2), Committed)
    assert h.ask(wrote(A, 0, 2), Committed) == first
    h.refused(asked(A), Kind.ALREADY_EXISTS, Refusal.RESERVATION_TAKEN)
    last = h.ask(wrote(C, 2, 2), Committed)
    assert h.ask(wrote(C, 2, 2), Committed) == last
    assert h.ask(wrote(A, 0, 2), Committed) == first


@pytest.mark.parametrize(
    "change",
    [
        lambda event: setattr(event, "keys", chain("ax")),
        lambda event: setattr(event, "from_block", 1),
        lambda event: setattr(event, "part_mask", 3),
        lambda event: setattr(event, "shared", False),
        lambda event: setattr(event, "namespace", 2),
    ],
    ids=["keys", "from_block", "part_mask", "alone", "namespace"],
)
def test_all_must_ask_for_the_same(change: Callable[[ReserveRequested], None]) -> None:
    h = sharing()
    h.open(2, ONE_PART)
    h.ask(asked(A), Reserved)
    other = asked(C)
    change(other)
    h.refused(other, Kind.ALREADY_EXISTS, Refusal.RESERVATION_TAKEN)


def test_a_plain_reservation_is_nobody_elses() -> None:
    h = sharing()
    h.ask(ReserveRequested(A, TICKET, 1, chain("ab"), 0, 5.0), Reserved)
    h.refused(asked(C), Kind.ALREADY_EXISTS, Refusal.RESERVATION_TAKEN)
    h.refused(AbortRequested(C, TICKET, shared=True), Kind.PERMISSION_DENIED, Refusal.FOREIGN_SESSION)


def test_heads_must_be_named() -> None:
    h = sharing()
    both(h)
    h.refused(CommitRequested(A, TICKET), Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID)
    h.refused(wrote(A, 3, 2), Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID)


def test_nothing_to_write_is_told_to_all_alike() -> None:
    """Or the second, which asks when there is room, would wait for the first in vain."""
    h = sharing()
    h.store("ab")
    nothing = h.ask(asked(A), Reserved)
    assert nothing.skipped == {Skip.ALREADY_STORED: 2}
    assert h.ask(asked(C), Reserved) is nothing
    assert skipped(h, Skip.ALREADY_STORED) == 2, "counted once"


def test_a_writer_that_never_comes() -> None:
    h = sharing()
    h.ask(asked(A), Reserved)
    h.ask(wrote(A, 0, 2), Committed)
    h.now = 5.0
    assert h.send(TimePassed()) == [ReservationEnded(TICKET, A, 0)]
    assert (h.used, h.hit("ab"), skipped(h, Skip.RAN_OUT)) == (0, 0, 2)
    over(h, C)
    assert h.store("ab").blocks.tolist() == [0, 1]


def test_a_writer_that_was_stopped() -> None:
    """Its slots wait for it, however long; the keys do not."""
    h = sharing()
    mine = slots_of(both(h))
    h.ask(wrote(A, 0, 2), Committed)
    h.now = 5.0
    assert h.send(TimePassed()) == [ReservationEnded(TICKET, A, 2)]
    assert h.planner.state.stats.slots_quarantined == 2
    assert not set(slots_of(h.store("ab"))) & set(mine)
    h.refused(wrote(C, 2, 2), Kind.FAILED_PRECONDITION, Refusal.RESERVATION_EXPIRED)
    assert (h.planner.state.stats.slots_quarantined, h.used) == (0, 2)


def test_quarantine_lasts_until_the_last_writer_has_spoken() -> None:
    h = sharing()
    both(h)
    h.now = 5.0
    h.send(TimePassed())
    h.refused(wrote(A, 0, 2), Kind.FAILED_PRECONDITION, Refusal.RESERVATION_EXPIRED)
    assert (h.planner.state.stats.slots_quarantined, h.used) == (2, 2), "C may still write"
    over(h, B)
    h.ask(AbortRequested(C, TICKET), Aborted)
    assert (h.planner.state.stats.slots_quarantined, h.used) == (0, 0)


def test_a_writer_that_dies_in_the_middle() -> None:
    """Nothing is seen, the keys are free at once, the slots when the other writer knows."""
    h = sharing()
    both(h)
    h.ask(wrote(A, 0, 2, more=True), Committed)
    h.send(ProcessExited(C))
    assert (h.hit("ab"), skipped(h, Skip.WRITER_GONE)) == (0, 2)
    assert h.planner.state.stats.slots_quarantined == 2
    h.refused(wrote(A, 0, 2), Kind.FAILED_PRECONDITION, Refusal.RESERVATION_EXPIRED)
    assert (h.planner.state.stats.slots_quarantined, h.used) == (0, 0)


def test_a_writer_that_dies_when_it_is_done_takes_nothing_along() -> None:
    h = sharing()
    both(h)
    h.ask(wrote(A, 0, 2), Committed)
    h.send(ProcessExited(A))
    assert h.ask(wrote(C, 2, 2), Committed).stored == 2
    h.send(SessionOpened(A, True))
    assert h.hit("ab") == 2


def test_a_lost_session_waits_for_its_process() -> None:
    h = sharing()
    both(h)
    h.ask(wrote(A, 0, 2), Committed)
    h.send(SessionEnded(C))
    assert (h.planner.state.stats.slots_quarantined, skipped(h, Skip.WRITER_GONE)) == (2, 2)
    h.send(ProcessExited(C))
    assert (h.planner.state.stats.slots_quarantined, h.used) == (0, 0)


def test_a_writer_that_gives_up() -> None:
    h = sharing()
    both(h)
    assert h.ask(AbortRequested(A, TICKET), Aborted).freed_slots == 0, "C may still write"
    assert h.planner.state.stats.slots_quarantined == 2
    assert skipped(h, Skip.CALLED_OFF) == 2
    assert h.ask(AbortRequested(A, TICKET), Aborted).freed_slots == 0, "a retry"
    late = h.refused(wrote(C, 2, 2), Kind.FAILED_PRECONDITION, Refusal.RESERVATION_EXPIRED)
    assert h.used == 0
    assert h.ask(wrote(C, 2, 2), Refused) == late


@pytest.mark.parametrize("first", [True, False], ids=["asked_already", "not_asked"])
def test_a_writer_that_gives_up_before_it_asked(*, first: bool) -> None:
    h = sharing()
    if first:
        h.ask(asked(A), Reserved)
    h.ask(AbortRequested(C, TICKET, shared=True), Aborted)
    if first:
        assert h.planner.state.stats.slots_quarantined == 2
        h.refused(wrote(A, 0, 2), Kind.FAILED_PRECONDITION, Refusal.RESERVATION_EXPIRED)
    over(h, A)
    assert (h.used, h.planner.state.stats.slots_quarantined) == (0, 0)


def test_writers_that_cannot_map_have_no_quarantine() -> None:
    h = sharing()
    h.ask(asked(B), Reserved)
    h.ask(asked(A), Reserved)
    h.now = 5.0
    h.send(TimePassed())
    assert h.planner.state.stats.slots_quarantined == 2
    h.refused(wrote(B, 0, 2), Kind.FAILED_PRECONDITION, Refusal.RESERVATION_EXPIRED)
    assert h.planner.state.stats.slots_quarantined == 2
    h.ask(AbortRequested(A, TICKET), Aborted)
    assert h.used == 0


def test_what_is_whole_stays_when_the_rest_is_lost() -> None:
    h = sharing()
    both(h)
    for session, first in ((A, 0), (C, 2)):
        h.ask(wrote(session, first, 2, blocks=1, more=True), Committed)
    assert h.hit("ab") == 1
    h.send(ProcessExited(C))
    h.ask(AbortRequested(A, TICKET), Aborted)
    assert (h.hit("ab"), h.used) == (1, 1)


def test_bounds() -> None:
    h = sharing(limits=Limits(max_reservations_per_session=1))
    h.ask(asked(A), Reserved)
    h.ask(ReserveRequested(C, b"o" * 16, 1, chain("xy"), 0, 5.0), Reserved)
    h.refused(asked(C), Kind.RESOURCE_EXHAUSTED, Refusal.TOO_MANY)


def test_who_comes_while_the_daemon_drains_may_join() -> None:
    h = sharing()
    h.ask(asked(A), Reserved)
    h.send(DrainStarted())
    h.ask(asked(C), Reserved)
    h.ask(wrote(A, 0, 2), Committed)
    assert h.ask(wrote(C, 2, 2), Committed).stored == 2


def test_opaque_keys_are_not_shared() -> None:
    h = sharing(spec=NamespaceSpec(TOKENS, (FULL,), ONE_PART.parts, NamespaceKind.FOREIGN))
    h.refused(asked(A), Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID)


def layered() -> Harness:
    """Parts of two heads of three layers."""
    return sharing(spec=NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 2, GRANULE, 3),)))


def stage(session: bytes, first: int, count: int | None, heads: tuple[int, int | None] = (0, None)) -> CommitRequested:
    return CommitRequested(session, TICKET, (Coverage(0, 2, 0, *heads, first, count),))


def test_writers_may_have_layers_of_their_own() -> None:
    h = layered()
    both(h)
    assert h.ask(stage(A, 0, 2), Committed).stored == 0
    assert h.ask(stage(C, 2, None), Committed).stored == 2
    assert h.hit("ab") == 2


def test_every_layer_of_every_head_has_to_be_written() -> None:
    h = layered()
    for session in (A, B, C):
        h.ask(asked(session), Reserved)
    assert h.ask(stage(A, 0, 2, (0, 1)), Committed).stored == 0
    assert h.ask(stage(B, 2, 1), Committed).stored == 0
    assert h.ask(stage(C, 0, 2, (1, 1)), Committed).stored == 2


@pytest.mark.parametrize(("first", "count"), [(3, None), (-1, 1), (0, 4), (2, 2), (1, 0)])
def test_layers_that_a_part_does_not_have(first: int, count: int | None) -> None:
    h = layered()
    both(h)
    h.refused(stage(A, first, count), Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID)


def test_layers_are_learnt_from_the_first_worker_that_tells_them() -> None:
    """Records of earlier runs do not hold them."""
    h = sharing(spec=NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 2, GRANULE),)))
    both(h)
    h.refused(stage(A, 0, 2), Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID)
    h.ask(AbortRequested(A, TICKET), Aborted)
    for layers, known in ((3, True), (0, True), (3, True), (2, False)):
        event = NamespaceOpened(
            1, (1).to_bytes(32, "big"), NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 2, GRANULE, layers),))
        )
        if known:
            h.ask(event, NamespaceReady)
        else:
            h.refused(event, Kind.FAILED_PRECONDITION, Refusal.NAMESPACE_MISMATCH)
    assert h.planner.state.namespaces[1].spec.parts[0].layers == 3
