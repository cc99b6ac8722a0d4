"""WatchEvents: everybody who watches, and what wakes them.

Rules: the planner only appends to the log and rings bells that are not ringing yet; whoever is slow loses events, never
time of the planner's. A watcher that takes nothing for a minute is cut off, for its place is wanted by others.
Must not know: gRPC.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prefixcache.core.commands import Published
from prefixcache.core.ids import ID_BYTES, KEY_BYTES
from prefixcache.core.state import State
from prefixcache.server.errors import CallError
from prefixcache.server.event_log import EventLog
from prefixcache.server.service import Shell
from prefixcache.server.watch import SHORT_KEY_BYTES, Source, Watch, Wish
from prefixcache.v1 import admin_pb2 as pb
from prefixcache.v1 import common_pb2 as common

_MOST_FINGERPRINTS: Final = 64
_SILENCE_S: Final = 10.0
_LEAST_SILENCE_S: Final = 0.1
_STALL_S: Final = 60.0
_LINGER_S: Final = 0.002  # a watcher that was woken waits for more, or it would wake for every event


class WatchStream:
    """One watcher's messages, for a thread of its own. `cancel` ends them from any thread."""

    def __init__(self, watch: Watch, silence_s: float, clock: Callable[[], float], over: threading.Event) -> None:
        self.watch = watch
        self.cut_off: Callable[[], object] = lambda: None  # set by the transport: ends a call whose peer takes nothing
        self._silence_s = silence_s
        self._clock = clock
        self._server_over = over
        self._bell = threading.Event()
        self._cancelled = False
        self._sending_since = 0.0  # 0: it is not sending

    def ring(self) -> None:
        """Something happened. Quick, and without exceptions."""
        if not self._bell.is_set():
            self._bell.set()

    def cancel(self) -> None:
        """The watcher has gone."""
        self._cancelled = True
        self._bell.set()

    def is_stalled(self) -> bool:
        """Whether its last message has been on its way for too long."""
        since = self._sending_since
        return since > 0 and self._clock() - since > _STALL_S

    def __iter__(self) -> Iterator[pb.WatchEventsResponse]:
        messages = self.watch.messages()
        said_at = self._clock()
        try:
            for message in messages:
                if self._cancelled:
                    return
                if message is None:
                    message = self._wait(said_at)
                if self._server_over.is_set():
                    raise CallError(common.REASON_DRAINING, "the server is ending; watch again when it is back")
                if message is not None:
                    self._sending_since = self._clock()
                    yield message
                    self._sending_since, said_at = 0.0, self._clock()
        finally:
            messages.close()  # type: ignore[attr-defined]  # it is a generator

    def _wait(self, said_at: float) -> pb.WatchEventsResponse | None:
        """Until the bell rings, or for as long as one may be silent: then a sign of life."""
        if not self._bell.wait(max(said_at + self._silence_s - self._clock(), 0.0)):
            return self.watch.keepalive()
        self._server_over.wait(_LINGER_S)
        self._bell.clear()
        return None


class Watchers:
    """All streams of WatchEvents. `orders` is for the owner's table."""

    def __init__(self, shell: Shell, state: State) -> None:
        config = shell.config
        self._shell = shell
        self._most = config.max_watchers
        self._key_bytes = KEY_BYTES if config.watch_full_keys else SHORT_KEY_BYTES
        self._streams: list[WatchStream] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.log = EventLog(config.event_log_bytes)
        self._source = Source(self.log, state, shell.owner.lock, shell.incarnation, self._label_of)
        self.orders: dict[type, Callable[..., None]] = {Published: self._happened}
        self.stalled = 0

    def watch(self, _: None, request: pb.WatchEventsRequest) -> "Iterable[pb.WatchEventsResponse]":
        """A new watcher's stream. Raises CallError."""
        wish = self._wish(request)
        silence_s = request.keepalive_ms / 1000 or _SILENCE_S
        if silence_s < _LEAST_SILENCE_S:
            raise CallError(common.REASON_BAD_ARGUMENT, f"keepalive_ms must be at least {_LEAST_SILENCE_S * 1000:g}")
        if self._over.is_set():
            raise CallError(common.REASON_DRAINING, "the server is ending; watch again when it is back")
        stream = WatchStream(Watch(self._source, wish), silence_s, self._shell.owner.clock, self._over)
        with self._lock:
            if len(self._streams) >= self._most:
                text = f"{self._most} watchers are there; end one, or raise max_watchers"
                raise CallError(common.REASON_LIMIT, text, limit=self._most)
            self._streams = [*self._streams, stream]
        return stream

    def left(self, stream: WatchStream) -> None:
        """The stream has ended. Can be repeated."""
        with self._lock:
            self._streams = [each for each in self._streams if each is not stream]

    def look(self) -> None:
        """A chore of the timer: who stalls is cut off."""
        streams = self._streams
        if not streams:
            return
        with self._shell.owner.lock:
            for stream in streams:
                stream.watch.look()
        for stream in streams:
            if stream.is_stalled():
                self.stalled += 1
                stream.cancel()
                stream.cut_off()
                self.left(stream)

    def close(self) -> None:
        """The server ends: all streams do."""
        self._over.set()
        for stream in self._streams:
            stream.ring()

    def counters(self) -> list[pb.Counter]:
        """For GetStats."""
        source = self._source
        told = {
            "watchers": len(self._streams),
            "events": self.log.last,
            "watch_snapshots": source.snapshots,
            "watch_resumed": source.resumed,
            "watch_gaps": source.gaps,
            "watch_events_lost": source.lost,
            "watchers_stalled": self.stalled,
        }
        return [pb.Counter(name=name, value=value) for name, value in told.items()]

    def _happened(self, event: Published) -> None:
        self.log.append(event)
        for stream in self._streams:
            stream.ring()

    def _wish(self, request: pb.WatchEventsRequest) -> Wish:
        if len(request.fingerprints) > _MOST_FINGERPRINTS:
            text = f"{len(request.fingerprints)} namespaces; name {_MOST_FINGERPRINTS} at most, or none to watch all"
            raise CallError(common.REASON_LIMIT, text, limit=_MOST_FINGERPRINTS)
        if any(len(each) != KEY_BYTES for each in request.fingerprints):
            raise CallError(common.REASON_BAD_ARGUMENT, f"a fingerprint has {KEY_BYTES} bytes")
        if request.incarnation and len(request.incarnation) != ID_BYTES:
            raise CallError(common.REASON_BAD_ARGUMENT, f"an incarnation has {ID_BYTES} bytes")
        return Wish(
            request.snapshot,
            frozenset(request.fingerprints),
            request.incarnation,
            request.after,
            self._key_bytes if request.fingerprints else SHORT_KEY_BYTES,
        )

    def _label_of(self, fingerprint: bytes) -> str:
        namespace = self._shell.by_fingerprint.get(fingerprint)
        return namespace.label if namespace is not None else ""
