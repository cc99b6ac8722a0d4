"""Blocks on disk only that a worker computed anew: granted, in memory again, or left as they were."""

from __future__ import annotations

import numpy as np
import pytest

from prefixcache.core.commands import Aborted, Acquired, FreeSegment, ReservationEnded, SetGenerations, WriteRecords
from prefixcache.core.events import (
    AbortRequested,
    ArrivalsCancelled,
    ClearRequested,
    DiskChanged,
    ReadEnd,
    SegmentFreed,
    SessionEnded,
    WriteEnd,
)
from prefixcache.core.ids import GroupKind
from prefixcache.core.namespaces import Namespace
from prefixcache.core.reasons import DiskDrop, Miss, Skip
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec
from tests.unit.core.disk_harness import SLOW, DiskHarness
from tests.unit.core.harness import GRANULE, TOKENS, A, B, chain

WAIT = 100.0
TWO_PARTS = NamespaceSpec(TOKENS, (GroupSpec(GroupKind.FULL),), (PartSpec(0, 4, GRANULE), PartSpec(0, 4, GRANULE)))
FILL = "zyxwvutsrqponmlk"


def cold(letters: str = "abcdefgh", *, hot: int = 0, spec: NamespaceSpec | None = None) -> DiskHarness:
    """A prompt of which all but the first `hot` blocks are on disk only; nothing else is there."""
    parts = len(spec.parts) if spec is not None else 1
    fields = {} if spec is None else {"spec": spec}
    harness = DiskHarness(16 * parts, disk=SLOW, **fields)
    harness.store(letters)
    harness.flush()
    harness.store(FILL[: 16 - hot])
    harness.flush()
    harness.clear(FILL[0])
    assert space_of(harness).cold_blocks == len(letters) - hot
    return harness


def space_of(harness: DiskHarness) -> Namespace:
    return harness.planner.state.namespaces[1]


def computed(harness: DiskHarness, letters: str) -> Acquired:
    """A worker asks for a prompt that it computes faster than the disk brings it."""
    acquired = harness.acquire(letters, deadline_s=WAIT, recompute_s_per_token=1e-6)
    if acquired.planned_blocks:
        harness.release(acquired)
    return acquired


@pytest.mark.parametrize("hot", [0, 3])
def test_what_was_computed_as_the_disk_is_slow_is_in_memory_again(hot: int) -> None:
    harness = cold(hot=hot)
    asked = computed(harness, "abcdefgh")
    assert (asked.planned_blocks, asked.stop) == (hot, Miss.SLOWER_THAN_RECOMPUTE)
    reserved = harness.reserve("abcdefgh")
    assert reserved.blocks.tolist() == list(range(hot, 8))
    assert reserved.skipped == ({Skip.ALREADY_STORED: hot} if hot else {})
    assert isinstance(harness.all[-2], SetGenerations)
    assert harness.commit(reserved).stored == 8 - hot
    assert space_of(harness).cold_blocks == 0
    assert harness.acquire("abcdefgh").ready_blocks == 8


def test_its_records_stay_so_that_it_may_leave_again_unwritten() -> None:
    harness = cold()
    harness.store("abcdefgh")
    assert harness.flush() == 0
    harness.store(FILL)
    assert space_of(harness).cold_blocks == 8
    assert harness.planner.state.stats.disk_drops[DiskDrop.UNWRITTEN] == 0
    harness.clear(FILL[0])
    acquired = harness.acquire("abcdefgh", deadline_s=WAIT)
    assert acquired.planned_blocks == 8
    harness.end_reads()
    assert harness.release(acquired).hit_tokens == 8 * TOKENS


def test_with_what_follows_it_and_with_all_its_parts() -> None:
    harness = cold(spec=TWO_PARTS)
    reserved = harness.reserve("abcdefghij")
    assert reserved.blocks.tolist() == list(range(10))
    assert [grant.part for grant in reserved.grants] == [0, 1]
    harness.commit(reserved)
    assert harness.acquire("abcdefghij").ready_blocks == 10
    assert harness.used == 20


def test_some_of_its_parts_do_not_bring_a_block_back() -> None:
    harness = cold(spec=TWO_PARTS)
    assert harness.reserve("abcdefgh", part_mask=0b01).skipped == {Skip.ALREADY_STORED: 8}


def test_also_while_the_disk_is_off() -> None:
    harness = cold()
    harness.send(DiskChanged(False, False, "io_error"))
    assert harness.acquire("abcdefgh", deadline_s=WAIT).stop is Miss.TIER_OFF
    harness.store("abcdefgh")
    assert harness.acquire("abcdefgh").ready_blocks == 8


def test_two_workers_do_not_fill_the_same_blocks() -> None:
    harness = cold()
    first = harness.reserve("abcdef")
    second = harness.reserve("abcdefgh", B)
    assert second.blocks.tolist() == [6, 7]
    assert second.skipped == {Skip.BEING_WRITTEN: 6}
    harness.commit(second, session=B)
    harness.commit(first)
    assert harness.acquire("abcdefgh").ready_blocks == 8
    assert harness.used == 8


def test_what_a_read_brings_is_left_to_it() -> None:
    harness = cold()
    acquired = harness.acquire("abcd", deadline_s=WAIT)
    reserved = harness.reserve("abcdefgh", B)
    assert reserved.blocks.tolist() == [4, 5, 6, 7]
    assert reserved.skipped == {Skip.BEING_WRITTEN: 4}
    harness.end_reads()
    assert harness.release(acquired).hit_tokens == 4 * TOKENS


def test_a_read_that_is_called_off_is_in_nobodys_way() -> None:
    harness = cold()
    acquired = harness.acquire("abcd", deadline_s=WAIT)
    harness.send(ArrivalsCancelled(A, acquired.lease))
    harness.store("abcdefgh", B)
    harness.end_reads(ReadEnd.FAILED)
    assert harness.acquire("abcdefgh", B).ready_blocks == 8
    assert harness.used == 8


def test_what_a_read_brought_meanwhile_is_kept_and_the_slots_go_back() -> None:
    harness = cold()
    reserved = harness.reserve("abcdefgh")
    acquired = harness.acquire("abcdefgh", B, deadline_s=WAIT)
    assert acquired.planned_blocks == 8
    harness.end_reads()
    harness.commit(reserved)
    assert harness.used == 8
    assert harness.acquire("abcdefgh").ready_blocks == 8


def test_a_record_that_is_lost_does_not_take_what_was_stored_again() -> None:
    harness = cold()
    reserved = harness.reserve("abcdefgh")
    harness.acquire("abcdefgh", B, deadline_s=WAIT)
    harness.commit(reserved)
    harness.end_reads(ReadEnd.LOST)
    assert harness.acquire("abcdefgh").ready_blocks == 8
    assert harness.flush() == 8, "only memory has them now"


@pytest.mark.parametrize("how", ["aborted", "ran out", "session closed"])
def test_what_is_not_committed_stays_on_disk(how: str) -> None:
    harness = cold(hot=2)
    reserved = harness.reserve("abcdefghij", B, ttl_s=5.0)
    if how == "aborted":
        harness.ask(AbortRequested(B, reserved.reservation), Aborted)
    elif how == "ran out":
        harness.pass_time(50.0)
        assert any(isinstance(command, ReservationEnded) for command in harness.all)
    else:
        harness.send(SessionEnded(B))
    assert space_of(harness).cold_blocks == 6
    again = harness.reserve("abcdefgh")
    assert again.blocks.tolist() == [2, 3, 4, 5, 6, 7]
    harness.commit(again)
    assert harness.acquire("abcdefgh").ready_blocks == 8


def test_what_stands_in_front_is_not_evicted_for_it() -> None:
    harness = cold(hot=4)
    held = harness.store(FILL[:8], B)
    lease = harness.acquire(FILL[:8], B)
    assert lease.planned_blocks == len(held.blocks)
    reserved = harness.reserve("abcdefghijkl")
    assert reserved.blocks.tolist() == [4, 5, 6, 7]
    assert reserved.skipped == {Skip.ALREADY_STORED: 4, Skip.POOL_FULL: 4}
    harness.commit(reserved)
    assert harness.acquire("abcdefgh").ready_blocks == 8


def test_the_leading_ones_that_fit_come_back() -> None:
    harness = cold(hot=4)
    harness.store(FILL[:10], B)
    assert harness.acquire(FILL[:10], B).planned_blocks == 10
    reserved = harness.reserve("abcdefgh")
    assert reserved.blocks.tolist() == [4, 5]
    assert reserved.skipped == {Skip.ALREADY_STORED: 4, Skip.POOL_FULL: 2}
    harness.commit(reserved)
    assert space_of(harness).cold_blocks == 2
    assert harness.acquire("abcdef").ready_blocks == 6


def test_one_that_was_cleared_meanwhile_is_not_there() -> None:
    harness = cold()
    reserved = harness.reserve("abcdefgh")
    harness.send(ClearRequested(1, chain("a")))
    assert harness.commit(reserved).dropped == {Skip.ORPHANED: 8}
    assert (harness.used, harness.hit("abcdefgh")) == (0, 0)


def test_a_segment_that_goes_leaves_what_came_back_to_memory_only_there() -> None:
    harness = DiskHarness(9, disk=SLOW, per_segment=5)
    for word in ("abcd", "!"):
        harness.store(word)
        harness.flush()
    harness.store("zyxwvuts?")
    reserved = harness.reserve("abcd")  # pins them: they are kept when the segment goes
    harness.room_bytes = 0
    harness.flush()
    harness.pass_time(1.0)
    (order,) = harness.take(FreeSegment)
    harness.commit(reserved)
    (records,) = order.keep
    size = len(records.rows)
    none = np.zeros(size, np.uint32)
    rotten = (np.full(size, WriteEnd.FAILED, np.uint8), none, none)
    harness.send(SegmentFreed(order.segment, freed=True, kept=(rotten,), room_bytes=1 << 40))
    assert harness.acquire("abcd").ready_blocks == 4
    assert [order for order in harness.orders if isinstance(order, WriteRecords)] == []
