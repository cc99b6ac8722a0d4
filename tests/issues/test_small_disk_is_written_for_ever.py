"""A disk that holds less than the reserve of memory was written for ever although nobody asked for anything: a write
made room by forgetting records of blocks in memory, which the reserve then lacked, so they were written again."""

from __future__ import annotations

from prefixcache.core.events import SegmentLost
from prefixcache.core.spec import DiskSpec
from tests.unit.core.disk_harness import DiskHarness

SLOTS = 16
RESERVE = 4
ROUNDS = 20


def lose_everything(harness: DiskHarness) -> None:
    for number in list(harness.planner.state.disk.segments):
        harness.send(SegmentLost(number))


def written_while_idle(harness: DiskHarness) -> int:
    """Records, while segments go as fast as they are written."""
    written = 0
    for _ in range(ROUNDS):
        lose_everything(harness)
        harness.pass_time(1.0)
        written += harness.end_writes()
    return written


def test_what_is_written_ahead_of_need_ends_when_nothing_is_asked_for() -> None:
    harness = DiskHarness(SLOTS, disk=DiskSpec(reserve_share=RESERVE / SLOTS), per_segment=2)
    harness.store("abcdefghijklmnop")  # memory is full: the reserve has to be clean
    harness.pass_time(1.0)
    assert harness.end_writes() >= RESERVE
    assert written_while_idle(harness) <= 2 * RESERVE
    assert written_while_idle(harness) == 0
    harness.store("xy")  # takes memory
    harness.pass_time(1.0)
    assert harness.end_writes() > 0
