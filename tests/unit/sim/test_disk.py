"""The ideal disk beside a plain model of a segment log, and its speed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.core.commands import CancelReads, FreeSegment, ReadRecords, Records, WriteRecords
from prefixcache.core.events import ReadEnd, RecordsRead, RecordsWritten, SegmentFreed, WriteEnd
from prefixcache.core.ids import KEY_BYTES
from prefixcache.sim.disk import DiskModel, IdealDisk

MIB = 1 << 20


def records(count: int) -> Records:
    nothing = np.zeros(count, np.uint32)
    keys = bytes(KEY_BYTES * count)
    return Records(1, nothing.astype(np.uint16), nothing, nothing, nothing, nothing, keys, keys, nothing)


def end(disk: IdealDisk) -> tuple[float, object]:
    at = disk.next_end
    return at, disk.end_next()


def test_each_direction_does_one_job_after_the_other_at_its_full_speed() -> None:
    disk = IdealDisk(DiskModel(1000, MIB, 10 * MIB))
    disk.order(WriteRecords(1, 0, records(20)), 5.0)
    disk.order(ReadRecords(2, 0, records(10)), 5.0)
    disk.order(ReadRecords(3, 0, records(5)), 5.25)
    ends = [end(disk) for _ in range(3)]
    assert [(at, event.job) for at, event in ends if isinstance(event, RecordsRead)] == [(6.0, 2), (6.5, 3)]
    assert [(at, event.job) for at, event in ends if isinstance(event, RecordsWritten)] == [(7.0, 1)]
    assert disk.next_end == np.inf
    assert (disk.blocks_read, disk.blocks_written) == (15, 20)


def test_a_read_that_nobody_waits_for_ends_at_once_unless_it_has_begun() -> None:
    disk = IdealDisk(DiskModel(1000, MIB, 10 * MIB))
    for job in (1, 2, 3):
        disk.order(ReadRecords(job, 0, records(10)), 0.0)
    disk.order(CancelReads(1), 0.5)
    disk.order(CancelReads(2), 0.5)
    disk.order(CancelReads(99), 0.5)
    told = []
    while disk.next_end < np.inf:
        at, event = end(disk)
        assert isinstance(event, RecordsRead)
        told.append((at, event.job, int(event.ends[0])))
    assert told == [(0.5, 2, ReadEnd.FAILED), (1.0, 1, ReadEnd.OK), (2.0, 3, ReadEnd.OK)]


@pytest.mark.parametrize(
    ("blocks", "block_bytes", "per_segment"),
    [(1, MIB, 1), (15, MIB, 1), (32, MIB, 2), (100_000, MIB, 256), (100_000, 16 * MIB, 16), (100, 1 << 30, 1)],
)
def test_segments_are_cut_as_the_daemon_cuts_them(blocks: int, block_bytes: int, per_segment: int) -> None:
    model = DiskModel(blocks, block_bytes, 1e9)
    assert model.blocks_per_segment == per_segment
    assert model.spec().segment_bytes == per_segment * block_bytes
    assert model.spec().read_bytes_per_s == 1e9


steps = st.lists(st.one_of(st.integers(1, 9), st.tuples(st.integers(0, 40), st.integers(0, 3))), max_size=40)


@settings(max_examples=200, deadline=None)
@given(blocks=st.integers(1, 80), steps=steps)
def test_the_cap_is_hard_and_places_are_given_once(blocks: int, steps: list[int | tuple[int, int]]) -> None:
    """steps: a count of records to write, or (which segment to free, how many of it to keep)."""
    disk = IdealDisk(DiskModel(blocks, MIB, 1e9))
    per_segment = disk.model.blocks_per_segment
    most = max(1, blocks // per_segment)
    held: dict[int, int] = {}
    places: set[tuple[int, int]] = set()

    def note(ends: np.ndarray, segments: np.ndarray, pages: np.ndarray) -> None:
        for written, segment, page in zip(ends.tolist(), segments.tolist(), pages.tolist(), strict=True):
            if written == WriteEnd.OK:
                assert (segment, page) not in places
                assert segment > 0
                places.add((segment, page))
                held[segment] = held.get(segment, 0) + 1

    for step in steps:
        if isinstance(step, int):
            full = sum(held.values()) == per_segment * len(held)
            disk.order(WriteRecords(1, 0, records(step)), 0.0)
            event = disk.end_next()
            assert isinstance(event, RecordsWritten)
            if len(held) < most - (most >= 4) or not full:
                assert event.ends[0] == WriteEnd.OK
            note(event.ends, event.segments, event.pages)
        elif len(held) > 1:
            number = sorted(held)[step[0] % (len(held) - 1)]
            disk.order(FreeSegment(number, (records(min(step[1], held[number])),)), 0.0)
            event = disk.end_next()
            assert isinstance(event, SegmentFreed)
            note(*event.kept[0])
            assert event.freed or most < 4
            if event.freed:
                del held[number]
        assert disk.blocks_held == sum(held.values()) <= blocks
        assert all(count <= per_segment for count in held.values())
    assert disk.blocks_written == len(places)
