"""gRPC: a synchronous server with a thread pool, over a unix socket and, where asked for, TCP.

Handlers take and give bytes: parsing happens in `dispatch`, so that a message that is too large or none at all gets
the same `Error` here as on the local channel. Streams have a bound of their own and threads beyond those of unary
calls, so that bulk bytes never starve them.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Literal

import grpc
from grpc_reflection.v1alpha import reflection

from prefixcache.server.arrivals import Arrivals
from prefixcache.server.dispatch import CallCounters, parse, to_bytes, to_error
from prefixcache.server.errors import CallError, status_details
from prefixcache.server.service import Method, Shell
from prefixcache.server.sessions import Session
from prefixcache.server.streams import StreamCalls
from prefixcache.server.watchers import Watchers
from prefixcache.v1 import cache_pb2
from prefixcache.v1 import common_pb2 as pb

CACHE_SERVICE: Final = "prefixcache.v1.CacheService"
ADMIN_SERVICE: Final = "prefixcache.v1.AdminService"
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_LATE_S: Final = 60.0  # longest wait for bytes to be verified
# Above our own limit gRPC refuses by itself, without our reason; so it gets a higher one.
_HARD_LIMIT: Final = 4

Handler = Any  # grpc's stubs have no public name for what *_rpc_method_handler answer


class _Status(grpc.Status):
    """What a refused call ends with."""

    def __init__(self, error: pb.Error) -> None:
        self.code = _CODES[error.code]
        self.details = error.message
        self.trailing_metadata = (("grpc-status-details-bin", status_details(error)),)


class GrpcCalls:
    """Makes gRPC handlers of methods."""

    def __init__(self, shell: Shell, counters: CallCounters) -> None:
        self._shell = shell
        self._counters = counters
        self._limit = shell.config.max_message_bytes
        self._streams = threading.BoundedSemaphore(shell.config.max_streams)
        self._lock = threading.Lock()

    def unary(self, method: Method) -> Handler:
        """A handler for one request and one answer."""
        latency = self._counters.latency_of("grpc", method.name)

        def handle(payload: bytes, context: grpc.ServicerContext) -> bytes:
            started = time.perf_counter()
            with self._guard(context, method):
                request = self._request(method, payload)
                response = method.answer(self._session(method, request), request)
                if isinstance(response, Future):
                    response = response.result(_LATE_S)
                encoded = to_bytes(response)
            with self._lock:
                latency.add(time.perf_counter() - started)
            return encoded

        return grpc.unary_unary_rpc_method_handler(handle)

    def server_stream(self, method: Method) -> Handler:
        """A handler for one request and a stream of answers; `method.answer` answers an iterator."""

        def handle(payload: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._guard(context, method), self._stream():
                request = self._request(method, payload)
                answer = method.answer(self._session(method, request), request)
                if isinstance(answer, Arrivals):
                    context.add_callback(answer.cancel)
                for message in answer:
                    if not context.is_active():
                        return
                    yield message.SerializeToString()

        return grpc.unary_stream_rpc_method_handler(handle)

    def watch_events(self, method: Method, watchers: Watchers) -> Handler:
        """The stream that ends when either side does. Watchers have places, and threads, of their own."""

        def handle(payload: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._guard(context, method):
                stream = method.answer(None, self._request(method, payload))
                stream.cut_off = context.cancel
                if not context.add_callback(stream.cancel):
                    stream.cancel()
                try:
                    for message in stream:
                        yield message.SerializeToString()
                finally:
                    watchers.left(stream)

        return grpc.unary_stream_rpc_method_handler(handle)

    def write_blocks(self, calls: StreamCalls) -> Handler:
        """The one stream of requests."""
        method = Method("WriteBlocks", cache_pb2.WriteBlocksRequest.FromString, lambda _, request: request)

        def handle(payloads: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            with self._guard(context, method), self._stream():
                requests = self._requests(method, payloads)
                first = next(requests, None)
                if first is None:
                    raise CallError(pb.REASON_STREAM_TRUNCATED, "the stream ended before its first message")
                session = self._shell.sessions.require(first.session)
                written = calls.write_blocks(session, first, requests)
            return cache_pb2.WriteBlocksResponse(bytes=written).SerializeToString()

        return grpc.stream_unary_rpc_method_handler(handle)

    def _requests(self, method: Method, payloads: Iterator[bytes]) -> Iterator[Any]:
        try:
            for payload in payloads:
                yield self._request(method, payload)
        except grpc.RpcError:
            raise CallError(
                pb.REASON_STREAM_TRUNCATED, "the stream broke off; the slots are still reserved, send again"
            ) from None

    def _request(self, method: Method, payload: bytes) -> Any:
        if len(payload) > self._limit:
            raise CallError(
                pb.REASON_MESSAGE_TOO_LARGE,
                f"the message has {len(payload)} bytes, this server takes {self._limit}; send fewer keys a call",
                limit=self._limit, size=len(payload),
            )  # fmt: skip
        return parse(method, payload)

    def _session(self, method: Method, request: Any) -> Session | None:
        named: bytes | None = getattr(request, "session", None)  # admin requests have no such field
        if method.needs_session or named:
            return self._shell.sessions.require(named or b"")
        return None

    def _stream(self) -> "_Slot":
        if not self._streams.acquire(blocking=False):
            most = self._shell.config.max_streams
            raise CallError(pb.REASON_LIMIT, f"{most} streams are running; try again, or raise max_streams", limit=most)
        return _Slot(self._streams)

    def _guard(self, context: grpc.ServicerContext, method: Method) -> "_Guard":
        return _Guard(context, method.name, self._counters)


class _Guard:
    """Turns every failure inside it into the call's status: this shell's top loop."""

    def __init__(self, context: grpc.ServicerContext, method: str, counters: CallCounters) -> None:
        self._context = context
        self._method = method
        self._counters = counters

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, failure: BaseException | None, __: object) -> Literal[False]:
        if isinstance(failure, Exception):
            self._context.abort_with_status(_Status(to_error(failure, self._method, self._counters)))
        return False


class _Slot:
    """One stream's place."""

    def __init__(self, semaphore: threading.BoundedSemaphore) -> None:
        self._semaphore = semaphore

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._semaphore.release()


class GrpcServer:
    """The server and its addresses."""

    def __init__(self, threads: int, max_message_bytes: int) -> None:
        limit = max_message_bytes * _HARD_LIMIT
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="prefixcache-grpc")
        self._server = grpc.server(
            self._pool,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
            ],
        )

    @property
    def server(self) -> grpc.Server:
        """For services that register themselves (health)."""
        return self._server

    def add(self, service: str, handlers: dict[str, Handler]) -> None:
        """Serve `handlers` by rpc name."""
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    def add_reflection(self, *more: str) -> None:
        """Let tools list our services."""
        names = (CACHE_SERVICE, ADMIN_SERVICE, *more, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def listen(self, address: str) -> int:
        """Listen on `unix:PATH` or `HOST:PORT`; answers the port (1 for a unix socket). Raises OSError."""
        try:
            return self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error

    def prober(self, beat: Callable[[], None]) -> Callable[[], None]:
        """A chore that has `beat` called by a thread of the pool: no sign of life when all of them hang."""
        waiting: list[Future[None]] = []

        def probe() -> None:
            if not waiting or waiting[0].done():
                waiting[:] = [self._pool.submit(beat)]

        return probe

    def start(self) -> None:
        """Answer calls."""
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Take no new calls, give running ones `grace_s`, and end the threads."""
        self._server.stop(grace_s).wait()
        self._pool.shutdown(wait=False)
