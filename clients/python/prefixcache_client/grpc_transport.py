"""gRPC: to a daemon on another host, and for the bytes where memory cannot be shared. The only file that imports grpc.

Rules:
1. Calls take and give serialised messages, as on the local channel, so nothing above knows the difference.
2. A channel that became unavailable is given up; the next call makes a new one. gRPC's own reconnecting keeps its
   waiting times for the whole process, longer than a request may wait.
3. A session lives by KeepAlive, sent by one thread at a third of its time to live. When the server has forgotten the
   session, or the thread cannot reach it for a whole time to live, the transport ends.
4. Order between calls is not kept, so a posted Release may be overtaken; ids make that harmless.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from prefixcache.v1 import cache_pb2, common_pb2
from prefixcache_client import transport
from prefixcache_client.errors import Failure, Refused, Unreachable
from prefixcache_client.reasons import DEADLINE, INTERNAL, reason_name

log = logging.getLogger("prefixcache_client")

_SERVICE: Final = "/prefixcache.v1.CacheService/"
_WATCH: Final = "/prefixcache.v1.AdminService/WatchEvents"
CLOSE_SESSION: Final = 200
"""Not a method of the local channel, where closing the connection says it."""
GET_STATS: Final = 201
"""Nor is this."""

_ADMIN: Final = {
    transport.PREFETCH: "/prefixcache.v1.AdminService/Prefetch",
    transport.PIN: "/prefixcache.v1.AdminService/Pin",
    transport.UNPIN: "/prefixcache.v1.AdminService/Unpin",
    GET_STATS: "/prefixcache.v1.AdminService/GetStats",
}

_NAMES: Final = {
    transport.OPEN_SESSION: "OpenSession",
    transport.OPEN_NAMESPACE: "OpenNamespace",
    transport.ACQUIRE: "Acquire",
    transport.RELEASE: "Release",
    transport.RESERVE: "Reserve",
    transport.COMMIT: "Commit",
    transport.ABORT: "Abort",
    transport.LOOKUP: "Lookup",
    transport.KEEP_ALIVE: "KeepAlive",
    CLOSE_SESSION: "CloseSession",
}
_DETAILS: Final = "grpc-status-details-bin"
_MAX_MESSAGE_BYTES: Final = 64 << 20
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
_POST_TIMEOUT_S: Final = 5.0
_GOODBYE_S: Final = 0.2

_live: "weakref.WeakSet[GrpcTransport]" = weakref.WeakSet()


class GrpcTransport:
    """A channel; see prefixcache_client.transport.Transport for what its methods promise."""

    def __init__(self, target: str) -> None:
        """`target`: "HOST:PORT" or "unix:/path". Connects at the first call."""
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._calls: dict[int, Any] = {}
        self._posted: set[Any] = set()
        self._lock = threading.RLock()
        self._actions: list[Callable[[], None]] = []
        self._ended = threading.Event()
        self.alive = True
        _live.add(self)

    def call(self, method: int, payload: bytes, timeout_s: float) -> bytes:
        """The answer to `payload`. Raises Unreachable (reason `deadline` after `timeout_s`) or Refused."""
        try:
            answer: bytes = self._callable(method)(payload, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        except ValueError as error:  # the channel was closed by another thread
            raise Unreachable("the channel has been closed", lost=True) from error
        return answer

    def post(self, method: int, payload: bytes) -> None:
        """Send `payload`; its answer is thrown away. Raises Unreachable."""
        try:
            future = self._callable(method).future(payload, timeout=_POST_TIMEOUT_S)
        except ValueError as error:
            raise Unreachable("the channel has been closed", lost=True) from error
        # A call whose object is dropped is cancelled by grpc, so it is kept until it is over.
        self._posted.add(future)
        future.add_done_callback(self._posted.discard)

    def read_blocks(self, payload: bytes, timeout_s: float) -> Iterator[bytes]:
        """See BlockStreams. Raises Unreachable or Refused from the iterator."""
        try:
            yield from self._channel.unary_stream(_SERVICE + "ReadBlocks", bytes, bytes)(payload, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        except ValueError as error:
            raise Unreachable("the channel has been closed", lost=True) from error

    def arrivals(self, payload: bytes, timeout_s: float) -> Iterator[bytes]:
        """See Transport. Raises Unreachable or Refused from the iterator."""
        try:
            yield from self._channel.unary_stream(_SERVICE + "Arrivals", bytes, bytes)(payload, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        except ValueError as error:
            raise Unreachable("the channel has been closed", lost=True) from error

    def watch_events(self, payload: bytes) -> Iterator[bytes]:
        """See watching.EventSource."""
        try:
            yield from self._channel.unary_stream(_WATCH, bytes, bytes)(payload)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        except ValueError as error:
            raise Unreachable("the channel has been closed", lost=True) from error

    def write_blocks(self, payloads: Iterable[bytes], timeout_s: float) -> bytes:
        """See BlockStreams. Raises Unreachable or Refused."""
        try:
            stream = self._channel.stream_unary(_SERVICE + "WriteBlocks", bytes, bytes)
            answer: bytes = stream(iter(payloads), timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        except ValueError as error:
            raise Unreachable("the channel has been closed", lost=True) from error
        return answer

    def on_lost(self, action: Callable[[], None]) -> None:
        """Have `action` called once when the channel is given up; at once if it is."""
        with self._lock:
            if self.alive:
                self._actions.append(action)
                return
        action()

    def keep_alive(self, session_id: bytes, ttl_s: float) -> None:
        """Keep the session alive until the transport ends. Raises Unreachable when there is no thread to do it."""
        thread = threading.Thread(
            target=self._keep_alive, args=(session_id, ttl_s), name="prefixcache-keepalive", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            self.close()
            raise Unreachable(f"no thread to keep the session alive: {error}", lost=True) from error

    def close(self) -> None:
        """Give the channel up; calls still waiting end as Unreachable."""
        with self._lock:
            if not self.alive:
                return
            self.alive = False
            self._ended.set()
            actions, self._actions = self._actions, []
        for action in actions:
            action()
        self._channel.close()

    def _callable(self, method: int) -> Any:
        known = self._calls.get(method)
        if known is None:
            path = _ADMIN[method] if method in _ADMIN else _SERVICE + _NAMES[method]
            known = self._calls[method] = self._channel.unary_unary(path, bytes, bytes)
        return known

    def _keep_alive(self, session_id: bytes, ttl_s: float) -> None:
        payload = cache_pb2.KeepAliveRequest(session=session_id).SerializeToString()
        pause_s, failures = max(ttl_s / 3, 0.05), 0
        while not self._ended.wait(pause_s):
            try:
                self.call(transport.KEEP_ALIVE, payload, pause_s)
                failures = 0
            except Refused as error:
                log.info("the session has ended: %s", error)
                self.close()
            except Failure:
                failures += 1
                if failures * pause_s >= ttl_s:
                    self.close()

    def close_session(self, session_id: bytes) -> None:
        """End the session, so that its leases are free at once, if that takes no time to speak of; then close."""
        if self.alive:
            payload = cache_pb2.CloseSessionRequest(session=session_id).SerializeToString()
            try:
                self.call(CLOSE_SESSION, payload, _GOODBYE_S)
            except Failure as error:
                log.debug("the session could not be closed: %s", error)
        self.close()

    def _failure(self, error: grpc.RpcError) -> Failure:
        refused = _refusal(error)
        if refused is not None:
            return refused
        code, details = error.code(), error.details()
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unreachable("the server did not answer in time", reason=DEADLINE)
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            self.close()
            return Unreachable(f"no answer from the server: {details}", lost=True)
        return Refused(INTERNAL, f"{code.name}: {details}", code.value[0])

    def forget_in_child(self) -> None:
        """Give up the parent's channel in a forked child without touching it: grpc's threads are not here."""
        self._lock = threading.RLock()
        self.alive = False
        self._ended = threading.Event()
        self._ended.set()
        self._actions = []
        _kept_in_child.append(self._channel)


# Channels of the parent. Destroying one in a child would wait for threads that exist in the parent only.
_kept_in_child: list[Any] = []


def _refusal(error: grpc.RpcError) -> Refused | None:
    """The Error in the trailers, if the server sent one."""
    trailers: Any = error.trailing_metadata()
    for name, value in trailers or ():
        if name == _DETAILS:
            try:
                for packed in common_pb2.Status.FromString(value).details:
                    cause = common_pb2.Error.FromString(packed.value)
                    return Refused(reason_name(cause.reason) or INTERNAL, cause.message, cause.code)
            except DecodeError:
                return Refused(INTERNAL, "the server sent an error that cannot be read", 13)
    return None


def _after_fork_in_child() -> None:
    for channel in list(_live):
        channel.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
