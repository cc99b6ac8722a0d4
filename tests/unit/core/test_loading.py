"""Blocks that are on disk only: what is promised of them, what arrives, what is counted."""

from __future__ import annotations

import numpy as np
import pytest

from prefixcache.core.commands import (
    Acquired,
    Arrived,
    CancelReads,
    LookedUp,
    ReadRecords,
    Released,
    SetGenerations,
    WriteRecords,
)
from prefixcache.core.events import (
    ArrivalsCancelled,
    ClearRequested,
    DiskChanged,
    LeaseReleased,
    LookupRequested,
    ReadEnd,
    RecordsRead,
)
from prefixcache.core.ids import GroupKind, Tier
from prefixcache.core.reasons import DiskDrop, Kind, Miss, Refusal
from prefixcache.core.spec import DiskSpec, GroupSpec, NamespaceSpec, PartSpec
from tests.unit.core.disk_harness import SLOW, DiskHarness
from tests.unit.core.harness import GRANULE, TOKENS, A, B, chain

WAIT = 100.0
TWO_PARTS = NamespaceSpec(TOKENS, (GroupSpec(GroupKind.FULL),), (PartSpec(0, 4, GRANULE), PartSpec(0, 4, GRANULE)))


def cold(letters: str = "abcdefgh", *, hot: int = 0, disk: DiskSpec | None = None) -> DiskHarness:
    """A prompt of which all but the first `hot` blocks are on disk only."""
    harness = DiskHarness(disk=disk)
    harness.store(letters)
    harness.flush()
    fill = "zyxwvutsrqponmlk"[: 16 - hot]
    harness.store(fill)
    harness.flush()
    harness.send(ClearRequested(1, chain(fill[0])))
    assert harness.planner.state.namespaces[1].cold_blocks == len(letters) - hot
    return harness


def test_what_is_on_disk_is_promised_and_arrives() -> None:
    harness = cold(hot=3)
    acquired = harness.acquire("abcdefgh", deadline_s=WAIT)
    assert (acquired.planned_blocks, acquired.ready_blocks, acquired.stop) == (8, 3, None)
    assert acquired.tokens == (0, 3 * TOKENS, 5 * TOKENS, 0)
    assert acquired.eta_s > 0
    harness.end_reads(records=slice(0, 2))
    assert [each.ready_blocks for each in harness.arrivals] == [5]
    assert not harness.arrivals[0].done
    assert harness.release(acquired).hit_tokens == 5 * TOKENS


def test_the_last_arrival_says_that_it_is_the_last() -> None:
    harness = cold(hot=3)
    acquired = harness.acquire("abcdefgh", deadline_s=WAIT)
    harness.end_reads()
    (news,) = harness.arrivals
    assert (news.ready_blocks, news.done, news.stop) == (8, True, None)
    (run,) = news.runs
    assert (run.first_block, len(run.slots)) == (3, 5)
    assert harness.release(acquired).hit_tokens == 8 * TOKENS
    assert (harness.hits(Tier.HOST), harness.hits(Tier.DISK)) == (3 * TOKENS, 5 * TOKENS)
    assert harness.acquire("abcdefgh").ready_blocks == 8  # from memory now


def test_generations_are_set_before_a_read_begins() -> None:
    harness = cold()
    harness.acquire("abcd", deadline_s=WAIT)
    kinds = [type(command) for command in harness.all]
    assert kinds.index(SetGenerations) < kinds.index(ReadRecords) < kinds.index(Acquired)


def test_records_come_in_any_order_and_are_ready_from_the_front() -> None:
    harness = cold()
    harness.acquire("abcd", deadline_s=WAIT)
    (order,) = harness.take(ReadRecords)
    ready = []
    for place in (3, 1, 0, 2):
        harness.send(RecordsRead(order.job, np.array([place], np.uint32), np.zeros(1, np.uint8)))
        ready.append(harness.arrivals[-1].ready_blocks if harness.arrivals else 0)
    assert ready == [0, 0, 2, 4]


def test_a_block_is_ready_when_all_its_parts_are() -> None:
    harness = DiskHarness(32, TWO_PARTS)
    harness.store("abcd")
    harness.flush()
    harness.store("zyxwvutsrqponmlk")
    harness.acquire("ab", deadline_s=WAIT)
    (order,) = harness.take(ReadRecords)
    assert order.records.parts.tolist() == [0, 1, 0, 1]
    harness.send(RecordsRead(order.job, np.array([0, 2, 3], np.uint32), np.zeros(3, np.uint8)))
    assert not harness.arrivals
    harness.send(RecordsRead(order.job, np.array([1], np.uint32), np.zeros(1, np.uint8)))
    assert harness.arrivals[-1].ready_blocks == 2


def test_two_leases_share_one_load() -> None:
    harness = cold()
    first = harness.acquire("abcd", deadline_s=WAIT)
    second = harness.acquire("abcdef", session=B, deadline_s=WAIT)
    orders = [order.records.depths.tolist() for order in harness.orders if isinstance(order, ReadRecords)]
    assert orders == [[0, 1, 2, 3], [4, 5]]
    harness.end_reads()
    assert {each.lease for each in harness.arrivals if each.done} == {first.lease, second.lease}


def test_a_lost_record_ends_the_promise_and_takes_what_follows_along() -> None:
    harness = cold()
    acquired = harness.acquire("abcdefgh", deadline_s=WAIT)
    (order,) = harness.take(ReadRecords)
    ends = np.zeros(8, np.uint8)
    ends[4] = ReadEnd.LOST
    harness.send(RecordsRead(order.job, np.arange(8, dtype=np.uint32), ends))
    assert harness.arrivals[-1].ready_blocks == 4
    assert (harness.arrivals[-1].stop, harness.arrivals[-1].done) == (Miss.CHECKSUM, True)
    released = harness.release(acquired)
    assert (released.hit_tokens, released.missed_tokens) == (4 * TOKENS, 4 * TOKENS)
    assert harness.planner.state.stats.tokens.miss[Miss.CHECKSUM] == 4 * TOKENS
    assert harness.planner.state.stats.disk_drops[DiskDrop.LOST] == 1
    assert harness.hit("abcdefgh") == 4


def test_a_read_that_fails_for_now_keeps_the_block_on_disk() -> None:
    harness = cold()
    harness.acquire("abcd", deadline_s=WAIT)
    harness.end_reads(ReadEnd.FAILED)
    assert harness.arrivals[-1].stop is Miss.COPY_FAILED
    again = harness.acquire("abcd", deadline_s=WAIT)
    assert again.planned_blocks == 4
    harness.end_reads()
    assert harness.arrivals[-1].ready_blocks == 4


def test_only_what_comes_before_the_deadline_is_promised() -> None:
    harness = cold(disk=SLOW)  # a block a second
    acquired = harness.acquire("abcdefgh", deadline_s=3.5)
    assert (acquired.planned_blocks, acquired.stop) == (3, Miss.DEADLINE)
    assert acquired.eta_s == pytest.approx(3.0)
    queued = harness.acquire("abcdefgh", session=B, deadline_s=4.5)
    assert queued.planned_blocks == 4  # three of them are on their way


def test_a_worker_that_will_not_wait_gets_what_is_in_memory() -> None:
    harness = cold(hot=2)
    acquired = harness.acquire("abcdefgh")
    assert (acquired.planned_blocks, acquired.stop) == (2, Miss.DEADLINE)
    assert not harness.orders
    assert harness.planner.state.stats.tokens.miss[Miss.DEADLINE] == 6 * TOKENS


@pytest.mark.parametrize(("block_s", "planned"), [(0.9, 0), (1.1, 8)])
def test_only_what_is_faster_than_computing_is_loaded(block_s: float, planned: int) -> None:
    harness = cold(disk=SLOW)
    acquired = harness.acquire("abcdefgh", deadline_s=WAIT, recompute_s_per_token=block_s / TOKENS)
    assert acquired.planned_blocks == planned
    assert acquired.stop is (None if planned else Miss.SLOWER_THAN_RECOMPUTE)


def test_a_queue_before_it_counts_when_loading_is_weighed_against_computing() -> None:
    harness = cold("abcdefgh", disk=SLOW)
    harness.acquire("abcdef", deadline_s=WAIT)
    late = harness.acquire("abcdefgh", session=B, from_block=6, deadline_s=WAIT, recompute_s_per_token=2.0 / TOKENS)
    assert (late.planned_blocks, late.stop) == (0, Miss.SLOWER_THAN_RECOMPUTE)


def test_what_no_slot_is_free_for_is_not_promised() -> None:
    harness = cold()
    harness.acquire("abcdefgh", deadline_s=WAIT)
    harness.end_reads()
    held = harness.reserve("zyxwvuts")
    assert len(held.blocks) == 8
    harness.store("q")  # not granted: everything is leased or being filled
    assert harness.used == 16


def test_without_reads_what_is_on_disk_is_a_miss_with_its_reason() -> None:
    harness = cold(hot=2)
    harness.send(DiskChanged(reads_on=False, writes_on=False, reason="directory_gone"))
    acquired = harness.acquire("abcdefgh", deadline_s=WAIT)
    assert (acquired.planned_blocks, acquired.stop) == (2, Miss.TIER_OFF)
    looked_up = harness.ask(LookupRequested(1, chain("abcdefgh")), LookedUp)
    assert (looked_up.matched_blocks, looked_up.stop) == (2, Miss.TIER_OFF)
    harness.send(DiskChanged(reads_on=True, writes_on=True))
    assert harness.acquire("abcdefgh", session=B, deadline_s=WAIT).planned_blocks == 8


def test_a_lookup_tells_what_is_where() -> None:
    harness = cold(hot=2)
    looked_up = harness.ask(LookupRequested(1, chain("abcdefgh")), LookedUp)
    assert looked_up.tokens == (0, 2 * TOKENS, 6 * TOKENS, 0)


def test_loads_that_nobody_waits_for_are_called_off() -> None:
    harness = cold()
    acquired = harness.acquire("abcd", deadline_s=WAIT)
    harness.ask(LeaseReleased(A, acquired.lease, 0, Miss.DEADLINE), Released)
    (cancel,) = [each for each in harness.all if isinstance(each, CancelReads)]
    (order,) = harness.take(ReadRecords)
    assert cancel.job == order.job
    assert harness.acquire("abcd", session=B, deadline_s=WAIT).stop is Miss.DEADLINE  # until that has ended
    harness.send(RecordsRead(order.job, np.arange(4, dtype=np.uint32), np.full(4, ReadEnd.FAILED, np.uint8)))
    assert harness.used == 0
    assert harness.acquire("abcd", session=B, deadline_s=WAIT).planned_blocks == 4


def test_a_worker_that_cancels_its_arrivals_keeps_what_came() -> None:
    harness = cold(hot=2)
    acquired = harness.acquire("abcd", deadline_s=WAIT)
    harness.send(ArrivalsCancelled(A, acquired.lease))
    (news,) = [each for each in harness.all if isinstance(each, Arrived)]
    assert (news.ready_blocks, news.stop, news.done) == (2, Miss.DEADLINE, True)
    released = harness.release(acquired)
    assert released.hit_tokens == 2 * TOKENS
    assert harness.planner.state.stats.tokens.miss[Miss.DEADLINE] == 2 * TOKENS


def test_a_clear_while_blocks_are_on_their_way_leaves_nothing() -> None:
    harness = cold()
    acquired = harness.acquire("abcd", deadline_s=WAIT)
    harness.send(ClearRequested())
    harness.end_reads()
    assert harness.arrivals[-1].done
    harness.release(acquired)
    assert harness.used == 0
    assert harness.hit("abcd") == 0


def test_blocks_stored_below_what_is_on_disk_join_it() -> None:
    harness = cold("abcd")
    harness.store("abcdefgh", from_block=4)
    acquired = harness.acquire("abcdefgh", deadline_s=WAIT)
    assert (acquired.planned_blocks, acquired.ready_blocks) == (8, 0)
    assert acquired.tokens == (0, 4 * TOKENS, 4 * TOKENS, 0)
    harness.end_reads()
    assert harness.arrivals[-1].ready_blocks == 8


def test_a_job_nobody_knows_is_refused() -> None:
    nothing = np.zeros(0, np.uint32)
    event = RecordsRead(99, nothing, nothing.astype(np.uint8))
    DiskHarness().refused(event, Kind.NOT_FOUND, Refusal.COPY_UNKNOWN)


def test_room_for_a_load_that_is_made_from_the_rest_of_its_path_is_counted_once() -> None:
    harness = DiskHarness(4, disk=SLOW)
    harness.store("ab")
    harness.flush()
    harness.store("zyxw")
    harness.send(ClearRequested(1, chain("z")))
    harness.store("abcdef", from_block=2)  # below what is on disk, and nowhere else
    harness.take(WriteRecords)
    acquired = harness.acquire("abcdef", deadline_s=1.5)
    assert (acquired.planned_blocks, acquired.stop) == (1, Miss.DEADLINE)
    misses = harness.planner.state.stats.tokens.miss
    assert (misses[Miss.DEADLINE], misses[Miss.NOT_STORED]) == (4 * TOKENS, TOKENS)


def test_when_the_disk_turns_off_nobody_waits_for_a_read_that_hangs() -> None:
    harness = cold(hot=3)
    acquired = harness.acquire("abcdefgh", deadline_s=WAIT)
    harness.send(DiskChanged(False, False, "stalled"))
    (news,) = harness.arrivals
    assert (news.ready_blocks, news.done, news.stop) == (3, True, Miss.TIER_OFF)
    held = harness.used
    harness.release(acquired)
    assert harness.used == held, "the read that hangs may still write to its slots"
    harness.end_reads(ReadEnd.FAILED)
    assert harness.used < held
