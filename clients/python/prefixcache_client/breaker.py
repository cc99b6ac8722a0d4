"""The circuit breaker: after repeated failures the server is left alone for a moment, so that a dead one costs no time.

States: closed (calls pass), open (calls are refused at once), half-open (one call passes as a probe; its outcome
closes the breaker or opens it for twice as long). The clock is an argument; nothing is known about what a call is.
"""

import threading
from typing import Final

CLOSED: Final = "closed"
OPEN: Final = "open"
HALF_OPEN: Final = "half_open"


class CircuitBreaker:
    """`threshold` failures in a row open it for `open_s`, doubling with every failed probe up to `max_open_s`.

    Thread-safe.
    """

    def __init__(self, threshold: int = 3, open_s: float = 0.25, max_open_s: float = 4.0) -> None:
        if threshold < 1 or not 0 < open_s <= max_open_s:
            raise ValueError("a breaker needs threshold >= 1 and 0 < open_s <= max_open_s")
        self._threshold = threshold
        self._open_s = open_s
        self._max_open_s = max_open_s
        self._lock = threading.Lock()
        self._state = CLOSED
        self._failures = 0
        self._wait_s = open_s
        self._retry_at = 0.0
        self._opened = 0
        self.calm = True
        """Whether it is closed and has seen no failure since the last success: then nobody needs to ask or tell it."""

    @property
    def state(self) -> str:
        """CLOSED, OPEN or HALF_OPEN."""
        return self._state

    @property
    def times_opened(self) -> int:
        """How often it opened, failed probes included."""
        return self._opened

    def admit(self, now: float) -> bool:
        """Whether a call may be tried. A True while open makes the caller the probe: it must report its outcome."""
        if self._state == CLOSED:
            return True
        with self._lock:
            if self._state == CLOSED:
                return True
            if now < self._retry_at:
                return False
            # A probe that never reports (its thread was killed) must not close the door for ever: another one may
            # follow.
            self._state = HALF_OPEN
            self._retry_at = now + self._wait_s
            return True

    def success(self) -> None:
        """A call was answered, with whatever answer."""
        if self.calm:
            return
        with self._lock:
            self._state = CLOSED
            self._failures = 0
            self._wait_s = self._open_s
            self.calm = True

    def failure(self, now: float) -> bool:
        """A call got no answer. True when that opened it and it was closed before: the moment to tell somebody."""
        with self._lock:
            self._failures += 1
            self.calm = False
            was_closed = self._state == CLOSED
            if self._state == HALF_OPEN:
                self._wait_s = min(self._wait_s * 2, self._max_open_s)
            elif self._state == OPEN or self._failures < self._threshold:
                return False
            self._state = OPEN
            self._opened += 1
            self._retry_at = now + self._wait_s
            return was_closed

    def reset_after_fork(self) -> None:
        """In a forked child: a lock that another thread held is held for ever."""
        self._lock = threading.Lock()
