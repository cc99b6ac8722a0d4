"""What can be done later: that it is, in steps, and that anything may happen between two of them."""

from __future__ import annotations

import pytest

from prefixcache.core import freeing
from prefixcache.core.commands import FreeSegment, MoreToDo, Reserved, WriteRecords
from prefixcache.core.events import DiskChanged, FlushStarted, SegmentLost, WriteEnd
from prefixcache.core.reasons import DiskDrop
from prefixcache.core.spec import DiskSpec
from tests.unit.core.disk_harness import DiskHarness
from tests.unit.core.harness import GRANULE, chain

WAIT = 100.0
UNWANTED = "qrstuvwx"


def test_a_reserve_is_answered_first_and_writing_begins_when_nobody_waits() -> None:
    harness = DiskHarness(disk=DiskSpec(reserve_share=0.25))
    harness.store("abcdefghijkl")
    harness.is_busy = True
    harness.now += 10
    harness.reserve("zy")
    assert [type(each) for each in harness.all[1:]] == [Reserved, MoreToDo]
    assert not harness.orders
    harness.reserve("xw")
    assert not any(isinstance(each, MoreToDo) for each in harness.all), "asked for once is enough"
    assert harness.resume()
    assert len(harness.take(WriteRecords)) == 1
    assert not harness.resume()
    assert not harness.orders


def test_a_write_that_failed_is_no_reason_for_another() -> None:
    harness = DiskHarness(slots=32, disk=DiskSpec(reserve_share=0.25, writing_bytes=2 * GRANULE))
    for word in ("abcdefgh", "ijklmnop", "qrstuvwx", "yzABCDEF"):
        harness.store(word)
    harness.is_busy = True
    assert harness.end_writes(WriteEnd.FAILED) == 2
    assert not harness.resume()
    assert not harness.orders


def test_a_flush_begins_a_write_a_step() -> None:
    harness = DiskHarness(slots=32, disk=DiskSpec(reserve_share=0.0, job_bytes=2 * GRANULE))
    for word in ("abcdefgh", "ijklmnop"):
        harness.store(word)
    demoter = harness.planner.demoter
    assert demoter is not None
    harness.is_busy = True
    assert [type(each) for each in harness.send(FlushStarted())] == [MoreToDo]
    for count in range(1, 5):  # a quarter of memory at once
        assert demoter.is_flushing
        assert harness.resume()
        assert len([each for each in harness.orders if isinstance(each, WriteRecords)]) == count
    harness.resume()
    assert not demoter.flush_due
    assert demoter.is_flushing
    assert harness.end_writes() == 8
    assert demoter.flush_due, "what ended makes room for more"
    harness.is_busy = False
    harness.resume()
    assert harness.end_writes() == 8
    assert not demoter.is_flushing


def test_a_flush_writes_nothing_more_once_the_disk_is_off() -> None:
    harness = DiskHarness(slots=32, disk=DiskSpec(reserve_share=0.0, job_bytes=2 * GRANULE))
    harness.store("abcdefgh")
    demoter = harness.planner.demoter
    assert demoter is not None
    harness.is_busy = True
    harness.send(FlushStarted())
    harness.resume()
    harness.send(DiskChanged(reads_on=True, writes_on=False, reason="unusable"))
    harness.resume()
    assert harness.end_writes() == 2, "what was under way"
    harness.resume()
    assert not harness.orders
    assert not demoter.is_flushing


def test_a_flush_does_not_try_for_ever_what_cannot_be_written() -> None:
    harness = DiskHarness(slots=32, disk=DiskSpec(reserve_share=0.0, job_bytes=2 * GRANULE))
    harness.store("abcdefgh")
    harness.is_busy = True
    harness.send(FlushStarted())
    demoter = harness.planner.demoter
    assert demoter is not None
    tried = 0
    while demoter.flush_due:  # each write ends before the next one is begun
        harness.resume()
        tried += harness.end_writes(WriteEnd.NO_ROOM)
    assert tried == 8, "a quarter of memory"
    assert not demoter.is_flushing


def test_a_flush_writes_all_of_memory_once_however_much_its_writes_lose() -> None:
    slots = 32
    harness = DiskHarness(slots, disk=DiskSpec(reserve_share=0.0, job_bytes=2 * GRANULE), per_segment=2)
    for word in ("abcdefgh", "ijklmnop"):
        harness.store(word)
    harness.is_busy = True
    harness.send(FlushStarted())
    written = 0
    for _ in range(4 * slots):  # a write, and what was written before is lost
        harness.resume()
        written += harness.end_writes()
        for number in list(harness.planner.state.disk.segments):
            harness.send(SegmentLost(number))
    assert written == slots
    demoter = harness.planner.demoter
    assert demoter is not None
    assert not demoter.is_flushing


def emptied(prompts: list[str], monkeypatch: pytest.MonkeyPatch) -> DiskHarness:
    """Prompts on disk that were hit, in segment 1 with one that was not, which is about to be freed, a node a step."""
    monkeypatch.setattr(freeing, "_NODES_EMPTIED", 1)
    blocks = sum(len(prompt) for prompt in (*prompts, UNWANTED))
    harness = DiskHarness(disk=DiskSpec(segment_bytes=blocks * GRANULE, reserve_share=0.0), per_segment=blocks)
    for prompt in (*prompts, UNWANTED):
        harness.store(prompt)
    harness.flush()
    harness.store("0123456789ABCDEF")
    harness.clear("0")
    for prompt in prompts:
        harness.hit_from_disk(prompt)  # so that it is worth being kept
    harness.store("0123456789ABCDEF")
    harness.clear("0")
    harness.room_bytes = 0
    harness.store("Z")
    harness.is_busy = True
    harness.flush()
    while harness.planner.freer is not None and not harness.planner.freer.frozen:
        assert harness.resume()
    return harness


def the_order(harness: DiskHarness) -> FreeSegment:
    """It comes at the end, when all its nodes had their turn."""
    while not any(isinstance(order, FreeSegment) for order in harness.orders):
        assert harness.resume()
    (order,) = harness.take(FreeSegment)
    assert isinstance(order, FreeSegment)
    return order


def test_a_segment_is_given_back_when_all_its_nodes_had_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = emptied(["ab", "cd", "ef"], monkeypatch)
    assert not harness.take(FreeSegment)
    assert harness.planner.freer is not None
    assert harness.planner.freer.frozen == {1}
    order = the_order(harness)
    assert {key for records in order.keep for key in _keys(records.keys)} == {
        key for prompt in ("ab", "cd", "ef") for key in _keys(chain(prompt))
    }
    harness.free(order)
    for prompt in ("ab", "cd", "ef"):
        assert harness.acquire(prompt, deadline_s=WAIT).planned_blocks == 2


def test_what_is_cleared_between_two_steps_is_not_appended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = emptied(["ab", "cd", "ef"], monkeypatch)
    harness.resume()
    harness.resume()
    for prompt in ("ab", "cd"):
        harness.clear(prompt[0])
    order = the_order(harness)
    assert {key for records in order.keep for key in _keys(records.keys)} == set(_keys(chain("ef")))
    harness.free(order)
    assert harness.hit("ab") == harness.hit("cd") == 0


def test_what_is_cut_in_two_between_two_steps_is_kept_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = emptied(["abcd", "ef"], monkeypatch)
    acquired = harness.acquire("ab", deadline_s=WAIT)  # comes to memory: a node of its own
    harness.end_reads()
    order = the_order(harness)
    assert {key for records in order.keep for key in _keys(records.keys)} >= set(_keys(chain("abcd")[64:]))
    harness.free(order)
    harness.release(acquired)
    assert harness.acquire("abcd", deadline_s=WAIT).planned_blocks == 4
    assert harness.planner.state.stats.disk_drops[DiskDrop.LOST] == 0


def _keys(packed: bytes) -> list[bytes]:
    return [packed[at : at + 32] for at in range(0, len(packed), 32)]
