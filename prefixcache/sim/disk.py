"""An ideal disk for replays: the planner's orders about records, ended in their order at a given speed.

Rules: a segment log as the daemon's (whole segments are freed, one is kept back for what is appended again, the cap is
hard), without bytes and without failures. Reads and writes do not slow each other; each direction does one job after
the other at the full bandwidth. Whoever replays hands orders in and asks for what ended. Must not know: planner,
policies, traces.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.commands import CancelReads, Command, FreeSegment, ReadRecords, Records, WriteRecords
from prefixcache.core.events import Event, ReadEnd, RecordsRead, RecordsWritten, SegmentFreed, WriteEnd
from prefixcache.core.spec import DiskSpec

_SEGMENT_BYTES: Final = 256 << 20
_SEGMENTS: Final = 16  # a small cap is still cut into so many, as in the daemon
_FEWEST_FOR_RESERVE: Final = 4

Order: TypeAlias = WriteRecords | ReadRecords | FreeSegment
_Places = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class DiskModel:
    """Capacity in blocks, bytes of a block, and bytes a second in each direction."""

    blocks: int
    block_bytes: int
    bytes_per_s: float

    @property
    def blocks_per_segment(self) -> int:
        return max(1, min(_SEGMENT_BYTES // self.block_bytes, self.blocks // _SEGMENTS))

    def spec(self) -> DiskSpec:
        """What the planner is told of it: the daemon's own constants, and the speed."""
        segment_bytes = self.blocks_per_segment * self.block_bytes
        return DiskSpec(segment_bytes, read_bytes_per_s=self.bytes_per_s, read_latency_s=0.0)


class _Lane:
    """Jobs of one direction, one after the other. `ends_at`: of the first, infinite where there is none."""

    def __init__(self, block_s: float) -> None:
        self._block_s = block_s
        self._jobs: deque[Order] = deque()
        self.ends_at = np.inf

    def add(self, order: Order, now: float) -> None:
        self._jobs.append(order)
        if len(self._jobs) == 1:
            self._begin(now)

    def take(self) -> Order:
        """The first job, which ends at `ends_at`; the next one begins then."""
        job = self._jobs.popleft()
        self._begin(self.ends_at)
        return job

    def call_off(self, number: int) -> ReadRecords | None:
        """Takes a read out that has not begun."""
        for place, order in enumerate(self._jobs):
            if place and isinstance(order, ReadRecords) and order.job == number:
                del self._jobs[place]
                return order
        return None

    def _begin(self, now: float) -> None:
        self.ends_at = now + _blocks(self._jobs[0]) * self._block_s if self._jobs else np.inf


class IdealDisk:
    """See the module's rules. `blocks_written` counts what is appended again as well."""

    def __init__(self, model: DiskModel) -> None:
        self.model = model
        self.blocks_written = 0
        self.blocks_read = 0
        self._most_segments = max(1, model.blocks // model.blocks_per_segment)
        self._kept_back = int(self._most_segments >= _FEWEST_FOR_RESERVE)
        self._records: dict[int, int] = {}  # segment -> records appended to it
        self._newest = 0
        block_s = model.block_bytes / model.bytes_per_s
        self._reads = _Lane(block_s)
        self._writes = _Lane(block_s)
        self._called_off: list[tuple[float, int, ReadRecords]] = []

    @property
    def blocks_held(self) -> int:
        """Records in all segments, dead ones included."""
        return sum(self._records.values())

    def order(self, command: Command, now: float) -> None:
        """Begins what concerns a disk, passes over what does not (tombstones have no bytes here)."""
        if isinstance(command, ReadRecords):
            self._reads.add(command, now)
        elif isinstance(command, WriteRecords | FreeSegment):
            self._writes.add(command, now)
        elif isinstance(command, CancelReads):
            order = self._reads.call_off(command.job)
            if order is not None:
                heapq.heappush(self._called_off, (now, order.job, order))

    @property
    def next_end(self) -> float:
        """When the next job ends; infinite where there is none."""
        called_off = self._called_off[0][0] if self._called_off else np.inf
        return float(min(self._reads.ends_at, self._writes.ends_at, called_off))

    def end_next(self) -> Event:
        """What ended at `next_end`."""
        at = self.next_end
        if self._called_off and self._called_off[0][0] == at:
            return _read(heapq.heappop(self._called_off)[2], ReadEnd.FAILED)
        order = (self._reads if self._reads.ends_at == at else self._writes).take()
        if isinstance(order, ReadRecords):
            self.blocks_read += len(order.records.rows)
            return _read(order, ReadEnd.OK)
        if isinstance(order, WriteRecords):
            return self._write(order)
        return self._free(order)

    def _write(self, order: WriteRecords) -> Event:
        ends, segments, pages = self._append(order.records, again=False)
        index = np.arange(len(ends), dtype=np.uint32)
        return RecordsWritten(order.job, index, ends, segments, pages, self._room_bytes())

    def _free(self, order: FreeSegment) -> Event:
        kept = tuple(self._append(records, again=True) for records in order.keep)
        freed = all((ends == WriteEnd.OK).all() for ends, _, _ in kept)
        if freed:
            del self._records[order.segment]
        return SegmentFreed(order.segment, freed, kept, self._room_bytes())

    def _append(self, records: Records, *, again: bool) -> tuple[NDArray[np.uint8], _Places, _Places]:
        count = len(records.rows)
        ends = np.full(count, WriteEnd.NO_ROOM, np.uint8)
        segments, pages = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
        done = 0
        while done < count and self._has_room(again=again):
            first = self._records[self._newest]
            some = min(count - done, self.model.blocks_per_segment - first)
            segments[done : done + some] = self._newest
            pages[done : done + some] = np.arange(first, first + some)
            self._records[self._newest] = first + some
            done += some
        ends[:done] = WriteEnd.OK
        self.blocks_written += done
        return ends, segments, pages

    def _has_room(self, *, again: bool) -> bool:
        """Whether another record fits; opens a segment where that is needed and the cap allows it."""
        if self._records.get(self._newest, self.model.blocks_per_segment) < self.model.blocks_per_segment:
            return True
        if len(self._records) >= self._most_segments - (0 if again else self._kept_back):
            return False
        self._newest += 1
        self._records[self._newest] = 0
        return True

    def _room_bytes(self) -> int:
        free = self._most_segments - self._kept_back - len(self._records)
        return max(free, 0) * self.model.blocks_per_segment * self.model.block_bytes


def _blocks(order: Order) -> int:
    if isinstance(order, FreeSegment):
        return sum(len(records.rows) for records in order.keep)
    return len(order.records.rows)


def _read(order: ReadRecords, end: ReadEnd) -> RecordsRead:
    count = len(order.records.rows)
    return RecordsRead(order.job, np.arange(count, dtype=np.uint32), np.full(count, end, np.uint8))
