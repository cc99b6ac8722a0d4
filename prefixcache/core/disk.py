"""What the core knows of the disk tier: whether it works, which records lie in which segment, what is under way.

Rules: a record is the table's (column `segments`, `pages`) and counted in its segment, both or neither. A segment's
list of rows may hold rows that have moved on since: whoever reads it compares with the table. What a segment is called
and where in it a record lies is told by the shell; a number is never used for another segment.
Must not know: the tree, policies, how bytes move.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.ids import Rows
from prefixcache.core.table import NO_SEGMENT

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace

Places = NDArray[np.uint32]
UNKNOWN_ROOM = 1 << 62  # until it is told
STARTING = "starting"


class Segment:
    """Records that were put into one segment: `put_bytes` counts them all (of an earlier run's it is more than that),
    `live_bytes` those that are still the table's."""

    __slots__ = ("frozen", "live_bytes", "number", "pieces", "put_bytes", "reads")

    def __init__(self, number: int) -> None:
        self.number = number
        self.pieces: list[tuple[Namespace, int, Rows, Places]] = []  # (namespace, part, rows, pages)
        self.live_bytes = 0
        self.put_bytes = 0
        self.reads = 0  # records being read from it
        self.frozen = False  # being freed


class Disk:
    """State of the tier. `reads_on`, `writes_on`: told by the shell; off until it says so."""

    def __init__(self) -> None:
        self.reads_on = False
        self.writes_on = False
        self.reason = STARTING
        self.recovered = False  # everything that was there at the start is known
        self.segments: dict[int, Segment] = {}
        self.numbers: list[int] = []  # of segments, ascending
        self.room_bytes = UNKNOWN_ROOM  # for new segments, as told last
        self.segment_bytes = 0
        self.writing: dict[int, int] = {}  # writes under way: job -> serial, as of a lease
        self.granted_bytes = 0  # of host memory, ever: how fast it is being filled
        self._next_job = 1

    @property
    def is_starting(self) -> bool:
        """Whether nobody has said yet if it works."""
        return self.reason == STARTING

    def next_job(self) -> int:
        self._next_job += 1
        return self._next_job - 1

    def segment(self, number: int) -> Segment:
        """A segment, known from now on."""
        found = self.segments.get(number)
        if found is None:
            found = self.segments[number] = Segment(number)
            insort(self.numbers, number)
        return found

    def drop(self, number: int) -> None:
        """A segment is gone."""
        del self.segments[number]
        del self.numbers[bisect_left(self.numbers, number)]

    def oldest(self, most: int, but: Container[int] = ()) -> list[Segment]:
        """Up to `most` segments but these, oldest first, of which nothing is being read; never the newest."""
        found: list[Segment] = []
        for place in range(len(self.numbers) - 1):
            segment = self.segments[self.numbers[place]]
            if not segment.reads and segment.number not in but:
                found.append(segment)
                if len(found) == most:
                    break
        return found

    def place(self, space: Namespace, part: int, rows: Rows, segments: Places, pages: Places) -> None:
        """One part of some rows is on disk there from now on."""
        self.lose(space, part, rows)
        column = space.table.parts[part]
        column.segments[rows] = segments
        column.pages[rows] = pages
        size = space.spec.parts[part].size_bytes
        first = segments[0]
        if (segments == first).all():
            segment = self.segment(int(first))
            segment.pieces.append((space, part, rows, pages))
            segment.live_bytes += size * len(rows)
            segment.put_bytes += size * len(rows)
            return
        for number in np.unique(segments).tolist():
            mine = segments == number
            segment = self.segment(number)
            segment.pieces.append((space, part, rows[mine], pages[mine]))
            segment.live_bytes += size * int(np.count_nonzero(mine))
            segment.put_bytes += size * int(np.count_nonzero(mine))

    def lose(self, space: Namespace, part: int, rows: Rows) -> None:
        """One part of some rows is not on disk any more (or never was)."""
        column = space.table.parts[part]
        had = column.segments[rows]
        known = had[had != NO_SEGMENT]
        if not len(known):
            return
        size = space.spec.parts[part].size_bytes
        for number, count in Counter(known.tolist()).items():
            segment = self.segments.get(number)
            if segment is not None:
                segment.live_bytes -= size * count
        column.segments[rows] = NO_SEGMENT

    def forget(self, space: Namespace, rows: Rows) -> None:
        """These rows are about to be released."""
        for part in range(len(space.strides)):
            self.lose(space, part, rows)

    def live_in(self, segment: Segment) -> list[tuple[Namespace, int, Rows, Places]]:
        """The records of a segment that are still the table's, one entry per namespace and part.

        What moved on is dropped from the segment's list: it can only come back by `place`, which enters it anew."""
        by_part: dict[tuple[int, int], list[tuple[Namespace, int, Rows, Places]]] = {}
        for piece in segment.pieces:
            by_part.setdefault((piece[0].number, piece[1]), []).append(piece)
        found = []
        for pieces in by_part.values():
            space, part, rows, pages = pieces[0]
            if len(pieces) > 1:
                rows = np.concatenate([each[2] for each in pieces])
                pages = np.concatenate([each[3] for each in pieces])
            column = space.table.parts[part]
            same = (column.segments[rows] == segment.number) & (column.pages[rows] == pages)
            if same.any():
                found.append((space, part, rows[same], pages[same]))
        segment.pieces = list(found)
        return found
