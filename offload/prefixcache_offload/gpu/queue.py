"""The thread that drives one pool's copies: batches in the order they came, each ending its ticket.

A few batches are in flight at once, so that a device never waits for Python between two. It is the only thread that
touches the device's stream. An error that the device does not survive ends everything queued and refuses what follows.
"""

import threading
from collections import deque
from typing import Final, NamedTuple

from prefixcache_offload.gpu.device import Batch, DeviceMemory
from prefixcache_offload.gpu.errors import DeviceError, DeviceReason
from prefixcache_offload.gpu.ticket import Ticket

MAX_QUEUED: Final = 4096
"""Batches that may wait; a caller that is further ahead than this has lost sight of its copies."""

_IN_FLIGHT: Final = 8


class _Queued(NamedTuple):
    batch: Batch
    ticket: Ticket


class _Started(NamedTuple):
    ticket: Ticket
    started: object


class CopyQueue:
    """See the module. `broken` is the error after which the device was given up, or None."""

    def __init__(self, memory: DeviceMemory, name: str) -> None:
        """Start the thread; it ends with `close`."""
        self._memory = memory
        self._queued: deque[_Queued] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.broken: DeviceError | None = None
        self._thread = threading.Thread(target=self._run, name=f"copies-{name}", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Batches that wait to be started."""
        return len(self._queued)

    def submit(self, batch: Batch) -> Ticket:
        """Queue a batch. Raises DeviceError: CLOSED, BUSY, or what broke the device."""
        ticket = Ticket()
        with self._changed:
            if self.broken is not None:
                raise DeviceError(self.broken.reason, f"the device was given up: {self.broken}")
            if self._closing:
                raise DeviceError(DeviceReason.CLOSED, "the pool is closed")
            if len(self._queued) >= MAX_QUEUED:
                raise DeviceError(DeviceReason.BUSY, f"{MAX_QUEUED} batches of copies are waiting")
            self._queued.append(_Queued(batch, ticket))
            self._changed.notify()
        return ticket

    def close(self) -> None:
        """Finish what is in flight, end what waits as CLOSED, stop the thread. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        flying: deque[_Started] = deque()
        while True:
            item = self._next(wait=not flying)
            if item is not None:
                self._start(item, flying)
            if flying and (item is None or len(flying) >= _IN_FLIGHT):
                self._finish(flying.popleft())
            if item is None and not flying and self._over():
                return

    def _next(self, *, wait: bool) -> _Queued | None:
        """The next batch; None when there is none now, or when the pool is being closed."""
        with self._changed:
            while wait and not self._queued and not self._closing:
                self._changed.wait()
            if not self._queued or self._closing:
                return None
            return self._queued.popleft()

    def _over(self) -> bool:
        """Whether the thread may end; ends what still waits."""
        with self._changed:
            if not self._closing:
                return False
        self._drop(DeviceError(DeviceReason.CLOSED, "the pool was closed before these copies began"))
        return True

    def _start(self, item: _Queued, flying: deque[_Started]) -> None:
        try:
            flying.append(_Started(item.ticket, self._memory.start(item.batch)))
        except DeviceError as error:
            self._fail(item.ticket, error)

    def _finish(self, started: _Started) -> None:
        try:
            self._memory.finish(started.started)
        except DeviceError as error:
            self._fail(started.ticket, error)
        else:
            started.ticket.end(None)

    def _fail(self, ticket: Ticket, error: DeviceError) -> None:
        error = error.with_traceback(None)  # its frames hold the host pool, and the error may be kept for long
        if error.reason is DeviceReason.LOST:
            with self._changed:
                self.broken = error
        ticket.end(error)
        if self.broken is not None:
            self._drop(self.broken)

    def _drop(self, error: DeviceError) -> None:
        with self._changed:
            dropped = list(self._queued)
            self._queued.clear()
        for each in dropped:
            each.ticket.end(error)
