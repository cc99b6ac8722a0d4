"""The block table of one namespace: one row per block, in numpy columns.

Rules: only committed data stands in here (what is being filled belongs to its reservation). A row's number means
nothing once the row is released, so whoever keeps one across events keeps the generation with it.
Must not know: keys, the tree, sessions, why a row is touched.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.ids import NO_SLOT, Generations, Rows, Slots

DIGEST_KNOWN = 1
UNVERIFIED = 2
DIGEST_BYTES = 16
NO_SEGMENT = 0
LOW, NORMAL, HIGH = -1, 0, 1  # priorities of blocks, in the order in which they win over each other
_FIRST_CAPACITY = 1024
_Scalar = TypeVar("_Scalar", bound=np.generic)


class PartColumn:
    """Where one part of each block is: slot, generation, checksum state."""

    __slots__ = ("_generations", "_slots", "digests", "flags", "generations", "on_disk", "pages", "segments", "slots")

    def __init__(self) -> None:
        self.on_disk = False
        self.segments: NDArray[np.uint32] = np.empty(0, np.uint32)  # where its record is; NO_SEGMENT: nowhere
        self.pages: NDArray[np.uint32] = np.empty(0, np.uint32)
        self.slots: Slots = np.empty(0, np.uint32)
        self.generations: Generations = np.empty(0, np.uint64)
        # The same memory as bytes: a slice of these costs half of a slice of an array.
        self._slots = memoryview(b"")
        self._generations = memoryview(b"")
        self.flags: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.digests: NDArray[np.uint8] = np.empty((0, DIGEST_BYTES), np.uint8)

    def grow(self, capacity: int) -> None:
        old = len(self.slots)
        # Zeroed, not filled, wherever zero will do: pages nobody wrote to cost no memory.
        self.generations = _grown(self.generations, capacity)
        self.flags = _grown(self.flags, capacity)
        self.digests = _grown(self.digests, capacity)
        if self.on_disk:
            self.segments = _grown(self.segments, capacity)
            self.pages = _grown(self.pages, capacity)
        slots = np.empty(capacity, np.uint32)
        slots[:old] = self.slots
        self.slots = slots
        self._slots = slots.data.cast("B")
        self._generations = self.generations.data.cast("B")

    def packed(self, rows: slice | Rows) -> tuple[bytes, bytes]:
        """Slots (u32) and generations (u64) of some rows. A slice has a start and a stop."""
        if type(rows) is slice:
            first, end = rows.start, rows.stop
            return self._slots[first * 4 : end * 4].tobytes(), self._generations[first * 8 : end * 8].tobytes()
        return self.slots[rows].tobytes(), self.generations[rows].tobytes()


class BlockTable:
    """Rows of one namespace in one tier that holds whole parts (host). `touched` is the tick of the last use."""

    def __init__(self, part_count: int) -> None:
        self.parts = tuple(PartColumn() for _ in range(part_count))
        self.touched: NDArray[np.uint64] = np.empty(0, np.uint64)
        self.on_disk = False
        self.counts_hits = False
        self.hits: NDArray[np.uint8] = np.empty(0, np.uint8)  # a 1 shifted in for every lease that ended over it
        self.prioritised = False  # some block is, or was, of another priority than NORMAL
        self.priority: NDArray[np.int8] = np.empty(0, np.int8)  # empty until then
        self.cold: NDArray[np.bool_] = np.empty(0, np.bool_)  # of a node that is on disk only
        self.unverified = 0  # how many (row, part) still have to be verified; 0 keeps lookups cheap
        self._free: Rows = np.empty(0, np.uint32)  # a stack; the next row to give is at its top
        self._free_count = 0
        self._fresh = 0  # rows from here on were never used

    @property
    def capacity(self) -> int:
        return len(self.touched)

    @property
    def used(self) -> int:
        """Rows in use."""
        return self._fresh - self._free_count

    @property
    def high_water(self) -> int:
        """Rows from here on were never used."""
        return self._fresh

    def count_hits(self) -> None:
        """A column for them, from now on."""
        self.counts_hits = True
        self.hits = np.zeros(self.capacity, np.uint8)

    def use_disk(self) -> None:
        """Columns for places on disk, from now on."""
        self.on_disk = True
        self.cold = np.zeros(self.capacity, np.bool_)
        for part in self.parts:
            part.on_disk = True
            part.segments = np.zeros(self.capacity, np.uint32)
            part.pages = np.zeros(self.capacity, np.uint32)

    def set_priority(self, rows: Rows, priority: int) -> None:
        """Of new rows, which are NORMAL before."""
        if priority != NORMAL:
            if not self.prioritised:
                self.prioritised = True
                self.priority = np.zeros(self.capacity, np.int8)
            self.priority[rows] = priority

    def raise_priority(self, rows: Rows, priority: int) -> bool:
        """Of rows that somebody wants as well; whether any was lower."""
        lower = rows[self.priority[rows] < priority] if self.prioritised else rows[: len(rows) * (priority > NORMAL)]
        if not len(lower):
            return False
        self.set_priority(lower, HIGH)  # so that there is a column
        self.priority[lower] = priority
        return True

    def is_clean(self, rows: Rows) -> NDArray[np.bool_]:
        """bool[n]: which rows could leave memory without a loss: what is in memory of them is on disk as well."""
        clean = np.ones(len(rows), np.bool_)
        for part in self.parts:
            clean &= (part.segments[rows] != NO_SEGMENT) | (part.slots[rows] == NO_SLOT)
        return clean

    def is_recorded(self, rows: Rows) -> NDArray[np.bool_]:
        """bool[n]: which rows have any part on disk."""
        recorded = np.zeros(len(rows), np.bool_)
        for part in self.parts:
            recorded |= part.segments[rows] != NO_SEGMENT
        return recorded

    @property
    def recorded_count(self) -> int:
        """How many rows have any part on disk."""
        return int(np.count_nonzero(self.is_recorded(np.arange(self._fresh, dtype=np.uint32))))

    @property
    def unwritten_count(self) -> int:
        """How many rows have anything in memory that is not on disk."""
        return int(np.count_nonzero(~self.is_clean(np.arange(self._fresh, dtype=np.uint32))))

    @property
    def clean_count(self) -> int:
        """How many rows are on disk, with all that is in memory of them."""
        rows = np.arange(self._fresh, dtype=np.uint32)
        return int(np.count_nonzero(self.is_clean(rows) & self.is_recorded(rows)))

    def is_trusted(self, rows: Rows) -> NDArray[np.bool_]:
        """bool[n]: which rows have no part that still has to be verified."""
        trusted = np.ones(len(rows), np.bool_)
        if self.unverified:
            for part in self.parts:
                trusted &= part.flags[rows] & UNVERIFIED == 0
        return trusted

    def take_slots(self, rows: Rows) -> list[Slots]:
        """Rows leave memory (they are on disk); answers the slots they held, per part. What is known of their bytes
        stays known."""
        held = []
        for part in self.parts:
            held.append(part.slots[rows])
            part.slots[rows] = NO_SLOT
            if self.unverified:
                self.unverified -= int(np.count_nonzero(part.flags[rows] & UNVERIFIED))
                part.flags[rows] &= np.uint8(0xFF ^ UNVERIFIED)
        return held

    def bring(self, part: int, rows: Rows, slots: Slots, generation: int) -> None:
        """Bytes of one part came back from disk, verified by their record, into `slots`."""
        column = self.parts[part]
        column.slots[rows] = slots
        column.generations[rows] = generation

    def free_rows(self) -> Rows:
        """Released rows (for checks)."""
        return self._free[: self._free_count]

    def allocate(self, count: int) -> Rows:
        """`count` rows without any part, in any order; grows when there are not enough."""
        reused = min(count, self._free_count)
        fresh = count - reused
        if self._fresh + fresh > self.capacity:
            self._grow(self._fresh + fresh)
        rows = np.empty(count, np.uint32)
        self._free_count -= reused
        rows[:reused] = self._free[self._free_count : self._free_count + reused]
        rows[reused:] = np.arange(self._fresh, self._fresh + fresh, dtype=np.uint32)
        self._fresh += fresh
        for part in self.parts:
            part.slots[rows] = NO_SLOT
        if self.counts_hits:
            self.hits[rows] = 0
        if self.prioritised:
            self.priority[rows] = NORMAL
        if self.on_disk:
            self.cold[rows] = False
        return rows

    def release(self, rows: Rows) -> list[Slots]:
        """Gives rows back; answers the slots they held, per part (NO_SLOT where there was none)."""
        held = self.take_slots(rows)
        for part in self.parts:
            part.flags[rows] = 0
            if self.on_disk:
                part.segments[rows] = NO_SEGMENT
        end = self._free_count + len(rows)
        if end > len(self._free):
            free = np.empty(max(end, 2 * len(self._free), _FIRST_CAPACITY), np.uint32)
            free[: self._free_count] = self._free[: self._free_count]
            self._free = free
        self._free[self._free_count : end] = rows
        self._free_count = end
        return held

    def place(self, part: int, rows: Rows, slots: Slots, generation: int) -> None:
        """Puts `slots` of one generation into one part of `rows`."""
        column = self.parts[part]
        column.slots[rows] = slots
        column.generations[rows] = generation
        column.flags[rows] = 0

    def set_digests(self, part: int, rows: Rows, generations: Generations, digests: NDArray[np.uint8]) -> int:
        """Keeps digests of rows that are still what they were; answers how many that is."""
        column = self.parts[part]
        if not len(rows) or int(rows.max()) >= self.capacity:
            return 0
        same = (column.slots[rows] != NO_SLOT) & (column.generations[rows] == generations)
        kept = rows[same]
        column.digests[kept] = digests[same]
        column.flags[kept] |= DIGEST_KNOWN
        return len(kept)

    def mark_verified(self, part: int, rows: Rows) -> None:
        column = self.parts[part]
        self.unverified -= int(np.count_nonzero(column.flags[rows] & UNVERIFIED))
        column.flags[rows] &= np.uint8(0xFF ^ UNVERIFIED)

    def mark_unverified(self, part: int, rows: Rows) -> None:
        column = self.parts[part]
        self.unverified += int(np.count_nonzero(~column.flags[rows] & UNVERIFIED))
        column.flags[rows] |= UNVERIFIED

    def _grow(self, needed: int) -> None:
        capacity = max(_FIRST_CAPACITY, needed, self.capacity + self.capacity // 2)
        self.touched = _grown(self.touched, capacity)
        if self.counts_hits:
            self.hits = _grown(self.hits, capacity)
        if self.prioritised:
            self.priority = _grown(self.priority, capacity)
        if self.on_disk:
            self.cold = _grown(self.cold, capacity)
        for part in self.parts:
            part.grow(capacity)


def _grown(old: NDArray[_Scalar], capacity: int) -> NDArray[_Scalar]:
    new = np.zeros((capacity, *old.shape[1:]), old.dtype)
    new[: len(old)] = old
    return new
