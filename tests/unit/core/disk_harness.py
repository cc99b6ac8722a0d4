"""A planner with a disk tier in a few words: orders about records wait in a list until a test ends them."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefixcache.core.commands import Arrived, Command, FreeSegment, MoreToDo, ReadRecords, Records, WriteRecords
from prefixcache.core.events import (
    ClearRequested,
    DiskChanged,
    Event,
    FlushStarted,
    ReadEnd,
    RecordsRead,
    RecordsWritten,
    RecoveryDone,
    SegmentFreed,
    TimePassed,
    WorkResumed,
    WriteEnd,
)
from prefixcache.core.ids import Tier
from prefixcache.core.spec import DiskSpec, NamespaceSpec
from tests.unit.core.harness import GRANULE, ONE_PART, Harness, chain

SLOW = DiskSpec(segment_bytes=1 << 20, read_bytes_per_s=float(GRANULE), read_latency_s=0.0)
"""A disk that reads a block of one granule a second."""


class DiskHarness(Harness):
    """`records_per_segment` records go into segment 1, the next into 2, and so on."""

    def __init__(
        self, slots: int = 16, spec: NamespaceSpec = ONE_PART, disk: DiskSpec | None = None, per_segment: int = 64,
        **config: Any,
    ) -> None:  # fmt: skip
        self.orders: list[Command] = []
        self.arrivals: list[Arrived] = []
        self.written = 0
        self.per_segment = per_segment
        self.room_bytes = 1 << 40
        super().__init__(slots, 4, spec, disk=disk or DiskSpec(reserve_share=0.0), **config)
        self.send(DiskChanged(reads_on=True, writes_on=True))
        self.send(RecoveryDone())

    def send(self, event: Event) -> list[Command]:
        commands = super().send(event)
        self.orders += [each for each in commands if isinstance(each, (WriteRecords, ReadRecords, FreeSegment))]
        self.arrivals += [each for each in commands if isinstance(each, Arrived)]
        return commands

    def take(self, kind: type) -> list[Any]:
        """Orders of a kind, which count as begun."""
        mine = [order for order in self.orders if isinstance(order, kind)]
        self.orders = [order for order in self.orders if not isinstance(order, kind)]
        return mine

    def end_writes(self, end: WriteEnd = WriteEnd.OK) -> int:
        """Ends all writes alike, also those that begin meanwhile; how many records that were."""
        count = 0
        while orders := self.take(WriteRecords):
            for order in orders:
                size = len(order.records.rows)
                index = np.arange(size, dtype=np.uint32)
                places = self.written + index
                self.written += size
                segments = (places // self.per_segment + 1).astype(np.uint32)
                pages = (places % self.per_segment * 2).astype(np.uint32)
                ends = np.full(size, end, np.uint8)
                self.send(RecordsWritten(order.job, index, ends, segments, pages, self.room_bytes))
                count += size
        return count

    def end_reads(self, end: ReadEnd = ReadEnd.OK, *, records: slice = slice(None)) -> int:
        """Ends reads alike (of each order only `records`, the order is gone then); how many records that were."""
        count = 0
        for order in self.take(ReadRecords):
            index = np.arange(len(order.records.rows), dtype=np.uint32)[records]
            self.send(RecordsRead(order.job, index, np.full(len(index), end, np.uint8)))
            count += len(index)
        return count

    def free(self, order: FreeSegment, *, freed: bool = True) -> None:
        """Ends a FreeSegment: what was to be kept is in segment 90 now."""
        kept = tuple(self._kept(records) for records in order.keep)
        self.room_bytes = 1 << 40
        self.send(SegmentFreed(order.segment, freed, kept, self.room_bytes))

    def _kept(self, records: Records) -> tuple[Any, Any, Any]:
        size = len(records.rows)
        self.written += size
        pages = (self.written * 2 + np.arange(size)).astype(np.uint32)
        return np.zeros(size, np.uint8), np.full(size, 90, np.uint32), pages

    def flush(self) -> int:
        """Writes all there is; how many records."""
        demoter = self.planner.demoter
        assert demoter is not None
        self.send(FlushStarted())
        count = 0
        while True:
            while demoter.flush_due:
                self.send(WorkResumed())
            written = self.end_writes()
            if not written:
                return count
            count += written

    def clear(self, letters: str) -> None:
        """What has this prefix."""
        self.send(ClearRequested(1, chain(letters)))

    def hit_from_disk(self, letters: str) -> None:
        """Acquires a prompt, loads it, and releases it."""
        acquired = self.acquire(letters, deadline_s=100.0)
        self.end_reads()
        self.release(acquired)

    def resume(self) -> bool:
        """One step of what can be done later, for a harness that `is_busy`; whether there is more."""
        return any(isinstance(command, MoreToDo) for command in self.send(WorkResumed()))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.send(TimePassed())

    def hits(self, tier: Tier) -> int:
        """Tokens."""
        return self.planner.state.stats.tokens.hit[tier]
