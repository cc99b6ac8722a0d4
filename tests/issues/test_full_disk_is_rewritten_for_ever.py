"""A disk that is full of a pinned prompt is full of blocks that stay. Giving a segment back appended all of it again,
which took the room that it gave: the disk was written for ever, without a request. The simulator found it (seed
964)."""

from __future__ import annotations

import numpy as np

from prefixcache.core.commands import FreeSegment
from prefixcache.core.events import SegmentFreed
from prefixcache.core.pin_messages import Pinned, PinRequested, UnpinRequested
from prefixcache.core.spec import DiskSpec
from tests.unit.core.disk_harness import DiskHarness
from tests.unit.core.harness import GRANULE, chain

PER_SEGMENT = 5
PROMPT = "abcdefghijklmnopqrst"
SEGMENTS = len(PROMPT) // PER_SEGMENT


def pinned() -> tuple[DiskHarness, bytes]:
    """A prompt that fills the disk and is not in memory, and its pin."""
    harness = DiskHarness(
        slots=32,
        disk=DiskSpec(segment_bytes=PER_SEGMENT * GRANULE, reserve_share=0.0),
        per_segment=PER_SEGMENT,
        pin_bytes=32 * GRANULE,
    )
    harness.store(PROMPT)
    harness.flush()
    harness.store("0123456789ABCDEFGHIJKLMNOPQRSTUV")
    harness.clear("0")
    harness.room_bytes = 0
    return harness, harness.ask(PinRequested(harness.new_id(), 1, chain(PROMPT)), Pinned).pin


def append_again(harness: DiskHarness, order: FreeSegment) -> int:
    """Ends an order; how many records were written for it. The next free places are in segments of their own."""
    kept, count = [], 0
    for records in order.keep:
        places = harness.written + np.arange(len(records.rows))
        segments, pages = places // PER_SEGMENT + 1, places % PER_SEGMENT * 2
        kept.append((np.zeros(len(places), np.uint8), segments.astype(np.uint32), pages.astype(np.uint32)))
        harness.written += len(places)
        count += len(places)
    harness.send(SegmentFreed(order.segment, True, tuple(kept), 0))
    return count


def written_again(harness: DiskHarness) -> int:
    """Records appended again until nothing more is ordered, at most a hundred times."""
    count = 0
    for _ in range(100):
        harness.pass_time(0.1)
        orders = harness.take(FreeSegment)
        if not orders:
            break
        count += sum(append_again(harness, order) for order in orders)
    return count


def test_it_is_written_again_once_at_most() -> None:
    harness, _ = pinned()
    harness.store("Z")
    harness.flush()
    assert written_again(harness) <= len(PROMPT)


def test_once_something_of_it_may_leave_there_is_room_again() -> None:
    harness, pin = pinned()
    harness.store("Z")
    harness.flush()
    written_again(harness)
    harness.send(UnpinRequested(pin))
    for letter in "YXWV":  # each end of a write is a reason to look at a segment once more
        harness.store(letter)
        harness.flush()
    harness.pass_time(0.1)
    (order,) = harness.take(FreeSegment)
    assert append_again(harness, order) < PER_SEGMENT
