"""What need not be done before an answer: a flush, writing ahead of need, and making room on disk, a bounded step at a
time.

Rules: an event notes that there may be something to do and goes on; `MoreToDo` asks for a `WorkResumed` when nobody
waits for an answer, one at a time. A step leaves everything as it must be, so anything may happen before the next one.
Nobody's answer depends on when, or whether, the next one comes. Must not know: what a step does, who else waits.
"""

from __future__ import annotations

from prefixcache.core.commands import Command, MoreToDo
from prefixcache.core.demoting import Demoter
from prefixcache.core.freeing import Freer


class Chores:
    """See the module's rules. is_due: there may be something to do; is_told: MoreToDo was, and WorkResumed did not come
    since."""

    def __init__(self, demoter: Demoter, freer: Freer) -> None:
        self._demoter = demoter
        self._freer = freer
        self.is_due = False
        self._refills = False
        self.is_told = False

    def note(self) -> None:
        """There may be something to do."""
        self.is_due = self._refills = True

    def note_failed(self) -> None:
        """A write failed. There may be room to make; but nothing more is written before there is another reason, or
        the disk would be asked again and again."""
        self.is_due, self._refills = True, False

    def resume(self, now: float, out: list[Command]) -> None:
        """One step."""
        self.is_told = False
        if not self._demoter.flush_more(out) and not self._freer.work(out):
            self._refills = self._refills and self._demoter.refill(now, out)
            self.is_due = self._refills

    def tell(self, out: list[Command]) -> None:
        """Behind everything else that an event answers."""
        if self.is_due and not self.is_told:
            self.is_told = True
            out.append(MoreToDo())
