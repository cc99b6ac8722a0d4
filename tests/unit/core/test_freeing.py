"""Room on disk: which segment goes, what of it is kept, and that a prefix loses its end first."""

from __future__ import annotations

import numpy as np

from prefixcache.core.commands import FreeSegment, ReadRecords
from prefixcache.core.events import ReadEnd, RecordsRead, SegmentFreed
from prefixcache.core.reasons import DiskDrop, Kind, Refusal
from prefixcache.core.spec import DiskSpec
from tests.unit.core.disk_harness import DiskHarness
from tests.unit.core.harness import GRANULE, chain

WAIT = 100.0


def full(*prompts: str, per_segment: int = 4) -> DiskHarness:
    """Prompts on disk, one segment each, none of them in memory; the cap leaves no room."""
    harness = DiskHarness(
        disk=DiskSpec(segment_bytes=per_segment * GRANULE, reserve_share=0.0), per_segment=per_segment
    )
    for prompt in prompts:
        harness.store(prompt)
        harness.flush()
    push_out(harness)
    harness.room_bytes = 0
    return harness


def push_out(harness: DiskHarness) -> None:
    """Everything that is on disk leaves memory."""
    fill = "0123456789ABCDEF"
    harness.store(fill)
    harness.clear(fill[0])


def begun(harness: DiskHarness) -> list[FreeSegment]:
    """Writes a block, after which the cap leaves no room; what is being freed for that."""
    harness.store("Z")
    harness.flush()
    harness.pass_time(0.1)
    return harness.take(FreeSegment)


def test_the_segment_with_the_least_to_keep_goes_and_its_blocks_with_it() -> None:
    harness = full("abcd", "efgh", "ijkl")
    harness.hit_from_disk("abcd")
    push_out(harness)
    (order,) = begun(harness)
    assert (order.segment, order.keep) == (2, ())
    assert harness.planner.state.stats.disk_drops[DiskDrop.NOT_WANTED] == 4
    harness.free(order)
    assert harness.hit("efgh") == 0
    assert harness.acquire("ijkl", deadline_s=WAIT).planned_blocks == 4


def test_blocks_with_something_below_them_elsewhere_are_appended_again() -> None:
    harness = full("abcde", "x", "abcdefgh", per_segment=6)  # segment 2 is the newest, and stays
    (order,) = begun(harness)
    assert order.segment == 1
    (keep,) = order.keep
    assert keep.keys == chain("abcde")
    harness.free(order)
    acquired = harness.acquire("abcdefgh", deadline_s=WAIT)
    assert acquired.planned_blocks == 8
    (read,) = harness.take(ReadRecords)
    assert set(read.records.segments.tolist()) == {2, 90}


def test_a_segment_of_which_all_must_stay_is_passed_over() -> None:
    harness = full("abcde", "abcdefg", "xyz", per_segment=5)
    (order,) = begun(harness)
    assert order.segment == 2


def test_a_tail_goes_before_what_is_in_front_of_it() -> None:
    harness = full("abcdefgh", per_segment=4)  # its front is in segment 1, its tail in segment 2
    (order,) = begun(harness)
    assert order.segment == 2 or order.keep
    harness.free(order)
    assert harness.acquire("abcdefgh", deadline_s=WAIT).planned_blocks in (4, 8)


def test_what_is_in_memory_is_only_there_from_then_on() -> None:
    harness = full("abcd")
    harness.hit_from_disk("abcd")
    (order,) = begun(harness)
    assert (order.segment, order.keep) == (1, ())
    harness.free(order)
    assert harness.hit("abcd") == 4
    harness.room_bytes = 1 << 40
    assert harness.flush() == 4  # to be written anew


def test_a_segment_that_is_being_read_stays() -> None:
    harness = full("abcd", "efgh")
    harness.acquire("abcd", deadline_s=WAIT)
    (order,) = begun(harness)
    assert order.segment == 2


def test_a_record_that_moved_while_it_was_asked_for_is_not_lost() -> None:
    harness = full("abcde", "x", "abcdefgh", per_segment=6)
    (order,) = begun(harness)
    acquired = harness.acquire("abcde", deadline_s=WAIT)
    (read,) = harness.take(ReadRecords)
    assert set(read.records.segments.tolist()) == {1}
    harness.free(order)
    index = np.arange(5, dtype=np.uint32)
    harness.send(RecordsRead(read.job, index, np.full(5, ReadEnd.LOST, np.uint8)))
    harness.release(acquired)
    assert harness.acquire("abcde", deadline_s=WAIT).planned_blocks == 5
    assert harness.planner.state.stats.disk_drops[DiskDrop.LOST] == 0


def test_a_segment_that_could_not_be_freed_stays_as_it_was() -> None:
    harness = full("abcde", "x", "abcdefgh", per_segment=6)
    (order,) = begun(harness)
    harness.free(order, freed=False)
    assert harness.acquire("abcdefgh", deadline_s=WAIT).planned_blocks == 8


def test_what_could_not_be_kept_goes_with_all_that_follows_it() -> None:
    harness = full("abcde", "x", "abcdefgh", per_segment=6)
    assert len(begun(harness)) == 1
    ends = np.array([0, 0, 2, 0, 0], np.uint8)
    places = np.array([90, 90, 0, 90, 90], np.uint32), np.array([2, 4, 0, 8, 10], np.uint32)
    harness.send(SegmentFreed(1, True, ((ends, *places),), 1 << 40))
    assert harness.acquire("abcdefgh", deadline_s=WAIT).planned_blocks == 2


def test_what_was_cleared_while_it_was_appended_again_gets_another_tombstone() -> None:
    harness = full("abcde", "x", "abcdefgh", per_segment=6)
    (order,) = begun(harness)
    harness.clear("abcde")
    harness.free(order)
    revoked = [command.keys for command in harness.all if type(command).__name__ == "RevokeRecords"]
    assert revoked == [chain("abcde")[-32:]]


def test_nothing_is_freed_while_there_is_room_or_twice_at_once() -> None:
    harness = full("abcd", "efgh")
    harness.room_bytes = 1 << 40
    assert not begun(harness)
    harness.room_bytes = 0
    harness.store("Y")
    harness.flush()
    harness.pass_time(0.1)
    assert len(harness.take(FreeSegment)) == 1
    harness.pass_time(0.1)
    assert not harness.take(FreeSegment)


def test_a_segment_nobody_frees_is_refused() -> None:
    DiskHarness().refused(SegmentFreed(7, True, (), 0), Kind.NOT_FOUND, Refusal.COPY_UNKNOWN)
