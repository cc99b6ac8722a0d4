"""A fake disk tier: segments of records, tombstones, jobs under way.

Faults it makes, all chosen by the seed:
- reads and writes end in any order, record by record, long after they began or never before a crash;
- a write fails, finds no room or that its bytes changed in memory, or is on disk although nobody was told (crash); a
  read fails, or scribbles first;
- a record rots; a segment loses its newest records in a crash (torn);
- a segment is freed while blocks of it are asked for; freeing fails half-way, with some records appended twice;
- the disk is off for a while, in one direction or both; what is under way then fails;
- another directory takes the place of this one.
A record holds who wrote its bytes, as memory does, so that wrong bytes show as what they are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prefixcache.core.commands import CancelReads, FreeSegment, ReadRecords, Records, RevokeRecords, WriteRecords
from prefixcache.core.events import (
    DiskChanged,
    DiskRecovered,
    Event,
    ReadEnd,
    RecordsRead,
    RecordsWritten,
    SegmentFreed,
    WriteEnd,
)
from prefixcache.core.ids import KEY_BYTES
from tests.sim.fakes import Memory, SimError, Tag

Name = tuple[int, bytes, int]  # namespace, key, part
Tombstone = tuple[int, int | None, set[bytes] | None]  # sequence, namespace, keys
SLOT_BYTES = 4096
_MOST_TOLD_TOGETHER = 3


@dataclass
class Record:
    name: Name
    parent: bytes
    depth: int
    content: tuple[Tag | None, ...]
    sequence: int
    rotten: bool = False


@dataclass(eq=False)
class Job:
    command: WriteRecords | ReadRecords | FreeSegment
    sequence: int
    todo: list[int] = field(default_factory=list)
    cancelled: bool = False


class FakeDisk:
    """See the module's faults."""

    def __init__(self, memory: Memory, rng: random.Random) -> None:
        self.memory = memory
        self.rng = rng
        self.most_segments = rng.randint(2, 10)
        self.most_records = rng.randint(2, 12)
        self.faults = rng.choice((0.0, 0.0, 0.03, 0.2))
        self.haste = rng.choice((0.0, 0.5, 0.9))  # how often it does something beside its turns
        self.segments: dict[int, dict[int, Record]] = {}
        self.jobs: list[Job] = []
        self.tombstones: list[Tombstone] = []
        self.ordered: list[Tombstone] = []  # that are not written yet: a restart under way does not know them
        self.sequence = 0
        self.newest = 0
        self.next_page = 0
        self.reads_on = self.writes_on = True
        self.told_late: list[Event] = []  # ended, and the planner has not heard of it

    # -- orders --------------------------------------------------------------------------------------------------

    def begin(self, command: WriteRecords | ReadRecords | FreeSegment) -> None:
        job = Job(command, self.draw())
        if not isinstance(command, FreeSegment):
            job.todo = list(range(len(command.records.rows)))
        self.jobs.append(job)

    def cancel(self, command: CancelReads) -> None:
        for job in self.jobs:
            if isinstance(job.command, ReadRecords) and job.command.job == command.job:
                job.cancelled = True

    def revoke(self, command: RevokeRecords) -> None:
        keys = command.keys
        named = None if keys is None else {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}
        self.ordered.append((self.draw(), command.namespace, named))

    # -- progress ------------------------------------------------------------------------------------------------

    def step(self) -> Event | None:
        """Does a piece of some job; answers its event."""
        if self.ordered and self.rng.random() < 0.5:
            self.tombstones.append(self.ordered.pop(0))
        if not self.jobs:
            return None
        job = self.rng.choice(self.jobs)
        if isinstance(job.command, FreeSegment):
            self.jobs.remove(job)
            return self._free(job.command)
        some = sorted(self.rng.sample(job.todo, min(len(job.todo), self.rng.choice((1, 2, 99)))))
        if self.rng.random() < 0.7:
            some = job.todo[: len(some)]
        job.todo = [place for place in job.todo if place not in some]
        if not job.todo:
            self.jobs.remove(job)
        if isinstance(job.command, WriteRecords):
            return self._write(job, job.command, some)
        return self._read(job, job.command, some)

    def toggle(self) -> Event:
        """On or off, in one direction or both."""
        self.reads_on, self.writes_on = self.rng.choice(((True, True), (True, True), (True, False), (False, False)))
        return DiskChanged(self.reads_on, self.writes_on, "" if self.reads_on and self.writes_on else "io_error")

    def rot(self) -> None:
        records = [record for pages in self.segments.values() for record in pages.values()]
        if records:
            self.rng.choice(records).rotten = True

    def _write(self, job: Job, command: WriteRecords, some: list[int]) -> Event:
        ends, places = self._append(command.records, some, job.sequence, None)
        index = np.array(some, np.uint32)
        return RecordsWritten(command.job, index, ends, places[:, 0], places[:, 1], self.room_bytes())

    def _append(
        self, records: Records, some: list[int], sequence: int, contents: list[tuple[Tag | None, ...]] | None
    ) -> tuple[Any, Any]:
        ends = np.zeros(len(some), np.uint8)
        places = np.zeros((len(some), 2), np.uint32)
        for at, place in enumerate(some):
            if not self.writes_on or self.rng.random() < self.faults:
                ends[at] = WriteEnd.FAILED
            elif contents is None and self.rng.random() < self.faults / 4:
                ends[at] = WriteEnd.CORRUPT
            elif not self._has_room(again=contents is not None):
                ends[at] = WriteEnd.NO_ROOM
            else:
                content = self.memory.read(int(records.slots[place])) if contents is None else contents[at]
                record = Record(*_names(records, place), content, sequence)
                self.next_page += 2
                self.segments[self.newest][self.next_page] = record
                places[at] = self.newest, self.next_page
        return ends, places

    def _read(self, job: Job, command: ReadRecords, some: list[int]) -> Event:
        records = command.records
        ends = np.zeros(len(some), np.uint8)
        for at, place in enumerate(some):
            slot = int(records.slots[place])
            found = self.segments.get(int(records.segments[place]), {}).get(int(records.pages[place]))
            if not self.reads_on or job.cancelled or self.rng.random() < self.faults:
                ends[at] = ReadEnd.FAILED
                self.memory.heads[slot] = [(-2, b"torn", 0)] * 2
            elif found is None or found.rotten:
                ends[at] = ReadEnd.LOST
                self.memory.heads[slot] = [(-2, b"wrong", 0)] * 2
            else:
                if found.name != _names(records, place)[0]:
                    raise SimError(f"asked for {_names(records, place)[0]} where {found.name} lies")
                self.memory.heads[slot] = list(found.content)
            self.memory.dirty = True
        return RecordsRead(command.job, np.array(some, np.uint32), ends)

    def _free(self, command: FreeSegment) -> Event:
        kept = []
        fine = self.writes_on and command.segment in self.segments
        for records in command.keep:
            found = [self.segments[command.segment].get(int(page)) for page in records.pages]
            if any(record is None for record in found):
                raise SimError("asked to keep what is not there")
            good = [
                (at, each)
                for at, each in enumerate(found)
                if each and not each.rotten and not self.revoked(each, *self.ordered)
            ]
            some, contents = [at for at, _ in good], [record.content for _, record in good]
            ends = np.full(len(found), WriteEnd.FAILED, np.uint8)
            places = np.zeros((len(found), 2), np.uint32)
            ends[some], places[some] = self._append(records, some, self.draw(), contents)
            fine &= bool((ends[some] == WriteEnd.OK).all())
            kept.append((ends, places[:, 0], places[:, 1]))
        if fine:
            del self.segments[command.segment]
        return SegmentFreed(command.segment, fine, tuple(kept), self.room_bytes())

    def _has_room(self, *, again: bool) -> bool:
        if self.newest in self.segments and len(self.segments[self.newest]) < self.most_records:
            return True
        if len(self.segments) >= self.most_segments + again:
            return False
        self.newest += 1
        self.segments[self.newest] = {}
        return True

    def room_bytes(self) -> int:
        return max(self.most_segments - len(self.segments), 0) * self.segment_bytes

    @property
    def segment_bytes(self) -> int:
        return self.most_records * SLOT_BYTES

    def draw(self) -> int:
        self.sequence += 1
        return self.sequence

    # -- restart -------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Kill -9: what was under way may be on disk or not; the newest records may be torn."""
        for job in self.jobs:
            if isinstance(job.command, WriteRecords) and self.rng.random() < 0.5:
                self._write(job, job.command, job.todo)
        self.jobs.clear()
        self.tombstones += self.ordered
        self.ordered.clear()
        newest = self.segments.get(self.newest, {})
        for page in sorted(newest, reverse=True)[: self.rng.choice((0, 0, 1, 2))]:
            del newest[page]
        self.newest += 1  # a segment of an earlier run is never written to
        self.segments[self.newest] = {}
        if len(self.segments) > self.most_segments:
            self.most_segments = len(self.segments)
        self.reads_on = self.writes_on = True

    def replace(self) -> None:
        """What is at hand now is another directory: with nothing in it, or with the same."""
        if self.rng.random() < 0.5:
            self.segments = {}
            self.newest = 0  # its numbers begin anew
        self.newest += 1
        self.segments[self.newest] = {}
        self.most_segments = max(self.most_segments, len(self.segments))
        self.reads_on = self.writes_on = True

    def recovered(self) -> Iterator[list[Event]]:
        """What a few segments at a time tell when they are read, newest first, less what is revoked by then."""
        seen: set[Name] = set()
        waiting = sorted(self.segments, reverse=True)
        while waiting:
            together = 1 + waiting[0] % _MOST_TOLD_TOGETHER
            left: list[tuple[int, int, Record]] = []
            for number in waiting[:together]:
                for page, record in sorted(self.segments.get(number, {}).items(), reverse=True):
                    if not self.revoked(record) and record.name not in seen:
                        left.append((number, page, record))
                        seen.add(record.name)
            waiting = waiting[together:]
            yield [self._told(space, left) for space in sorted({record.name[0] for *_, record in left})]

    def keys_of(self, namespace: int) -> set[bytes]:
        """Keys of all records of a namespace."""
        records = [record for pages in self.segments.values() for record in pages.values()]
        return {record.name[1] for record in records if record.name[0] == namespace}

    def revoked(self, record: Record, *ordered: Tombstone) -> bool:
        return any(
            record.sequence < sequence
            and (namespace is None or namespace == record.name[0])
            and (keys is None or record.name[1] in keys)
            for sequence, namespace, keys in (*self.tombstones, *ordered)
        )

    def _told(self, space: int, left: list[tuple[int, int, Record]]) -> DiskRecovered:
        mine = [each for each in left if each[2].name[0] == space]
        return DiskRecovered(
            space,
            np.array([record.name[2] for *_, record in mine], np.uint16),
            np.array([number for number, *_ in mine], np.uint32),
            np.array([page for _, page, _ in mine], np.uint32),
            b"".join(record.name[1] for *_, record in mine),
            b"".join(record.parent for *_, record in mine),
            np.array([record.depth for *_, record in mine], np.uint32),
        )


def _names(records: Records, place: int) -> tuple[Name, bytes, int]:
    at = place * KEY_BYTES
    name = (records.namespace, records.keys[at : at + KEY_BYTES], int(records.parts[place]))
    return name, records.parents[at : at + KEY_BYTES], int(records.depths[place])
