"""When leases and reservations run out.

Rules: one heap of (time, serial, thing); a renewal only moves the thing's own `deadline`, the entry follows when it
comes up. Entries of things that ended are dropped when they come up or when they outnumber the others.
"""

from __future__ import annotations

import heapq
from typing import Protocol

_TOLERATED = 64  # entries of ended things that are not worth a clean-up


class Ending(Protocol):
    """Something with a deadline. `ended` is set once, by whoever ends it."""

    deadline: float
    ended: bool


class Deadlines:
    """`next_due` is never later than the earliest deadline of a live thing."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Ending]] = []
        self._serial = 0
        self._ended = 0
        self.next_due = float("inf")

    def add(self, thing: Ending) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (thing.deadline, self._serial, thing))
        if thing.deadline < self.next_due:
            self.next_due = thing.deadline

    def note_ended(self) -> None:
        """Some thing ended before its time."""
        self._ended += 1
        if self._ended > _TOLERATED and self._ended * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].ended]
            heapq.heapify(self._heap)
            self._ended = 0

    def pop_due(self, now: float) -> Ending | None:
        """The next live thing whose deadline is not after `now`; call until None."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, serial, thing = heapq.heappop(heap)
            if thing.ended:
                self._ended = max(0, self._ended - 1)
            elif thing.deadline > now:
                heapq.heappush(heap, (thing.deadline, serial, thing))
            else:
                self.next_due = heap[0][0] if heap else float("inf")
                return thing
        self.next_due = heap[0][0] if heap else float("inf")
        return None

    def __len__(self) -> int:
        return len(self._heap)
