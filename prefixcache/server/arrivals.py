"""Arrivals: what comes of a lease from slower tiers, told as it comes.

Rules: the first message tells what came since the Acquire was answered, the last one that nothing more will; between
them one per arrival, or fewer where the worker is slower. Nothing is kept but how far was told. Cancelling stops loads
nobody else waits for. Must not know: transports.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from prefixcache.server import reasons
from prefixcache.server.holdings import Lease
from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common

_LOOK_S: Final = 0.5


class Send(Protocol):
    """Takes one message; `last`: it is the last one. Quick, and without exceptions."""

    def __call__(self, message: pb.ArrivalsResponse, *, last: bool) -> None: ...


class Subscription:
    """One worker's view of one lease. `start` once; then `send(message, last)` is called, in order, from any thread."""

    def __init__(self, lock: threading.RLock, lease: Lease, cancel: Callable[[], None]) -> None:
        self._lock = lock
        self._lease = lease
        self._cancel = cancel
        self._told = len(lease.acquired.runs)
        self._send: Send | None = None

    def start(self, send: Send) -> None:
        """Tell what came, now and from now on. `send` must be quick and must not raise."""
        with self._lock:
            self._send = send
            self._lease.listeners.append(self._news)
            self._news()

    def cancel(self) -> None:
        """The worker wants no more."""
        self.stop()
        self._cancel()

    def stop(self) -> None:
        """Tell nothing more."""
        with self._lock:
            self._send = None
            if self._news in self._lease.listeners:
                self._lease.listeners.remove(self._news)

    def _news(self) -> None:
        lease, send = self._lease, self._send
        if send is None:
            return
        fresh, self._told = lease.runs[self._told :], len(lease.runs)
        message = pb.ArrivalsResponse(
            ready_blocks=lease.ready_end,
            runs=[
                common.PartRun(
                    part=run.part,
                    pool=run.pool,
                    first_block=run.first_block,
                    slots=run.packed_slots,
                    generations=run.packed_generations,
                )
                for run in fresh
            ],
            stop=reasons.STOP[lease.stop],
        )
        last = lease.done
        if last:
            self.stop()
        send(message, last=last)


class Arrivals:
    """The same as an iterator, for a thread of its own."""

    def __init__(self, subscription: Subscription, most_s: float) -> None:
        self._subscription = subscription
        self._most_looks = int(most_s / _LOOK_S) + 1
        self._queue: queue.SimpleQueue[tuple[pb.ArrivalsResponse, bool] | None] = queue.SimpleQueue()

    def cancel(self) -> None:
        """Ends the iteration; called by the transport when the worker has gone or cancelled."""
        self._subscription.cancel()
        self._queue.put(None)

    def __iter__(self) -> Iterator[pb.ArrivalsResponse]:
        self._subscription.start(lambda message, *, last: self._queue.put((message, last)))
        for _ in range(self._most_looks):
            try:
                told = self._queue.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if told is None:
                return
            yield told[0]
            if told[1]:
                return
