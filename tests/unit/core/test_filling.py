"""Commit, Abort and what becomes of a reservation that nobody ends."""

from __future__ import annotations

import pytest

from prefixcache.core.commands import Aborted, Change, Committed, Published, Refused, ReservationEnded, SessionClosed
from prefixcache.core.events import (
    AbortRequested,
    ClearRequested,
    CommitRequested,
    Coverage,
    ProcessExited,
    SessionEnded,
    TimePassed,
)
from prefixcache.core.reasons import Kind, Miss, Refusal, Skip
from tests.unit.core.harness import A, B, Harness, chain, slots_of


def test_nothing_is_visible_before_the_commit() -> None:
    h = Harness()
    reserved = h.reserve("ab")
    assert h.hit("ab") == 0
    assert h.commit(reserved) == Committed(reserved.reservation, 2, {}, 0, over=True)
    assert h.hit("ab") == 2


def test_ranks_commit_their_heads_one_by_one() -> None:
    h = Harness()
    reserved = h.reserve("ab")
    first = h.commit(reserved, Coverage(0, 2, 0, 0, 2), more=True)
    assert (first.stored, first.open_blocks) == (0, 2)
    assert h.hit("ab") == 0
    last = h.commit(reserved, Coverage(0, 2, 0, 2))
    assert (last.stored, last.open_blocks) == (2, 0)
    assert h.hit("ab") == 2


def test_a_prefill_in_chunks_becomes_visible_chunk_by_chunk() -> None:
    h = Harness()
    reserved = h.reserve("abcd")
    assert h.commit(reserved, Coverage(0, 2, 0), more=True).stored == 2
    assert h.hit("abcd") == 2
    assert h.commit(reserved, Coverage(3, 1, 0), more=True).stored == 0, "block 3 before block 2"
    assert h.hit("abcd") == 2
    assert h.commit(reserved, Coverage(2, 1, 0)).stored == 2
    assert h.hit("abcd") == 4


def test_a_half_filled_reservation_is_refused_and_stays() -> None:
    h = Harness()
    reserved = h.reserve("ab")
    half = CommitRequested(A, reserved.reservation, (Coverage(0, 1, 0),))
    h.refused(half, Kind.FAILED_PRECONDITION, Refusal.RESERVATION_INCOMPLETE)
    assert h.hit("ab") == 0
    assert h.commit(reserved, Coverage(1, 1, 0)).stored == 2


def test_only_its_session_may_end_it() -> None:
    h = Harness()
    reserved = h.reserve("ab")
    h.refused(CommitRequested(B, reserved.reservation), Kind.PERMISSION_DENIED, Refusal.FOREIGN_SESSION)
    h.refused(AbortRequested(B, reserved.reservation), Kind.PERMISSION_DENIED, Refusal.FOREIGN_SESSION)
    assert h.commit(reserved).stored == 2


def test_a_retried_end_is_answered_the_same() -> None:
    h = Harness()
    reserved = h.reserve("ab")
    first = h.commit(reserved)
    assert h.commit(reserved) == first
    h.refused(AbortRequested(A, reserved.reservation), Kind.NOT_FOUND, Refusal.RESERVATION_UNKNOWN)
    aborted = h.ask(AbortRequested(A, h.reserve("xy").reservation), Aborted)
    assert h.ask(AbortRequested(A, aborted.reservation), Aborted) == aborted
    h.refused(CommitRequested(A, aborted.reservation), Kind.NOT_FOUND, Refusal.RESERVATION_UNKNOWN)


def test_abort_gives_back_what_is_not_visible() -> None:
    h = Harness()
    reserved = h.reserve("abcd")
    h.commit(reserved, Coverage(0, 1, 0), more=True)
    assert h.ask(AbortRequested(A, reserved.reservation), Aborted).freed_slots == 3
    assert (h.used, h.hit("abcd")) == (1, 1)


def test_a_stopped_writer_keeps_its_slots_and_loses_its_keys() -> None:
    """SIGSTOP in mid-fill: the keys are stored by another, whose bytes are safe, until the writer has spoken."""
    h = Harness()
    stopped = h.reserve("ab", ttl_s=5.0)
    h.now = 5.0
    assert h.send(TimePassed()) == [ReservationEnded(stopped.reservation, A, 2)]
    assert h.planner.state.stats.slots_quarantined == 2
    other = h.store("ab", B)
    assert not set(slots_of(other)) & set(slots_of(stopped))
    assert h.hit("ab") == 2
    late = CommitRequested(A, stopped.reservation)
    refusal = h.refused(late, Kind.FAILED_PRECONDITION, Refusal.RESERVATION_EXPIRED)
    assert (h.used, h.planner.state.stats.slots_quarantined) == (2, 0)
    assert h.ask(late, Refused) == refusal, "a retry learns the same"
    assert h.acquire("ab").runs[0].slots.tolist() == slots_of(other)


def test_with_more_to_come_the_quarantine_stays() -> None:
    h = Harness()
    stopped = h.reserve("ab", ttl_s=5.0)
    h.now = 6.0
    rank = CommitRequested(A, stopped.reservation, (Coverage(0, 2, 0, 0, 1),), more=True)
    h.refused(rank, Kind.FAILED_PRECONDITION, Refusal.RESERVATION_EXPIRED)
    assert h.planner.state.stats.slots_quarantined == 2
    assert h.ask(AbortRequested(A, stopped.reservation), Aborted).freed_slots == 2
    assert h.used == 0


def test_a_writer_that_cannot_map_has_no_quarantine() -> None:
    h = Harness()
    reserved = h.reserve("ab", B, ttl_s=5.0)
    h.now = 5.0
    assert h.send(TimePassed()) == [ReservationEnded(reserved.reservation, B, 0)]
    assert h.used == 0
    h.refused(CommitRequested(B, reserved.reservation), Kind.FAILED_PRECONDITION, Refusal.RESERVATION_EXPIRED)


def test_a_lost_session_quarantines_until_its_process_is_gone() -> None:
    h = Harness()
    h.store("keep")
    reserved = h.reserve("ab")
    assert h.ask(SessionEnded(A), SessionClosed).quarantined_slots == 2
    assert h.used == 6
    h.refused(CommitRequested(A, reserved.reservation), Kind.FAILED_PRECONDITION, Refusal.RESERVATION_EXPIRED)
    assert h.used == 4
    h.refused(ProcessExited(A), Kind.NOT_FOUND, Refusal.SESSION_UNKNOWN)  # nothing waited for it any more


def test_a_killed_writer_gives_everything_back_at_once() -> None:
    h = Harness()
    h.reserve("ab")
    assert h.ask(ProcessExited(A), SessionClosed).quarantined_slots == 0
    assert h.used == 0
    h.refused(ProcessExited(A), Kind.NOT_FOUND, Refusal.SESSION_UNKNOWN)


def test_a_child_waits_for_its_parents_commit() -> None:
    h = Harness()
    parent = h.reserve("ab")
    child = h.reserve("abcd", B)
    assert h.commit(child, session=B).stored == 2
    assert h.hit("abcd") == 0
    h.commit(parent)
    assert h.hit("abcd") == 4


def test_a_child_of_a_dead_writer_is_orphaned() -> None:
    h = Harness()
    h.reserve("ab")
    child = h.reserve("abcd", B)
    grandchild = h.reserve("abcde", B)
    assert h.commit(grandchild, session=B).stored == 1
    h.send(ProcessExited(A))
    committed = h.commit(child, session=B)
    assert (committed.stored, committed.dropped) == (0, {Skip.ORPHANED: 2})
    assert h.used == 0
    assert h.planner.state.stats.blocks_skipped[Skip.ORPHANED] == 2


def test_the_same_keys_stored_again_do_not_revive_an_orphan() -> None:
    h = Harness()
    parent = h.reserve("ab")
    child = h.reserve("abcd", B)
    h.send(AbortRequested(A, parent.reservation))
    h.store("abcd")
    assert h.commit(child, session=B).dropped == {Skip.ORPHANED: 2}
    assert h.hit("abcd") == 4


def test_cleared_while_being_filled() -> None:
    h = Harness()
    reserved = h.reserve("ab")
    h.send(ClearRequested())
    assert h.commit(reserved).dropped == {Skip.ORPHANED: 2}
    assert h.used == 0


@pytest.mark.parametrize(
    "piece",
    [
        Coverage(2, 1, 0),
        Coverage(0, 3, 0),
        Coverage(0, 0, 0),
        Coverage(-1, 1, 0),
        Coverage(0, 1 << 40, 0),
        Coverage(0, 1, 1),
        Coverage(0, 1, -1),
        Coverage(0, 1, 0, 4),
        Coverage(0, 1, 0, 3, 2),
        Coverage(0, 1, 0, -1, 2),
        Coverage(0, 1, 0, 0, 0),
    ],
)
def test_coverage_that_was_not_granted(piece: Coverage) -> None:
    h = Harness()
    reserved = h.reserve("ab")
    event = CommitRequested(A, reserved.reservation, (piece,))
    h.refused(event, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID)
    assert h.commit(reserved).stored == 2


def test_unknown_reservation() -> None:
    h = Harness()
    h.refused(CommitRequested(A, b"?" * 16), Kind.NOT_FOUND, Refusal.RESERVATION_UNKNOWN)


def test_stored_blocks_are_announced_when_they_can_be_seen() -> None:
    h = Harness(publish=True)
    parent = h.reserve("a")
    child = h.reserve("ab")
    h.commit(child)
    assert not any(isinstance(command, Published) for command in h.all)
    h.commit(parent)
    told = [command for command in h.all if isinstance(command, Published)]
    assert [(each.change, each.keys, each.parent, each.first_block) for each in told] == [
        (Change.STORED, chain("a"), b"", 0),
        (Change.STORED, chain("ab")[32:], chain("a"), 1),
    ]
    assert [each.fingerprint for each in told] == [(1).to_bytes(32, "big")] * 2


def test_a_reader_never_sees_a_recycled_slot_under_the_old_generation() -> None:
    h = Harness(slots=2, slab_slots=2)
    h.store("ab")
    old = h.acquire("ab", ttl_s=1.0).runs[0]
    h.now = 2.0
    new = h.store("xy")
    assert set(slots_of(new)) == set(old.slots.tolist())
    assert new.generation not in old.generations.tolist()
    assert h.planner.state.stats.tokens.miss[Miss.LEASE_EXPIRED] > 0
