"""A promise that copies will be over: what a caller holds while a device works.

Every ticket ends exactly once, with or without an error, also when its pool is closed. It knows nothing of slots.
"""

import threading
from collections.abc import Callable

from prefixcache_offload.gpu.errors import DeviceError

OnDone = Callable[["Ticket"], None]


class Ticket:
    """Copies under way. Thread-safe."""

    def __init__(self) -> None:
        """Under way; made by a pool."""
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._error: DeviceError | None = None
        self._waiting: list[OnDone] = []

    @property
    def error(self) -> DeviceError | None:
        """Why the copies did not happen (the target then holds anything); None while under way and after success."""
        return self._error

    def done(self) -> bool:
        """Whether the copies are over, for better or worse. Costs no call to the device."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until they are over, at most `timeout_s`; whether they are."""
        return self._over.wait(timeout_s)

    def on_done(self, call: OnDone) -> None:
        """Have `call(ticket)` once they are over: on the pool's thread, or at once when they are. It must not raise."""
        with self._lock:
            if not self._over.is_set():
                self._waiting.append(call)
                return
        call(self)

    def end(self, error: DeviceError | None) -> None:
        """For the pool: they are over. The first end counts."""
        with self._lock:
            if self._over.is_set():
                return
            self._error = error
            waiting, self._waiting = self._waiting, []
            self._over.set()
        for call in waiting:
            call(self)
