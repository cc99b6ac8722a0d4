"""The segments of a log and what they take up: sizes against the cap, live bytes, open descriptors, who still reads.

Counting and file handles only; nothing is written here. All methods of `SegmentTable` are called with the tier's lock
held, except where they say otherwise. A number names one segment for ever: it is never used again.
"""

import threading
from enum import IntEnum

import numpy as np

from prefixcache_offload.disk.coded import CodedPlaces
from prefixcache_offload.disk.directory import Directory, segment_name
from prefixcache_offload.disk.options import DiskOptions
from prefixcache_offload.disk.records import ENTRY, PAGE, Entries, Kind, footer_bytes, stored_bytes

_MOST_IDLE_FILES = 256
_FEWEST_FOR_RESERVE = 4
"""From so many segments on, one is kept back so that freeing always has room to append what it keeps."""
_FIRST_ROOM = 64
_BLOCK = int(Kind.BLOCK)


class Stage(IntEnum):
    """Where a segment is in its life."""

    FOUND = 0
    """From an earlier run, not looked into yet."""
    OPEN = 1
    CLOSING = 2
    """Takes no more records; waits for writes in flight, then gets its footer."""
    SEALED = 3
    UNSEALED = 4
    """Takes no more records and has no footer (it could not be written): a restart scans it."""
    FREED = 5


class Segment:
    """One file of the log."""

    def __init__(self, number: int, size_bytes: int, stage: Stage, fd: int | None = None) -> None:
        self.number = number
        self.size_bytes = size_bytes
        self.stage = stage
        self.end_page = 0
        self.writes = 0
        self.holders = 0
        self.live_bytes = 0
        self.live_records = 0
        self.records = 0
        self.dirty = False
        """Something was written that would not survive a power cut."""
        self.first_sequence = 0
        self.coded = CodedPlaces()
        self._promised = 0
        self._written = 0
        self._entries = np.zeros(_FIRST_ROOM, ENTRY)
        self.fd = fd
        self.fd_lock = threading.Lock()

    @property
    def entries(self) -> Entries:
        """What was written by this run, in order of completion: for the footer. Empty once sealed."""
        return self._entries[: self._written]

    def fits(self, pages: int, more: int) -> bool:
        """Whether `more` records of together so many pages can still be added, with the footer after them."""
        taken = self._promised + more
        return (self.end_page + pages) * PAGE + footer_bytes(taken) <= self.size_bytes

    def promise(self, pages: int, count: int) -> int:
        """Give the next pages away; answer the first of them."""
        first = self.end_page
        self.end_page += pages
        self._promised += count
        return first

    def add(self, entries: Entries) -> None:
        """Records that are wholly written."""
        end = self._written + len(entries)
        if end > self._entries.size:
            grown = np.zeros(max(end, 2 * self._entries.size), ENTRY)
            grown[: self._written] = self.entries
            self._entries = grown
        self._entries[self._written : end] = entries
        self._written = end
        self.note(entries)

    def note(self, entries: Entries) -> None:
        """Count records, and blocks among them as live."""
        if not len(entries):
            return
        first = int(entries["sequence"].min())
        self.first_sequence = min(self.first_sequence or first, first)
        self.records += len(entries)
        blocks = entries["kind"] == _BLOCK
        self.live_records += int(np.count_nonzero(blocks))
        self.live_bytes += int(stored_bytes(entries)[blocks].sum())
        self.coded.add(entries)

    def forget_entries(self) -> None:
        """The footer is written: the list is not needed any more."""
        self._entries, self._written = np.zeros(0, ENTRY), 0


class SegmentTable:
    """All segments by number."""

    def __init__(self, directory: Directory, options: DiskOptions) -> None:
        """Find the files of earlier runs. Raises OSError."""
        self._directory = directory
        self._options = options
        self.by_number: dict[int, Segment] = {}
        self.used_bytes = options.meta_cap_bytes
        """Of the cap: every segment file at its present size, and the small files' share."""
        for number in directory.segments():
            fd = directory.open_segment(number)
            segment = Segment(number, directory.disk.size(fd), Stage.FOUND)
            directory.disk.close(fd)
            self.by_number[number] = segment
            self.used_bytes += segment.size_bytes
        self.next_number = max(self.by_number, default=0) + 1
        self._idle: dict[int, Segment] = {}

    @property
    def reserve_bytes(self) -> int:
        """Kept back for what freeing appends."""
        size = self._options.new_segment_bytes
        return size if self._options.cap_bytes // size >= _FEWEST_FOR_RESERVE else 0

    def free_bytes(self, *, reserve: bool = False) -> int:
        """What new segments may still take; with `reserve`, also what is kept back."""
        return self._options.cap_bytes - self.used_bytes - (0 if reserve else self.reserve_bytes)

    def may_add(self, *, reserve: bool) -> bool:
        """Whether another segment fits under the cap."""
        return self.free_bytes(reserve=reserve) >= self._options.new_segment_bytes

    def begin(self) -> Segment:
        """Count a new segment before its file is made, so that two cannot share the last room."""
        segment = Segment(self.next_number, self._options.new_segment_bytes, Stage.OPEN)
        self.next_number += 1
        self.used_bytes += segment.size_bytes
        self.by_number[segment.number] = segment
        return segment

    def resized(self, segment: Segment, size_bytes: int) -> None:
        """The file is now this long."""
        if segment.stage is not Stage.FREED:
            self.used_bytes += size_bytes - segment.size_bytes
        segment.size_bytes = size_bytes

    def remove(self, segment: Segment) -> None:
        """It is out of the table at once; its file goes with `unlink`, its descriptor with the last holder."""
        if self.by_number.pop(segment.number, None) is not None:
            self.used_bytes -= segment.size_bytes
            segment.stage = Stage.FREED
        self._idle.pop(segment.number, None)

    def hold(self, number: int) -> Segment | None:
        """A segment to read from until `let_go`; None if there is none."""
        segment = self.by_number.get(number)
        if segment is not None:
            segment.holders += 1
            self._idle.pop(number, None)
        return segment

    def as_stored(self, entries: Entries) -> Entries:
        """A copy of the entries that says in which form, on how many pages, each lies on disk."""
        told = entries.copy()
        for number in set(entries["segment"].tolist()):
            segment = self.by_number.get(number)
            if segment is not None and segment.coded:
                segment.coded.fill(told, np.flatnonzero(entries["segment"] == number))
        return told

    def let_go(self, segment: Segment) -> list[int]:
        """End a hold; answer descriptors to close now (without the lock)."""
        segment.holders -= 1
        if segment.holders or segment.writes or segment.stage in (Stage.OPEN, Stage.CLOSING) or segment.fd is None:
            return []
        if segment.stage is Stage.FREED:
            return [_take_fd(segment)]
        self._idle[segment.number] = segment
        if len(self._idle) <= _MOST_IDLE_FILES:
            return []
        return [_take_fd(self._idle.pop(next(iter(self._idle))))]

    def idle_fd(self, segment: Segment) -> list[int]:
        """Descriptors to close because a segment was removed that nobody holds."""
        free = not segment.holders and not segment.writes and segment.fd is not None
        return [_take_fd(segment)] if free else []

    def fd(self, segment: Segment) -> int:
        """Descriptor of a held segment, opened if need be. Without the tier's lock. Raises OSError."""
        with segment.fd_lock:
            if segment.fd is None:
                segment.fd = self._directory.open_segment(segment.number)
            return segment.fd

    def unlink(self, segment: Segment) -> None:
        """Remove the file of a removed segment. Without the tier's lock. Raises OSError."""
        self._directory.disk.unlink(self._directory.file(segment_name(segment.number)))


def _take_fd(segment: Segment) -> int:
    fd, segment.fd = segment.fd, None
    if fd is None:
        raise RuntimeError("there is no descriptor to take")
    return fd
