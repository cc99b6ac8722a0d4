"""The way to the daemon: one session at a time, opened at need, opened anew when it is lost.

Rules:
1. Nothing but Unreachable and Refused leaves this file, and nothing waits beyond its deadline.
2. Ids of leases and reservations are the caller's, so a call whose connection broke is simply made again on the next
   one.
3. The circuit breaker hears of every call: an answer, also a refusal, is a success.
4. What a call needs of a session (its id, the namespace's number) is put in by the caller's `build`, once per attempt.

It must not know what a call is for.
"""

import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from prefixcache.v1 import cache_pb2
from prefixcache_client import session as sessions
from prefixcache_client.address import Address
from prefixcache_client.breaker import CircuitBreaker
from prefixcache_client.errors import Failure, Unreachable
from prefixcache_client.options import ClientOptions
from prefixcache_client.reasons import CIRCUIT_OPEN, CLIENT_CLOSED, DEADLINE, NEVER_SENT
from prefixcache_client.session import Session, parse, remaining
from prefixcache_client.stats import Counters
from prefixcache_client.transport import ABORT, RELEASE

log = logging.getLogger("prefixcache_client")

M = TypeVar("M", bound=Message)
Build = Callable[[Session, float], bytes]
"""(session, deadline) -> serialised request."""

_ATTEMPTS: Final = 3
_MAX_ABANDONED: Final = 4096
_MAX_ABORTED: Final = 256  # aborts that are told again to a new session

_live: "weakref.WeakSet[Link]" = weakref.WeakSet()


class Link:
    """See the rules above. Thread-safe; a forked child opens a session of its own."""

    def __init__(self, address: Address, options: ClientOptions, counters: Counters) -> None:
        self.address = address
        self.options = options
        self.counters = counters
        self.breaker = CircuitBreaker(options.breaker_threshold, options.breaker_open_s, options.breaker_max_open_s)
        self._held: list[Session] = []
        self._connecting = threading.Lock()
        self._abandoned: deque[tuple[Session, bytes]] = deque(maxlen=_MAX_ABANDONED)
        self._aborted: deque[tuple[bytes, bool]] = deque(maxlen=_MAX_ABORTED)
        self._closed = False
        self._told: set[str] = set()
        # Leases hold the link, so a session outlives a client that was dropped with a lease of it in use.
        weakref.finalize(self, _close_all, self._held)
        _live.add(self)

    @property
    def session(self) -> Session | None:
        """The session in use, alive or not; None before the first call."""
        return next(iter(self._held), None)

    def call(self, method: int, kind: type[M], build: Build, timeout_s: float) -> tuple[Session, M]:
        """The answer of `method` and the session that gave it. Raises Unreachable or Refused."""
        deadline = time.monotonic() + timeout_s
        session = self.session
        if session is not None and session.transport.alive and self.breaker.calm and not self._abandoned:
            # As nearly always. What follows at length below is done here in a quarter of the time.
            try:
                request = build(session, deadline)
                return session, kind.FromString(session.transport.call(method, request, deadline - time.monotonic()))
            except Failure as error:
                if not self._mended(session, error):
                    self._count(error)
                    raise
            except DecodeError:
                session.transport.close()
        return self._call_at_length(method, kind, build, deadline)

    def opened(self, timeout_s: float) -> Session:
        """The session in use, opened if there is none. Raises Unreachable or Refused as `call`."""
        session = self.session
        if session is not None and session.alive:
            return session
        deadline = time.monotonic() + timeout_s
        if not self.breaker.admit(time.monotonic()):
            self.counters.failed(CIRCUIT_OPEN)
            raise Unreachable("the server failed repeatedly and is left alone for a moment", reason=CIRCUIT_OPEN)
        try:
            session = self._connect(deadline)
        except Failure as error:
            self._count(error)
            raise
        self.breaker.success()
        return session

    def _call_at_length(self, method: int, kind: type[M], build: Build, deadline: float) -> tuple[Session, M]:
        if not self.breaker.admit(time.monotonic()):
            self.counters.failed(CIRCUIT_OPEN)
            raise Unreachable("the server failed repeatedly and is left alone for a moment", reason=CIRCUIT_OPEN)
        if self._abandoned:
            self._release_abandoned()
        try:
            session, payload = self._attempts(method, build, deadline)
            try:
                answer = parse(kind, payload)
            except Unreachable:
                session.transport.close()  # a peer that answers garbage is not asked again
                raise
        except Failure as error:
            self._count(error)
            raise
        self.breaker.success()
        return session, answer

    def _count(self, error: Failure) -> None:
        """Tell the breaker and the counters how a call failed, and the log what a person should know, once."""
        self.counters.failed(error.reason)
        if isinstance(error, Unreachable):
            if self.breaker.failure(time.monotonic()):
                log.warning("%s is left alone for a moment, everything is a miss: %s", self.address.target, error)
            return
        self.breaker.success()
        if error.reason not in self._told:
            self._told.add(error.reason)
            log.warning("%s refuses (%s, told once): %s", self.address.target, error.reason, error)

    def post(self, session: Session, method: int, payload: bytes) -> None:
        """Send without waiting, if the session still lives; a failure is nobody's concern any more."""
        if session.alive:
            try:
                session.transport.post(method, payload)
            except Failure as error:
                self.counters.failed(error.reason)

    def give_back(self, session: Session, lease: bytes) -> None:
        """Release a lease nothing of which was used, without waiting."""
        request = cache_pb2.ReleaseRequest(session=session.session_id, lease=lease)
        self.post(session, RELEASE, request.SerializeToString())

    def give_back_unseen(self, lease: bytes, failure: Failure) -> None:
        """An acquire failed, but its answer may still be under way, and with it a lease: its id is ours."""
        session = self.session
        if session is not None and failure.reason not in NEVER_SENT:
            self.give_back(session, lease)

    def abandon(self, session: Session, lease: bytes) -> None:
        """Release a lease from a destructor: it may run inside any call of this thread, so nothing is sent here."""
        self._abandoned.append((session, lease))

    def abort(self, reservation: bytes, *, shared: bool = False) -> None:
        """Say that this process writes into the reservation no more; without waiting. `shared`: nor may others, also
        where this process never asked for it.

        It is said again in the next session, for the connection that carried it may just be breaking: until the server
        hears it, or this process exits, the slots are nobody's.
        """
        self._aborted.append((reservation, shared))
        session = self.session
        if session is not None:
            self._post_abort(session, reservation, shared=shared)

    def _post_abort(self, session: Session, reservation: bytes, *, shared: bool) -> None:
        request = cache_pb2.AbortRequest(session=session.session_id, reservation=reservation, shared=shared)
        self.post(session, ABORT, request.SerializeToString())

    def close(self) -> None:
        """End the session. Later calls fail with reason `client_closed`."""
        self._closed = True
        self._release_abandoned()
        with self._connecting:
            _close_all(self._held)

    def _attempts(self, method: int, build: Build, deadline: float) -> tuple[Session, bytes]:
        attempt = 0
        while True:
            attempt += 1
            session = self.session
            if session is None or not session.alive:
                session = self._connect(deadline)
            try:
                payload = build(session, deadline)
                return session, session.transport.call(method, payload, remaining(deadline))
            except Failure as error:
                if attempt == _ATTEMPTS or not self._mended(session, error):
                    raise

    def _mended(self, session: Session, error: Failure) -> bool:
        """Whether the failure only says that the connection or the server's memory of us is gone: then try again."""
        if isinstance(error, Unreachable):
            return error.lost
        if error.reason == "session_unknown":
            session.transport.close()
            return True
        if error.reason == "namespace_unknown":
            session.forget_namespaces()
            return True
        return False

    def _connect(self, deadline: float) -> Session:
        if not self._connecting.acquire(timeout=remaining(deadline)):
            raise Unreachable("another thread is still connecting", reason=DEADLINE)
        try:
            if self._closed:
                raise Unreachable("the client is closed", reason=CLIENT_CLOSED)
            session = self.session
            if session is not None and session.alive:
                return session
            _close_all(self._held)
            session = self._open(deadline)
            self._held.append(session)
            self.counters.connected()
            while self._aborted:
                reservation, shared = self._aborted.popleft()
                self._post_abort(session, reservation, shared=shared)
            return session
        finally:
            self._connecting.release()

    def _open(self, deadline: float) -> Session:
        address, options = self.address, self.options
        if address.is_foreign:
            raise Unreachable(f"the folder of {address.socket_path} belongs to another user")
        if options.local_channel and address.local_path:
            try:
                return sessions.open_local(address, options, deadline)
            except Unreachable as error:
                if error.reason == DEADLINE or not _listens(address.socket_path, remaining(deadline)):
                    raise
        return sessions.open_grpc(address, options, deadline)

    def _release_abandoned(self) -> None:
        while True:
            try:
                session, lease = self._abandoned.popleft()
            except IndexError:
                return
            request = cache_pb2.ReleaseRequest(session=session.session_id, lease=lease)
            self.post(session, RELEASE, request.SerializeToString())

    def forget_in_child(self) -> None:
        """In a forked child: the transport has given up the parent's connection; locks may be held by nobody."""
        self._connecting = threading.Lock()
        self._abandoned.clear()
        self._aborted.clear()
        self._held.clear()
        self.breaker.reset_after_fork()
        self.counters.reset_after_fork()


def _close_all(held: list[Session]) -> None:
    while held:
        held.pop().close()


def _listens(path: str, timeout_s: float) -> bool:
    """Whether anybody listens at all: importing grpc to learn that nobody does would cost a request half a second."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(timeout_s)
            probe.connect(path)
    except OSError:
        return False
    return True


def _after_fork_in_child() -> None:
    for link in list(_live):
        link.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
