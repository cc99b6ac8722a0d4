"""Writes to disk: before memory is short, in chains, early, on request; what fails stays in memory."""

from __future__ import annotations

import numpy as np

from prefixcache.core.commands import ComputeChecksum, Reserved, WriteRecords
from prefixcache.core.disk import STARTING
from prefixcache.core.events import ChecksumDone, DiskChanged, FlushStarted, RecordsWritten, WriteEnd
from prefixcache.core.reasons import DiskDrop, Kind, Refusal
from prefixcache.core.spec import DiskSpec
from tests.unit.core.disk_harness import DiskHarness
from tests.unit.core.harness import GRANULE, chain


def test_a_share_of_memory_is_kept_free_or_on_disk() -> None:
    harness = DiskHarness(disk=DiskSpec(reserve_share=0.25))
    harness.store("abcdefghijkl")  # 12 of 16 slots: a quarter is free
    assert not harness.orders
    harness.now += 10
    harness.store("zy")
    (order,) = harness.take(WriteRecords)
    assert order.records.keys == chain("abcd")  # front to back, a quarter of memory at once
    assert order.records.parents == bytes(32) + chain("abc")
    assert order.records.depths.tolist() == [0, 1, 2, 3]


def test_the_reserve_is_filled_job_after_job_at_the_speed_of_the_disk() -> None:
    harness = DiskHarness(slots=32, disk=DiskSpec(reserve_share=0.25, writing_bytes=2 * GRANULE))
    for word in ("abcdefgh", "ijklmnop", "qrstuvwx", "yzABCDEF"):
        harness.store(word)
    assert harness.end_writes() == 8  # two at once, and nobody but the disk said that it is time for the next two


def test_a_disk_without_room_is_not_asked_again_at_once() -> None:
    harness = DiskHarness(slots=32, disk=DiskSpec(reserve_share=0.25, writing_bytes=2 * GRANULE))
    for word in ("abcdefgh", "ijklmnop", "qrstuvwx", "yzABCDEF"):
        harness.store(word)
    assert harness.end_writes(WriteEnd.NO_ROOM) == 2
    harness.pass_time(1.0)
    assert harness.end_writes() == 8


def test_room_is_made_from_what_is_on_disk_and_loses_nothing() -> None:
    harness = DiskHarness()
    harness.store("abcdefgh")
    harness.store("zyxwvuts")
    assert harness.flush() == 16
    granted: Reserved = harness.store("nmlk")
    assert len(granted.blocks) == 4
    assert harness.planner.state.stats.disk_drops[DiskDrop.UNWRITTEN] == 0
    assert harness.planner.state.namespaces[1].cold_blocks == 4
    assert harness.acquire("abcdefgh", deadline_s=100.0).planned_blocks == 8


def test_what_is_on_disk_goes_before_what_is_not_whatever_its_age() -> None:
    harness = DiskHarness()
    harness.store("abcd")
    harness.flush()
    harness.store("zyxwvutsrqpo")
    harness.hit("abcd")  # used last
    harness.store("n")
    assert harness.planner.state.stats.disk_drops[DiskDrop.UNWRITTEN] == 0
    assert harness.hit("zyxwvutsrqpo") == 12


def test_without_anything_on_disk_the_least_valuable_is_dropped_and_counted() -> None:
    harness = DiskHarness()
    harness.send(DiskChanged(reads_on=True, writes_on=False, reason="no_space"))
    harness.store("abcdefgh")
    harness.store("zyxwvuts")
    harness.store("nm")
    assert harness.planner.state.stats.disk_drops[DiskDrop.UNWRITTEN] == 2
    assert harness.hit("abcdefgh") == 6


def test_a_write_that_fails_is_counted_and_tried_again() -> None:
    harness = DiskHarness()
    harness.store("ab")
    harness.send(FlushStarted())
    assert harness.end_writes(WriteEnd.FAILED) == 2
    assert harness.planner.state.stats.disk_drops[DiskDrop.WRITE_FAILED] == 2
    assert harness.hit("ab") == 2
    assert harness.flush() == 2


def test_a_flush_goes_on_when_the_disk_works() -> None:
    harness = DiskHarness()
    demoter, disk = harness.planner.demoter, harness.planner.state.disk
    assert demoter is not None
    disk.writes_on, disk.reason = False, STARTING
    harness.store("abcdefgh")
    assert harness.flush() == 0
    assert demoter.is_flushing
    harness.send(DiskChanged(reads_on=False, writes_on=False, reason="unusable"))
    assert not demoter.is_flushing, "nobody knows when"
    assert harness.planner.state.namespaces[1].table.unwritten_count == 8
    harness.send(DiskChanged(reads_on=True, writes_on=True))
    assert harness.end_writes() == 8
    assert harness.planner.state.namespaces[1].table.unwritten_count == 0
    assert not demoter.is_flushing


def test_a_block_whose_bytes_changed_in_memory_leaves_with_what_follows_it() -> None:
    harness = DiskHarness(checksum=True)
    harness.store("abcd")
    order = next(each for each in harness.all if isinstance(each, ComputeChecksum))
    known = np.arange(64, dtype=np.uint8).reshape(4, 16)
    harness.send(ChecksumDone(1, 0, order.rows, order.generations, known))
    harness.send(FlushStarted())
    (write,) = harness.take(WriteRecords)
    assert np.array_equal(write.digests, known)
    ends = np.array([0, WriteEnd.CORRUPT, 0, 0], np.uint8)
    places = np.arange(4, dtype=np.uint32)
    harness.send(RecordsWritten(write.job, places, ends, places // 4 + 1, places, 1 << 40))
    assert harness.hit("abcd") == 1
    assert harness.planner.state.stats.parts_failed_verification == 1


def test_what_is_being_written_keeps_its_slot_and_its_bytes() -> None:
    harness = DiskHarness()
    harness.store("abcdefghijklmnop")  # all of memory
    harness.send(FlushStarted())
    (order,) = harness.take(WriteRecords)
    assert len(order.records.rows) == 4  # a quarter of memory at once
    granted = harness.reserve("z" * 16)
    held = set(order.records.slots.tolist())
    assert len(granted.blocks) == 12
    assert held.isdisjoint(granted.grants[0].slots.tolist())


def test_blocks_that_are_hit_again_and_again_are_written_early_within_a_budget() -> None:
    harness = DiskHarness(disk=DiskSpec(reserve_share=0.0, early_bytes_per_day=2 * GRANULE))
    harness.store("ab")
    harness.hit("ab")
    harness.pass_time(1)
    assert not harness.orders
    harness.hit("ab")
    harness.pass_time(1)
    assert harness.end_writes() == 2
    harness.store("cd")
    harness.hit("cd")
    harness.hit("cd")
    harness.pass_time(1)
    assert not harness.orders  # the day's budget is used up
    harness.pass_time(86_400)
    assert harness.end_writes() == 2


def test_a_job_nobody_knows_is_refused() -> None:
    nothing = np.zeros(0, np.uint32)
    event = RecordsWritten(99, nothing, nothing.astype(np.uint8), nothing, nothing, 0)
    DiskHarness().refused(event, Kind.NOT_FOUND, Refusal.COPY_UNKNOWN)


def test_a_slot_that_was_moved_away_waits_for_the_write_that_still_reads_it() -> None:
    harness = DiskHarness()
    harness.store("abcd")
    harness.send(FlushStarted())
    state, mover = harness.planner.state, harness.planner.mover
    old = state.host.allocate(GRANULE, 1)  # as after a move of one of the slots being written
    mover.retired.append((state.next_serial(), old))
    mover.settle_retired()
    assert len(mover.retired) == 1
    harness.end_writes()
    assert not mover.retired
    assert harness.used == 4
