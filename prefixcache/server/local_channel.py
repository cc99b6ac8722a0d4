"""The local channel: a unix socket served by one thread with epoll (proto/prefixcache/v1/local.proto has its frames).

Rules:
1. The connection is the session: it is opened by the first call and ends with the connection or with its process.
2. Everything here runs on the channel's thread; others hand work over with `post`. Between two looks for calls it does
   one step of what nobody waits for (`background`).
3. A process's exit is told by its pidfd, whoever else holds the socket. Its slots come back then, not at end of file.
"""

import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from prefixcache.server import frames
from prefixcache.server.arrivals import Subscription
from prefixcache.server.background import Background
from prefixcache.server.dispatch import CallCounters, Payload, to_error
from prefixcache.server.errors import CallError
from prefixcache.server.local_connection import Connection
from prefixcache.server.processes import Process, Processes, peer_of
from prefixcache.server.sessions import Session
from prefixcache.v1 import common_pb2 as pb
from prefixcache.v1 import local_pb2 as local
from prefixcache.v1.cache_pb2 import ArrivalsResponse

log = logging.getLogger(__name__)

OpenSession = Callable[[bytes, Process], tuple[Session, bytes]]
MapPool = Callable[[bytes], tuple[bytes, tuple[int, ...]]]
Call = Callable[[Session, bytes], Payload]

_OPEN: Final = local.METHOD_OPEN_SESSION
_MAP: Final = local.METHOD_MAP_POOL
_ECHO: Final = local.METHOD_ECHO
_IDLE_S: Final = 0.25
_MOST_SUBSCRIPTIONS: Final = 4096  # as many as leases
_LOOK_AROUND_S: Final = 1.0
_GREETING_S: Final = 10.0  # a peer that has said nothing for so long is not a worker
_SPARE_CONNECTIONS: Final = 64  # connections beyond the sessions, on their way in or out
_MAX_BUFFERED: Final = 256 << 20  # unfinished frames of all peers together
_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT


@dataclass(frozen=True)
class Backend:
    """What the channel calls: `calls` by method number, and what is the channel's own business.

    `end` answers whether slots of the session still wait for the exit of its process; then `exited` will be called.
    `background`: what the channel's thread does between calls.
    """

    calls: Mapping[int, Call]
    open_session: OpenSession
    map_pool: MapPool
    end: Callable[[Session], bool]
    exited: Callable[[bytes], None]
    background: Background


@dataclass(frozen=True)
class ChannelLimits:
    """Bounds of the channel; `any_user` lets processes of other users in."""

    max_message_bytes: int
    max_sessions: int
    any_user: bool


class LocalChannel:
    """Accepts workers and answers their frames."""

    def __init__(
        self,
        listener: socket.socket,
        backend: Backend,
        counters: CallCounters,
        beat: Callable[[], None],
        limits: ChannelLimits,
    ) -> None:
        self.max_message_bytes = min(limits.max_message_bytes, frames.MAX_FRAME_BYTES)
        self._listener = listener
        self._backend = backend
        self._calls = backend.calls
        self._counters = counters
        self._beat = beat
        self._most = limits.max_sessions + _SPARE_CONNECTIONS
        self._any_user = limits.any_user
        self._connections: dict[int, Connection] = {}
        self._processes = Processes()
        self._sessions: dict[Process, set[bytes]] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._unfinished: deque[Connection] = deque()
        self._buffered = 0
        self._dead: list[Connection] = []
        self._stopping = False
        self._is_resting = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._targets: dict[int, Callable[[int], None]] = {}

    def run(self) -> None:
        """The thread's work, until `stop`. Whatever ends it, peers see the end of their connections."""
        background = self._backend.background
        background.drive(self._wake_up)
        try:
            self._loop()
        finally:
            background.leave()
            self._close()

    def _loop(self) -> None:
        self._listener.setblocking(False)
        self._register(self._listener.fileno(), self._accept)
        self._register(self._wake, self._woken)
        targets, poll, unfinished, clock = self._targets, self._epoll.poll, self._unfinished, time.monotonic
        work = self._work
        beat_at = looked_at = clock()
        has_work = True
        self._beat()
        while not self._stopping:
            for fd, mask in poll(0 if unfinished or has_work else _IDLE_S):
                target = targets.get(fd)
                if target is not None:
                    target(mask)
            # What follows is paid after every request, so the usual round only looks at the clock.
            if self._dead:
                self._bury()
            if unfinished:
                for _ in range(len(unfinished)):
                    unfinished.popleft().work()
            has_work = work()
            now = clock()
            if now - beat_at > _IDLE_S:
                beat_at = now
                self._beat()
                if now - looked_at > _LOOK_AROUND_S:
                    looked_at = now
                    self._look_around(now)

    def _work(self) -> bool:
        """One step of what nobody waits for; whether more waits."""
        try:
            return self._backend.background.step()
        except Exception as failure:  # the shell's top loop: calls get the planner's failure as answer
            log.critical("an event failed", exc_info=failure)
            return True

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` on the channel's thread. Callable from any thread."""
        self._posted.append(work)
        self._wake_up()

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Make `run` return. Callable from any thread; call `dispose` when it has returned."""
        self._stopping = True
        self._wake_up()

    def dispose(self) -> None:
        """Nothing will be posted any more."""
        os.close(self._wake)

    # What connections tell us (local_connection.Channel).

    def handle(self, connection: Connection, call: int, method: int, payload: bytes) -> None:
        """Answer one request."""
        session = connection.session
        try:
            if session is not None and method in self._calls:
                answer = self._calls[method](session, payload)
                if isinstance(answer, bytes):
                    connection.send(call, method, frames.END, answer)
                elif isinstance(answer, Subscription):
                    self._answer_often(connection, call, method, answer)
                else:
                    self._answer_later(connection, call, method, answer)
            else:
                self._special(connection, call, method, payload)
        except Exception as failure:  # noqa: BLE001  # the shell's top loop: a failed call must not end the channel
            self._fail(connection, call, method, failure)

    def refuse_size(self, connection: Connection, call: int, method: int, size: int) -> None:
        """Answer a request over the limit."""
        limit = self.max_message_bytes
        text = f"the message has {size} bytes, this server takes {limit}; send fewer keys a call"
        self._fail(connection, call, method, CallError(pb.REASON_MESSAGE_TOO_LARGE, text, limit=limit, size=size))

    def watch(self, connection: Connection, *, reading: bool, writing: bool) -> None:
        """Change what the loop waits for."""
        self._epoll.modify(connection.fd, (_IN if reading else 0) | (_OUT if writing else 0))

    def again(self, connection: Connection) -> None:
        """Give the connection another turn."""
        self._unfinished.append(connection)

    def lost(self, connection: Connection) -> None:
        """End the connection and its session; slots that its process may still write stay until that exits."""
        if connection.closed:
            return
        self._forget(connection.fd)
        del self._connections[connection.fd]
        for subscription in connection.subscriptions.values():
            subscription.stop()
        connection.close()
        self._dead.append(connection)
        process, session = connection.process, connection.session
        if session is not None and not self._backend.end(session):
            self._sessions[process].discard(session.id)
        self._processes.disconnect(process)
        if not process.alive:
            self._process_gone(process)

    def buffered(self, change: int) -> bool:
        """Count bytes of unfinished frames."""
        self._buffered += change
        return self._buffered <= _MAX_BUFFERED

    # The inside.

    def _special(self, connection: Connection, call: int, method: int, payload: bytes) -> None:
        if method == _OPEN:
            self._open(connection, call, payload)
        elif connection.session is None:
            raise CallError(pb.REASON_SESSION_UNKNOWN, "the first call on the local channel must be OpenSession")
        elif method == _ECHO:
            connection.send(call, method, frames.END, payload)
        elif method == _MAP:
            answer, fds = self._backend.map_pool(payload)
            connection.send(call, method, frames.WITH_DESCRIPTORS, answer, fds)
        else:
            raise CallError(pb.REASON_UNIMPLEMENTED, f"method {method} is not carried by the local channel; use gRPC")

    def _open(self, connection: Connection, call: int, payload: bytes) -> None:
        if connection.session is not None:
            raise CallError(pb.REASON_BAD_ARGUMENT, "this connection has its session already; open another connection")
        process = connection.process
        connection.session, answer = self._backend.open_session(payload, process)
        self._sessions.setdefault(process, set()).add(connection.session.id)
        connection.send(call, _OPEN, frames.END, answer)

    def _answer_often(self, connection: Connection, call: int, method: int, answer: Subscription) -> None:
        """Frames as news come, the last with END."""
        subscriptions = connection.subscriptions
        if len(subscriptions) >= _MOST_SUBSCRIPTIONS:
            raise CallError(pb.REASON_LIMIT, f"{_MOST_SUBSCRIPTIONS} streams of arrivals are open on this connection")
        subscriptions[call] = answer

        def send(message: ArrivalsResponse, *, last: bool) -> None:  # the subscription's form
            def work() -> None:
                if last:
                    subscriptions.pop(call, None)
                connection.send(call, method, frames.END if last else 0, message.SerializeToString())

            self.post(work)

        answer.start(send)

    def cancel(self, connection: Connection, call: int) -> None:
        """The peer wants no more answers of a call."""
        subscription = connection.subscriptions.pop(call, None)
        if subscription is not None:
            subscription.cancel()

    def _answer_later(self, connection: Connection, call: int, method: int, answer: "Future[bytes]") -> None:
        def resolved(done: "Future[bytes]") -> None:
            failure = done.exception()
            if failure is None:
                self.post(lambda: connection.send(call, method, frames.END, done.result()))
            else:
                self.post(lambda: self._fail(connection, call, method, failure))

        answer.add_done_callback(resolved)

    def _fail(self, connection: Connection, call: int, method: int, failure: BaseException) -> None:
        error = to_error(failure, _name(method), self._counters)
        connection.send(call, method, frames.ERROR, error.SerializeToString())

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError as error:
            # Gone again, or out of descriptors. The listener stays readable then, so it rests until the next look
            # around, or this loop would do nothing else.
            log.warning("a connection could not be accepted", extra={"facts": {"error": error}})
            self._forget(self._listener.fileno())
            self._is_resting = True
            return
        peer = peer_of(sock)
        if not self._any_user and peer.uid not in (os.geteuid(), 0):
            log.warning("another user's process was turned away", extra={"facts": {"uid": peer.uid, "pid": peer.pid}})
            self._counters.refuse("connect", pb.REASON_NOT_YOURS)
            sock.close()
            return
        if len(self._connections) >= self._most:
            self._counters.refuse("connect", pb.REASON_LIMIT)
            sock.close()
            return
        sock.setblocking(False)
        process, is_new = self._processes.connect(sock)
        if is_new:
            self._register(process.pidfd, lambda _: self._exited(process.pidfd))
        connection = Connection(self, sock, process, time.monotonic())
        self._connections[connection.fd] = connection
        self._register(connection.fd, connection.ready)

    def _exited(self, pidfd: int) -> None:
        """A worker's process is gone, whoever may still hold its sockets."""
        self._forget(pidfd)
        process = self._processes.exited(pidfd)
        for connection in [item for item in self._connections.values() if item.process is process]:
            self.lost(connection)
        self._process_gone(process)

    def _process_gone(self, process: Process) -> None:
        for session_id in self._sessions.pop(process, ()):
            self._backend.exited(session_id)

    def _bury(self) -> None:
        """Close sockets only between rounds: a new connection must not get a number that this round still speaks of."""
        while self._dead:
            self._dead.pop().sock.close()

    def _look_around(self, now: float) -> None:
        """Once a second: accept again, and drop connections that have said nothing."""
        if self._is_resting:
            self._is_resting = False
            self._register(self._listener.fileno(), self._accept)
        for connection in list(self._connections.values()):
            if connection.session is None and now - connection.accepted_at > _GREETING_S:
                self.lost(connection)

    def _woken(self, _: int) -> None:
        os.eventfd_read(self._wake)
        for _count in range(len(self._posted)):
            self._posted.popleft()()

    def _register(self, fd: int, target: Callable[[int], None]) -> None:
        self._targets[fd] = target
        self._epoll.register(fd, _IN)

    def _forget(self, fd: int) -> None:
        del self._targets[fd]
        self._epoll.unregister(fd)

    def _close(self) -> None:
        for connection in list(self._connections.values()):
            self.lost(connection)
        self._bury()
        self._processes.close()
        self._epoll.close()
        self._listener.close()


def _name(method: int) -> str:
    """The rpc's name of a method byte, for counters, as gRPC counts it: bounded, whatever the peer sends."""
    try:
        name = local.Method.Name(local.Method.ValueType(method)).removeprefix("METHOD_")
        return name.title().replace("_", "")
    except ValueError:
        return "unknown"
