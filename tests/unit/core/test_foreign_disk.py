"""Foreign namespaces on disk: every key for itself, in memory, on disk, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prefixcache.core.commands import (
    Acquired,
    CancelReads,
    FreeSegment,
    LookedUp,
    ReadRecords,
    RevokeRecords,
    WriteRecords,
)
from prefixcache.core.events import (
    ArrivalsCancelled,
    ClearRequested,
    Coverage,
    DiskChanged,
    DiskRecovered,
    LookupRequested,
    ReadEnd,
    RecordsRead,
    RecoveryDone,
    TimePassed,
)
from prefixcache.core.ids import KEY_BYTES, NamespaceKind, Tier
from prefixcache.core.pin_messages import Prefetched, PrefetchRequested
from prefixcache.core.reasons import DiskDrop, Miss, Skip
from prefixcache.core.spec import NamespaceSpec, PartSpec
from tests.unit.core.disk_harness import SLOW, DiskHarness
from tests.unit.core.harness import FULL, GRANULE, TOKENS, A, chain

SPEC = NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 1, GRANULE),), NamespaceKind.FOREIGN)
NO_PARENT = bytes(KEY_BYTES)


def keys(letters: str) -> bytes:
    return b"".join(chain(letter) for letter in letters)


def harness(slots: int = 4, **more: Any) -> DiskHarness:
    return DiskHarness(slots, spec=SPEC, **more)


def chilled(letters: str, slots: int = 4, parents: bytes | None = None, **more: Any) -> DiskHarness:
    """A planner that holds these keys on disk only: others took their slots."""
    h = harness(slots, **more)
    h.store("", keys=keys(letters), parents=parents)
    h.flush()
    h.store("", keys=keys("ZYXWVUTS"[:slots]))
    h.send(TimePassed())
    h.take(WriteRecords)
    return h


def acquire(h: DiskHarness, letters: str, **fields: Any) -> Acquired:
    fields = {"deadline_s": 100.0} | fields
    return h.acquire("", keys=keys(letters), prompt_tokens=len(letters) * TOKENS, **fields)


def test_a_key_on_disk_comes_back() -> None:
    h = chilled("ab")
    looked = h.ask(LookupRequested(1, keys("axb")), LookedUp)
    assert looked.present is not None
    assert (looked.present.tolist(), looked.tokens[Tier.DISK]) == ([True, False, True], 2 * TOKENS)
    acquired = acquire(h, "axb")
    assert acquired.present is not None
    assert acquired.present.tolist() == [True, False, True]
    assert (acquired.planned_blocks, acquired.ready_blocks, acquired.runs) == (2, 0, ())
    [order] = [each for each in h.orders if isinstance(each, ReadRecords)]
    assert (order.records.keys, order.records.parents) == (keys("ab"), 2 * NO_PARENT)
    h.end_reads()
    [arrived] = h.arrivals
    assert (arrived.ready_blocks, arrived.done, arrived.stop) == (2, True, None)
    assert [run.first_block for run in arrived.runs] == [0, 2]
    assert h.release(acquired).hit_tokens == 2 * TOKENS
    assert h.hits(Tier.DISK) == 2 * TOKENS


def test_what_is_in_memory_is_told_at_once_whatever_stands_before_it() -> None:
    h = chilled("a")
    acquired = acquire(h, "aZ")
    assert (acquired.planned_blocks, acquired.ready_blocks) == (2, 1)
    assert [run.first_block for run in acquired.runs] == [1]
    h.end_reads()
    assert [(each.ready_blocks, each.runs[0].first_block) for each in h.arrivals] == [(2, 0)]
    assert h.release(acquired, used=1).hit_tokens == TOKENS
    assert (h.hits(Tier.HOST), h.hits(Tier.DISK)) == (TOKENS, 0)  # the first that could be read


def test_a_lost_record_takes_its_own_key_and_what_hangs_from_it() -> None:
    h = chilled("abc", parents=NO_PARENT + keys("a") + NO_PARENT)
    acquired = acquire(h, "abc")
    [order] = h.take(ReadRecords)
    index = np.arange(3, dtype=np.uint32)
    h.send(RecordsRead(order.job, index, np.array([ReadEnd.LOST, ReadEnd.OK, ReadEnd.OK], np.uint8)))
    last = h.arrivals[-1]
    assert (last.ready_blocks, last.done, last.stop) == (1, True, Miss.CHECKSUM)
    assert [run.first_block for run in last.runs] == [2]
    h.release(acquired)
    assert h.hit_of(keys("abc")) == [False, False, True]


def test_a_chain_is_written_front_first_and_leaves_tail_first() -> None:
    h = harness(4)
    h.store("", keys=keys("abc"), parents=NO_PARENT + keys("ab"))
    assert h.flush() == 3
    assert h.planner.state.stats.blocks_demoted == 3
    h.store("", keys=keys("x"))
    h.store("", keys=keys("y"))  # takes the slot of c, which is on disk
    assert acquire(h, "abc", deadline_s=0.0).planned_blocks == 2
    assert h.planner.state.stats.disk_drops[DiskDrop.UNWRITTEN] == 0


def test_only_the_first_keys_that_come_in_time_are_promised() -> None:
    h = chilled("abc", disk=SLOW)
    acquired = acquire(h, "abc", deadline_s=2.5)
    assert acquired.present is not None
    assert (acquired.present.tolist(), acquired.stop) == ([True, True, False], Miss.DEADLINE)
    assert acquired.eta_s == 2.0


@pytest.mark.parametrize(("computes_s", "promised"), [(2.0 / TOKENS, 3), (0.5 / TOKENS, 0)])
def test_a_slow_disk_is_not_waited_for(computes_s: float, promised: int) -> None:
    h = chilled("abc", disk=SLOW)
    acquired = acquire(h, "abc", recompute_s_per_token=computes_s)
    assert acquired.planned_blocks == promised
    assert acquired.stop == (None if promised else Miss.SLOWER_THAN_RECOMPUTE)


def test_a_disk_that_was_too_slow_is_tried_again_with_one_block() -> None:
    h = chilled("abc", disk=SLOW)
    h.pass_time(20.0)
    assert not acquire(h, "abc", recompute_s_per_token=0.5 / TOKENS).planned_blocks
    [order] = h.take(ReadRecords)
    assert order.records.keys == keys("a")


def test_too_few_slots() -> None:
    h = chilled("abc")
    held = acquire(h, "XYZ")  # and W is the only one that may go
    acquired = acquire(h, "abc")
    assert (acquired.planned_blocks, acquired.stop) == (1, Miss.POOL_FULL)
    h.end_reads()
    h.release(acquired)
    h.release(held)


def test_two_leases_share_a_load_and_the_last_one_calls_it_off() -> None:
    h = chilled("ab")
    first, second = acquire(h, "ab"), acquire(h, "ba")
    assert len([each for each in h.orders if isinstance(each, ReadRecords)]) == 1
    h.release(first)
    assert not any(isinstance(each, CancelReads) for each in h.all)
    h.send(ArrivalsCancelled(A, second.lease))
    assert any(isinstance(each, CancelReads) for each in h.all)
    assert acquire(h, "ab").stop is Miss.DEADLINE  # until it has ended


def test_the_tier_off() -> None:
    h = chilled("ab")
    waiting = acquire(h, "ab")
    h.send(DiskChanged(reads_on=False, writes_on=False, reason="io_error"))
    assert h.arrivals[-1].stop is Miss.TIER_OFF
    h.end_reads(ReadEnd.FAILED)
    h.release(waiting)
    acquired = acquire(h, "aZ")
    assert (acquired.planned_blocks, acquired.stop) == (1, Miss.TIER_OFF)
    assert h.hit_of(keys("aZ")) == [False, True]


def test_prefetch_brings_keys() -> None:
    h = chilled("ab", slots=8, disk=None)
    told = h.ask(PrefetchRequested(1, keys("aZb")), Prefetched)
    assert told.coming_blocks == 2
    h.end_reads()
    assert acquire(h, "ab").ready_blocks == 2


def test_what_is_on_disk_is_taken_again() -> None:
    h = chilled("ac", slots=6)
    reserved = h.reserve("", keys=keys("abcW"))
    assert reserved.blocks.tolist() == [0, 1, 2]
    assert reserved.skipped == {Skip.ALREADY_STORED: 1}
    h.commit(reserved, Coverage(1, 1, 0), more=True)
    assert h.hit_of(keys("b")) == [True]
    assert acquire(h, "ac", deadline_s=0.0).planned_blocks == 0
    h.commit(reserved, Coverage(0, 1, 0), Coverage(2, 1, 0))
    assert acquire(h, "abc", deadline_s=0.0).ready_blocks == 3


def test_what_is_loaded_for_somebody_is_not_granted() -> None:
    h = chilled("ac", slots=6)
    acquire(h, "a")
    reserved = h.reserve("", keys=keys("acc"))
    assert reserved.blocks.tolist() == [1]
    assert reserved.skipped == {Skip.BEING_WRITTEN: 2}


def test_a_cleared_block_that_is_stored_again_takes_no_other_with_it() -> None:
    h = chilled("ac", slots=6)
    reserved = h.reserve("", keys=keys("ac"))
    h.send(ClearRequested(1, keys("a")))
    committed = h.commit(reserved)
    assert (committed.stored, committed.dropped) == (1, {Skip.ORPHANED: 1})
    assert h.hit_of(keys("ac")) == [False, True]


def test_a_clear_leaves_tombstones() -> None:
    h = chilled("ab", parents=NO_PARENT + keys("a"))
    h.send(ClearRequested(1, keys("a")))
    assert [each.keys for each in h.all if isinstance(each, RevokeRecords)] == [keys("ab")]


def test_a_freed_segment_keeps_what_was_hit_and_what_has_children() -> None:
    h = harness(8, per_segment=4)
    h.store("", keys=keys("pabc"), parents=NO_PARENT * 2 + keys("p") + NO_PARENT)
    h.flush()
    h.store("", keys=keys("d"), parents=keys("p"))
    h.flush()
    h.store("", keys=keys("STUVWXYZ"))
    h.release(acquire(h, "S"))
    h.room_bytes = 0
    h.planner.state.disk.room_bytes = 0
    h.send(TimePassed())
    [order] = h.take(FreeSegment)
    assert order.segment == 1
    kept = b"".join(records.keys for records in order.keep)
    assert kept == keys("p")  # d hangs from it, in another segment
    h.free(order)
    assert h.hit_of(keys("pabcd")) == [True, False, False, False, True]


def restarted() -> DiskHarness:
    h = harness(8)
    h.planner.state.disk.recovered = False
    return h


def tell(h: DiskHarness, letters: str, parents: bytes, segment: int = 7) -> None:
    count = len(letters)
    nothing = np.zeros(count, np.uint16)
    pages = (2 * np.arange(count)).astype(np.uint32)
    segments = np.full(count, segment, np.uint32)
    h.send(DiskRecovered(1, nothing, segments, pages, keys(letters), parents, pages))


def test_a_restart_finds_keys_whatever_their_order() -> None:
    h = restarted()
    tell(h, "cbaz", keys("ba") + NO_PARENT + keys("y"))
    assert h.hit_of(keys("abcz")) == [True, True, True, False]
    h.send(RecoveryDone())
    assert h.planner.state.stats.disk_drops[DiskDrop.ORPHANED] == 1
    acquired = acquire(h, "c")
    h.end_reads()
    assert h.release(acquired).hit_tokens == TOKENS


def test_what_is_stored_anew_before_it_is_told_stays_where_it_is() -> None:
    h = restarted()
    h.store("", keys=keys("b"))  # without the parent that the record names
    tell(h, "abc", NO_PARENT + keys("ab"))
    assert h.hit_of(keys("abc")) == [True, True, True]
    assert h.planner.state.stats.blocks_recovered == 3
    h.send(ClearRequested(1, keys("a")))
    assert h.hit_of(keys("abc")) == [False, True, True]


def test_what_is_cleared_before_it_is_told_does_not_come_back() -> None:
    h = restarted()
    h.send(ClearRequested(1, keys("b")))
    assert [each.keys for each in h.all if isinstance(each, RevokeRecords)] == [keys("b")]
    tell(h, "abc", NO_PARENT * 3)
    assert h.hit_of(keys("abc")) == [True, False, True]
