"""How many writers are to work at once: one, and one more for each time that what waits would take too long.

Every writer takes a core from whoever serves requests, and one call after the other is most of what a disk gives;
where it is not, what waits grows and more join. Rates are of the time in which anybody wrote. Values only: whoever
calls holds the tier's lock and says what time it is.
"""

_PATIENCE_S = 0.075
_FIRST_CALL_S = 1.0
"""What the first call of all may take before others join."""

_MEMORY_S = 4.0
"""After so much writing what was seen counts half."""


class Crew:
    """See the top of the file. at_work: calls that have begun and not ended."""

    def __init__(self) -> None:
        self.at_work = 0
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._written_bytes = 0.0

    def begin(self, now: float) -> None:
        """A call begins."""
        if not self.at_work:
            self._busy_since = now
        self.at_work += 1

    def end(self, now: float, size_bytes: int) -> None:
        """A call has ended, after so many bytes."""
        self.at_work -= 1
        self._busy_s += now - self._busy_since
        self._busy_since = now
        self._written_bytes += size_bytes
        if self._busy_s > _MEMORY_S:
            self._busy_s /= 2
            self._written_bytes /= 2

    def behind(self, waiting_bytes: int, now: float) -> int:
        """How many times longer than it should what waits would take; 0 where it would not. A call that hangs makes it
        grow."""
        under_way_s = now - self._busy_since if self.at_work else 0.0
        if not self._written_bytes:
            return int(under_way_s / _FIRST_CALL_S)
        busy_s = self._busy_s + under_way_s
        return int(waiting_bytes * busy_s / self._written_bytes / _PATIENCE_S)

    def lacks(self, waiting_bytes: int, now: float, *, urgent: bool) -> int:
        """How many more are to begin while so much waits. urgent: something waits that must not."""
        return max(1 + urgent + self.behind(waiting_bytes, now) - self.at_work, 0)
