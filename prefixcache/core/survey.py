"""What a prefix of each length needs of a path, and what of that is in memory, on disk, or nowhere.

Rules: looks, and changes nothing. A full group needs all blocks behind those that the worker has itself, a sliding one
those of its window, a state group its boundary; so what has to be loaded for a longer prefix need not contain what has
to be loaded for a shorter one. Counts over all lengths at once are differences of running sums.
Must not know: whether loading is worth it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.ids import NO_SLOT, Rows
from prefixcache.core.namespaces import Namespace
from prefixcache.core.table import NO_SEGMENT

Mask = NDArray[np.bool_]
Counts = NDArray[np.int64]


class Survey:
    """Of blocks [first, end) of a path, n of them; arrays "by length" have one entry per prefix of first + 1 .. end
    blocks. lacking: per part bool[n], what is not in memory."""

    __slots__ = ("end", "first", "in_memory", "lacking", "rows", "space", "stored")

    def __init__(self, space: Namespace, rows: Rows, first: int) -> None:
        """rows: of all blocks of the path."""
        self.space = space
        self.first = first
        self.end = len(rows)
        self.rows = rows[first:]
        self.lacking: list[Mask] = []
        absent = np.zeros(len(self.rows), np.int64)
        nowhere = np.zeros(len(self.rows), np.int64)
        for part, column in enumerate(space.table.parts):
            lacking = column.slots[self.rows] == NO_SLOT
            self.lacking.append(lacking)
            if lacking.any():
                absent += self.needed(part, lacking)
                nowhere += self.needed(part, lacking & (column.segments[self.rows] == NO_SEGMENT))
        self.in_memory: Mask = absent == 0
        """By length: whether all it needs is in memory."""
        self.stored: Mask = nowhere == 0
        """By length: whether all it needs is in memory or on disk."""

    def needed(self, part: int, marked: Mask) -> Counts:
        """By length: how many of the marked blocks it needs of this part."""
        sums = np.zeros(len(marked) + 1, np.int64)
        np.cumsum(marked, out=sums[1:])
        window = self.space.windows[self.space.spec.parts[part].group]
        if window is None:
            return sums[1:]
        within: Counts = sums[1:] - sums[np.maximum(np.arange(1, len(sums)) - window, 0)]
        return within

    def range_of(self, part: int, end: int) -> slice:
        """Where in the arrays the blocks lie that a prefix of `end` blocks needs of this part."""
        return slice(self.space.needed_from(part, self.first, end) - self.first, end - self.first)

    def longest(self, possible: Mask) -> int:
        """The longest of the possible lengths, in blocks from block 0; `first` if there is none."""
        found = np.flatnonzero(possible)
        return self.first + int(found[-1]) + 1 if len(found) else self.first

    def lacks(self, end: int) -> Mask:
        """bool[end - first]: blocks of which a prefix of `end` blocks needs anything that is not in memory."""
        lacks = np.zeros(end - self.first, np.bool_)
        for part, lacking in enumerate(self.lacking):
            wanted = self.range_of(part, end)
            lacks[wanted] |= lacking[wanted]
        return lacks
