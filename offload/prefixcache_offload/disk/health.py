"""Whether the tier may be used, and if not, why and when it tries again.

Reading and writing are off separately: a full disk still serves what it has. The tier's lock guards every call.
"""

from collections.abc import Callable
from dataclasses import dataclass

from prefixcache_offload.disk.outcomes import Trouble

_READS_GO_ON = frozenset({Trouble.NO_SPACE, Trouble.READ_ONLY})
_FOR_GOOD = frozenset({Trouble.CLOSED, Trouble.THREAD_DIED})
"""Nothing that can be tried again would mend these."""


@dataclass(frozen=True)
class HealthReport:
    """reads_off, writes_off: the reason, or None where it works. since: seconds on the tier's clock."""

    reads_off: Trouble | None
    writes_off: Trouble | None
    since: float
    retries: int


class Health:
    """The tier's state."""

    def __init__(self, clock: Callable[[], float], retry_s: float, retry_max_s: float) -> None:
        self._clock = clock
        self._first_pause_s, self._longest_pause_s = retry_s, retry_max_s
        self._pause_s = retry_s
        self._retry_at = 0.0
        self._read_errors = 0
        self.reads_off: Trouble | None = None
        self.writes_off: Trouble | None = None
        self.since = clock()
        self.retries = 0
        self.changes = 0
        """Grows with every change, so that a watcher can tell."""

    def report(self) -> HealthReport:
        """A copy."""
        return HealthReport(self.reads_off, self.writes_off, self.since, self.retries)

    @property
    def off(self) -> bool:
        """Whether any direction is off."""
        return self.writes_off is not None or self.reads_off is not None

    def fail(self, trouble: Trouble) -> None:
        """Something was seen that ends use for now. The first reason stays, except that a graver one joins it."""
        graver = trouble in _FOR_GOOD or (self.reads_off is None and trouble not in _READS_GO_ON)
        if graver:
            self.reads_off = self.writes_off = trouble
        elif self.writes_off is None:
            self.writes_off = trouble
        else:
            return
        self._changed()

    def read_failed(self, trouble: Trouble, until_off: int) -> None:
        """One read failed. A bad sector is a miss; several in a row are a bad disk."""
        self._read_errors += 1
        if self._read_errors >= until_off or trouble is Trouble.DIRECTORY_GONE:
            self.fail(trouble)

    def read_worked(self) -> None:
        """A read came back whole."""
        self._read_errors = 0

    def retry_due(self) -> bool:
        """Whether it is time to try again. True once per pause."""
        if not self.off or self.writes_off in _FOR_GOOD or self._clock() < self._retry_at:
            return False
        self.retries += 1
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        self._retry_at = self._clock() + self._pause_s
        return True

    def recovered(self) -> None:
        """A try went well: both directions are on."""
        if self.off and self.writes_off not in _FOR_GOOD:
            self.reads_off = self.writes_off = None
            self._read_errors = 0
            self._pause_s = self._first_pause_s
            self._changed()

    def _changed(self) -> None:
        self.since = self._clock()
        self._retry_at = self.since + self._pause_s
        self.changes += 1
