"""Sliding and state groups on disk: what is written, what is read of it for a prefix, what a restart brings back."""

from __future__ import annotations

import numpy as np
import pytest

from prefixcache.core.commands import LookedUp, ReadRecords, WriteRecords
from prefixcache.core.events import DiskChanged, DiskRecovered, LookupRequested, ReadEnd, RecordsRead, RecoveryDone
from prefixcache.core.ids import KEY_BYTES, GroupKind, Tier
from prefixcache.core.reasons import DiskDrop, Miss, Skip
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec
from tests.unit.core.disk_harness import SLOW, DiskHarness
from tests.unit.core.harness import GRANULE, TOKENS, chain

WAIT = 100.0
FULL, WINDOW = GroupSpec(GroupKind.FULL), GroupSpec(GroupKind.SLIDING, 2 * TOKENS)  # two blocks
HYBRID = NamespaceSpec(TOKENS, (FULL, WINDOW), (PartSpec(0, 4, GRANULE), PartSpec(1, 4, GRANULE)))
WINDOWS = NamespaceSpec(TOKENS, (WINDOW,), (PartSpec(0, 4, GRANULE),))
STATE = NamespaceSpec(TOKENS, (FULL, GroupSpec(GroupKind.STATE)), (PartSpec(0, 4, GRANULE), PartSpec(1, 4, GRANULE)))


def cold(spec: NamespaceSpec = HYBRID, letters: str = "abcdef") -> DiskHarness:
    """A prompt that is on disk only."""
    harness = DiskHarness(slots=32, spec=spec)
    harness.store(letters)
    harness.flush()
    fill = "zyxwvutsrqponmlkjihgfedcba9876543210"[: 32 // len(spec.parts)]
    harness.store(fill)
    harness.clear(fill[0])
    assert harness.planner.state.namespaces[1].cold_blocks == len(letters)
    return harness


def read_parts(harness: DiskHarness) -> list[tuple[int, int]]:
    """(depth, part) of everything that is being read."""
    return [
        (depth, part)
        for order in harness.orders
        if isinstance(order, ReadRecords)
        for depth, part in zip(order.records.depths.tolist(), order.records.parts.tolist(), strict=True)
    ]


def test_of_a_window_only_the_last_blocks_are_read() -> None:
    harness = cold()
    acquired = harness.acquire("abcdef", deadline_s=WAIT)
    assert (acquired.planned_blocks, acquired.ready_blocks, acquired.stop) == (6, 0, None)
    assert sorted(read_parts(harness)) == sorted([(depth, 0) for depth in range(6)] + [(4, 1), (5, 1)])
    harness.end_reads()
    (news,) = harness.arrivals
    assert [(run.part, run.first_block, len(run.slots)) for run in news.runs] == [(0, 0, 6), (1, 4, 2)]
    assert harness.release(acquired).hit_tokens == 6 * TOKENS
    assert harness.hits(Tier.DISK) == 6 * TOKENS


def test_full_blocks_are_told_while_the_window_still_comes() -> None:
    harness = cold()
    harness.acquire("abcdef", deadline_s=WAIT)
    harness.end_reads(records=slice(0, 3))
    (news,) = harness.arrivals
    assert (news.ready_blocks, news.done) == (3, False)
    assert [(run.part, run.first_block, len(run.slots)) for run in news.runs] == [(0, 0, 3)]


def test_a_shorter_prefix_needs_another_window() -> None:
    harness = cold()
    harness.hit_from_disk("abcdef")
    shorter = harness.acquire("abcd", deadline_s=WAIT)
    assert (shorter.planned_blocks, shorter.ready_blocks) == (4, 2)
    assert shorter.tokens == (0, 2 * TOKENS, 2 * TOKENS, 0)
    assert [(run.part, len(run.slots)) for run in shorter.runs] == [(0, 2)]
    assert read_parts(harness) == [(2, 1), (3, 1)], "the full part is in memory already"
    harness.end_reads()
    assert harness.release(shorter).hit_tokens == 4 * TOKENS


def test_a_worker_that_will_not_wait_gets_a_prefix_that_can_be_restored() -> None:
    harness = cold()
    harness.hit_from_disk("abcdef")
    acquired = harness.acquire("abcdxx", deadline_s=0.0)
    assert (acquired.planned_blocks, acquired.stop) == (0, Miss.DEADLINE)
    assert harness.acquire("abcdef", deadline_s=0.0).planned_blocks == 6


def test_blocks_that_another_lease_loads_are_waited_for_before_the_window_is_placed() -> None:
    harness = cold()
    longer = harness.acquire("abcdef", deadline_s=WAIT)
    first = harness.take(ReadRecords)
    shorter = harness.acquire("abcd", deadline_s=WAIT)
    assert read_parts(harness) == [(2, 1), (3, 1)]
    harness.end_reads()  # the window of the shorter one, whose blocks are not there yet
    assert not harness.arrivals
    harness.orders += first
    harness.end_reads()
    assert {each.lease for each in harness.arrivals if each.done} == {longer.lease, shorter.lease}
    assert harness.release(shorter).hit_tokens == 4 * TOKENS
    assert harness.release(longer).hit_tokens == 6 * TOKENS


def test_a_window_whose_blocks_did_not_come_is_given_back() -> None:
    harness = cold()
    harness.acquire("abcdef", deadline_s=WAIT)
    first = harness.take(ReadRecords)
    harness.acquire("abcd", deadline_s=WAIT)
    harness.end_reads()
    harness.orders += first
    harness.end_reads(ReadEnd.FAILED)
    assert {each.stop for each in harness.arrivals if each.done} == {Miss.COPY_FAILED}
    assert harness.used == 0


def test_a_lost_window_record_costs_only_itself() -> None:
    harness = cold()
    acquired = harness.acquire("abcdef", deadline_s=WAIT)
    orders = harness.take(ReadRecords)
    for order in orders:
        index = np.arange(len(order.records.rows), dtype=np.uint32)
        ends = np.where(order.records.parts == 1, ReadEnd.LOST, ReadEnd.OK).astype(np.uint8)
        harness.send(RecordsRead(order.job, index, ends))
    assert harness.arrivals[-1].stop is Miss.CHECKSUM
    assert harness.release(acquired).hit_tokens <= 4 * TOKENS
    assert harness.planner.state.stats.disk_drops[DiskDrop.LOST] == 2
    assert harness.acquire("abcd", deadline_s=WAIT).planned_blocks == 4


def test_a_missing_window_is_stored_again_with_its_blocks_and_brings_them_back() -> None:
    harness = DiskHarness(slots=32, spec=HYBRID)
    harness.store("abcdef", part_mask=0b01)
    harness.flush()
    fill = "zyxwvutsrqponmlk"
    harness.store(fill)
    harness.clear(fill[0])
    alone = harness.reserve("abcdef", part_mask=0b10)
    assert alone.skipped == {Skip.PARTS_MISSING: 6}
    both = harness.reserve("abcdef")
    assert sorted(grant.part for grant in both.grants) == [0, 1]
    harness.commit(both)
    acquired = harness.acquire("abcdef")
    assert acquired.ready_blocks == 6
    assert harness.planner.state.namespaces[1].cold_blocks == 0


def test_blocks_that_were_loaded_while_a_worker_stored_them_again_keep_the_loaded_bytes() -> None:
    harness = DiskHarness(slots=32, spec=HYBRID)
    harness.store("abcdefgh", part_mask=0b01)
    harness.store("abcdefgh", from_block=6)  # the last window
    harness.flush()
    harness.store("zyxwvutsrqponmlk")
    harness.clear("z")
    again = harness.reserve("abcdef", from_block=4)
    assert again.blocks.tolist() == [4, 5]
    assert harness.used == 4
    harness.hit_from_disk("abcdefgh")
    harness.commit(again)
    assert harness.used == 8 + 2 + 2, "all blocks, two windows, and none twice"
    assert harness.acquire("abcdef").ready_blocks == 6


@pytest.mark.parametrize("spec", [HYBRID, STATE, WINDOWS], ids=["hybrid", "state", "windows"])
def test_a_restart_brings_windows_back(spec: NamespaceSpec) -> None:
    harness = DiskHarness(slots=32, spec=spec)
    harness.planner.state.disk.recovered = False
    letters, parts = "abcd", len(spec.parts)
    keys = chain(letters)
    count = len(letters) * parts
    at = np.repeat(np.arange(len(letters)), parts)
    packed = np.frombuffer(bytes(KEY_BYTES) + keys, np.uint8).reshape(-1, KEY_BYTES)
    part = np.tile(np.arange(parts, dtype=np.uint16), len(letters))
    for mine in (np.flatnonzero(part == 0), np.flatnonzero(part != 0)):  # further parts are told later
        pages = np.arange(count, dtype=np.uint32)[mine]
        names = packed[at[mine] + 1].tobytes(), packed[at[mine]].tobytes()
        segments = np.full(len(mine), 7, np.uint32)
        harness.send(DiskRecovered(1, part[mine], segments, pages, *names, at[mine].astype(np.uint32)))
    harness.send(RecoveryDone())
    on_disk = 2 if spec is WINDOWS else 4  # of its window alone; nothing else is needed
    found = harness.ask(LookupRequested(1, keys), LookedUp)
    assert found.tokens == (0, (4 - on_disk) * TOKENS, on_disk * TOKENS, 0)
    acquired = harness.acquire(letters, deadline_s=WAIT)
    assert acquired.planned_blocks == len(letters)
    harness.end_reads()
    assert harness.release(acquired).hit_tokens == len(letters) * TOKENS


def test_with_the_disk_off_only_what_memory_can_restore_is_found() -> None:
    harness = cold()
    harness.hit_from_disk("abcdef")
    harness.send(DiskChanged(False, False, "io_error"))
    found = harness.ask(LookupRequested(1, chain("abcdxx")), LookedUp)
    assert (found.matched_blocks, found.stop) == (0, Miss.TIER_OFF)
    assert harness.acquire("abcdxx", deadline_s=WAIT).stop is Miss.TIER_OFF
    assert harness.acquire("abcdef").planned_blocks == 6


def test_a_window_that_was_not_written_yet_does_not_cost_the_blocks_on_disk() -> None:
    harness = DiskHarness(slots=32, spec=HYBRID)
    harness.store("abcd", part_mask=0b01)
    harness.flush()
    harness.store("abcd")  # adds the window
    assert [order for order in harness.orders if isinstance(order, WriteRecords)] == []
    fill = "zyxwvutsrqponmlk"
    harness.store(fill)
    space = harness.planner.state.namespaces[1]
    assert space.cold_blocks == 4
    assert harness.planner.state.stats.disk_drops[DiskDrop.WITH_PARENT] == 0
    harness.clear(fill[0])
    assert harness.acquire("abcd", deadline_s=WAIT).stop is Miss.GROUP_GAP


def test_a_path_that_nobody_can_wait_for_is_not_read() -> None:
    harness = DiskHarness(slots=32, spec=HYBRID, disk=SLOW)
    harness.store("abcdef")
    harness.flush()
    harness.store("zyxwvutsrqponmlk")
    harness.clear("z")
    acquired = harness.acquire("abcdef", deadline_s=2.5)
    assert (acquired.planned_blocks, acquired.stop) == (1, Miss.DEADLINE), "one block and its window"
