"""The last events, numbered: what every watcher reads from at its own pace.

Rules: one writer, which never waits; readers on any thread, without a lock. Bounded by bytes: the oldest go, and a
reader that needs them is told so (`get` answers None). One log instead of a queue per watcher: a slow watcher costs
nothing, and going on after a lost connection is only a number. Must not know: who reads.
"""

from typing import Final

from prefixcache.core.commands import Published

_EVENT_BYTES: Final = 300  # of the objects around the keys


class EventLog:
    """Events `first` to `last`; an empty log has `first` = `last` + 1."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._size_bytes = 0
        self._events: dict[int, Published] = {}
        self.first = 1
        self.last = 0

    def append(self, event: Published) -> None:
        """The next number is this event's. The newest event stays, however large it is."""
        self._events[self.last + 1] = event
        self.last += 1
        self._size_bytes += _size_of(event)
        while self._size_bytes > self._most_bytes and self.first < self.last:
            self.first += 1  # before the event is gone, so that who does not find it sees why
            self._size_bytes -= _size_of(self._events.pop(self.first - 1))

    def get(self, sequence: int) -> Published | None:
        """The event of a number up to `last`; None if it is not kept any more."""
        return self._events.get(sequence)

    def reaches(self, after: int) -> bool:
        """Whether everything behind event `after` is still here."""
        return self.first - 1 <= after <= self.last


def _size_of(event: Published) -> int:
    return len(event.keys) + len(event.parent) + _EVENT_BYTES
