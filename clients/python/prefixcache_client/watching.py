"""A watch: what comes and goes in the daemon, as an iterator that outlives connections and restarts.

Rules:
1. A lost connection, a silent or restarted daemon, a full one: it connects again, at first at once and then less and
   less often. It goes on where it was; where that is not possible a gap is told, and a new snapshot where one is
   wanted.
2. What it may go on from is known only while everything before was told: never in the middle of a snapshot.
3. Only a refusal that repeating cannot mend is raised.
One thread reads each connection, so that a daemon that went silent (frozen, or its network) is noticed. It reads ahead
a little: a slow user makes the daemon drop events for it, never wait.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Protocol, Self

from google.protobuf.message import DecodeError

from prefixcache.v1 import admin_pb2
from prefixcache_client.errors import Failure, Refused, Unreachable, WatchRefusedError
from prefixcache_client.events import EventKind, WatchEvent, event_of

log = logging.getLogger("prefixcache_client")

_AHEAD: Final = 256  # messages read ahead of the user
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_SILENT_BEATS: Final = 3  # signs of life that may be missing
_NEVER_MENDED: Final = frozenset({3, 7, 12, 16})  # bad argument, not allowed, not implemented, not authenticated


class EventSource(Protocol):
    """One connection that can be watched."""

    def watch_events(self, payload: bytes) -> Iterator[bytes]:
        """Serialised WatchEventsResponses. Raises Unreachable or Refused from the iterator."""

    def close(self) -> None:
        """End it, from any thread."""


class Watch:
    """Iterate over it, for ever or until `close`; use it in a `with`. One thread iterates, any may close."""

    def __init__(
        self,
        connect: Callable[[], EventSource],
        fingerprints: Callable[[], list[bytes]],
        *,
        snapshot: bool,
        keepalive_s: float,
    ) -> None:
        """`fingerprints` is asked at every connection."""
        self._connect = connect
        self._fingerprints = fingerprints
        self._snapshot = snapshot
        self._keepalive_s = keepalive_s
        self._reader: _Reader | None = None
        self._closed = threading.Event()
        self._pause_s = 0.0
        self._retry_at = 0.0
        self._incarnation = b""
        self._after = 0
        self._whole = False  # everything up to `_after` was told
        self.connections = 0
        """How often it connected, and was told something."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[WatchEvent]:
        return self

    def __next__(self) -> WatchEvent:
        while not self._closed.is_set():
            event = self.next(self._keepalive_s)
            if event is not None:
                return event
        raise StopIteration

    def next(self, timeout_s: float) -> WatchEvent | None:
        """The next event; None when none came in time, or the watch is closed. Raises WatchRefusedError."""
        deadline = time.monotonic() + timeout_s
        while not self._closed.is_set():
            now = time.monotonic()
            if self._reader is None and not self._reconnected(now, deadline):
                if time.monotonic() >= deadline:
                    return None
                continue
            event = self._read(deadline)
            if event is not None:
                return event
            if time.monotonic() >= deadline:
                return None
        return None

    @property
    def connected(self) -> bool:
        """Whether a daemon is listened to, as far as one can know."""
        reader = self._reader
        return reader is not None and reader.heard

    def renew(self) -> None:
        """Connect anew, with the namespaces as they are now; call it from the iterating thread."""
        self._whole = False
        self._drop()
        self._retry_at = 0.0

    def close(self) -> None:
        """End it; the iteration stops."""
        self._closed.set()
        self._drop()

    def _reconnected(self, now: float, deadline: float) -> bool:
        if now < self._retry_at:
            self._closed.wait(max(min(self._retry_at, deadline) - now, 0.0))
            if time.monotonic() < self._retry_at:
                return False
        request = admin_pb2.WatchEventsRequest(
            snapshot=self._snapshot,
            fingerprints=self._fingerprints(),
            incarnation=self._incarnation if self._whole else b"",
            after=self._after if self._whole else 0,
            keepalive_ms=max(int(self._keepalive_s * 1000), 1),
        )
        self._reader = _Reader(self._connect(), request.SerializeToString())
        if self._closed.is_set():
            self._drop()
        return True

    def _read(self, deadline: float) -> WatchEvent | None:
        reader = self._reader
        if reader is None:  # closed by another thread
            return None
        silence_ends = reader.heard_at + _SILENT_BEATS * self._keepalive_s
        try:
            message = reader.messages.get(timeout=max(min(deadline, silence_ends) - time.monotonic(), 0.001))
        except queue.Empty:
            if time.monotonic() >= silence_ends:
                self._lost(Unreachable("the daemon has been silent for too long"))
            return None
        if isinstance(message, Failure):
            self._lost(message)
            return None
        reader.heard_at = time.monotonic()
        if not reader.heard:
            reader.heard = True
            self.connections += 1
            self._pause_s = 0.0
        return self._understood(message)

    def _understood(self, message: admin_pb2.WatchEventsResponse) -> WatchEvent | None:
        """Notes how far everything is known; None for a sign of life."""
        event = event_of(message)
        self._after = event.sequence
        self._incarnation = message.incarnation or self._incarnation
        if event.kind in (EventKind.SNAPSHOT_BEGIN, EventKind.GAP):
            self._whole = event.kind is EventKind.GAP and not self._snapshot
        elif event.kind in (EventKind.SNAPSHOT_END, EventKind.KEEPALIVE):
            self._whole = True
        return None if event.kind is EventKind.KEEPALIVE else event

    def _lost(self, failure: Failure) -> None:
        self._drop()
        if isinstance(failure, Refused) and failure.code in _NEVER_MENDED:
            self.close()
            raise WatchRefusedError(failure.reason, str(failure))
        if not self._pause_s:
            log.info("a watch lost its daemon and connects again: %s", failure)
        self._pause_s = min(max(self._pause_s * 2, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        self._retry_at = time.monotonic() + self._pause_s

    def _drop(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


class _Reader:
    """One connection, read by a thread of its own."""

    def __init__(self, source: EventSource, payload: bytes) -> None:
        self.messages: queue.Queue[admin_pb2.WatchEventsResponse | Failure] = queue.Queue(_AHEAD)
        self.heard_at = time.monotonic()
        self.heard = False
        self._source = source
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(payload,), name="prefixcache-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The thread ends by itself, soon."""
        self._over.set()
        self._source.close()

    def _run(self, payload: bytes) -> None:
        try:
            for answer in self._source.watch_events(payload):
                self._put(admin_pb2.WatchEventsResponse.FromString(answer))
                if self._over.is_set():
                    return
            self._put(Unreachable("the daemon ended the stream", lost=True))
        except DecodeError as error:
            self._put(Unreachable(f"the daemon's message cannot be read: {error}", lost=True))
        except Failure as failure:
            self._put(failure)
        finally:
            self._source.close()

    def _put(self, message: admin_pb2.WatchEventsResponse | Failure) -> None:
        while not self._over.is_set():
            try:
                self.messages.put(message, timeout=0.5)
                return
            except queue.Full:
                continue
