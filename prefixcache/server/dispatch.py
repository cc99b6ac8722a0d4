"""From bytes to bytes: parses a request, finds its session, answers, counts, and turns failures into `Error` messages.

The one place that catches everything, so that a bug in one call is that call's INTERNAL and nobody else's problem.
It knows methods and messages, not sockets.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from google.protobuf.message import DecodeError

from prefixcache.server.arrivals import Subscription
from prefixcache.server.errors import CallError, reason_name
from prefixcache.server.service import Method
from prefixcache.server.sessions import Session
from prefixcache.v1 import common_pb2 as pb

log = logging.getLogger(__name__)

Payload = bytes | Future[bytes] | Subscription
_BUCKETS: Final = 40  # powers of two of microseconds: up to 12 days


class Latency:
    """A histogram of call durations with power-of-two bounds in microseconds; one writer thread at a time."""

    __slots__ = ("buckets", "sum_s")

    def __init__(self) -> None:
        self.buckets = [0] * _BUCKETS
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one call."""
        self.buckets[int(seconds * 1e6).bit_length()] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound in seconds, calls up to it)."""
        total, pairs = 0, []
        for index, count in enumerate(self.buckets):
            total += count
            pairs.append(((1 << index) / 1e6, total))
        return pairs


class CallCounters:
    """Calls by (transport, method): how long, and how many were refused and why."""

    def __init__(self) -> None:
        self.latency: dict[tuple[str, str], Latency] = {}
        self.refused: dict[tuple[str, str], int] = {}

    def latency_of(self, transport: str, method: str) -> Latency:
        """The histogram to add to."""
        return self.latency.setdefault((transport, method), Latency())

    def refuse(self, method: str, reason: int) -> None:
        """Count one refusal."""
        key = (method, reason_name(reason))
        self.refused[key] = self.refused.get(key, 0) + 1


def parse(method: Method, payload: bytes) -> Any:
    """The request message. Raises CallError (BAD_ARGUMENT) for bytes that are none."""
    try:
        return method.parse(payload)
    except DecodeError:
        raise CallError(pb.REASON_BAD_ARGUMENT, f"the request of {method.name} is not a valid message") from None


def to_error(failure: BaseException, method: str, counters: CallCounters) -> pb.Error:
    """A failed call as the client sees it; an unexpected failure is logged with its traceback, without arguments."""
    if not isinstance(failure, CallError):
        log.error("a call failed unexpectedly", extra={"facts": {"method": method}}, exc_info=failure)
        failure = CallError(pb.REASON_INTERNAL, f"{method} failed inside the server; its log says where")
    counters.refuse(method, failure.reason)
    return failure.to_proto()


def local_call(method: Method, latency: Latency) -> Callable[[Session, bytes], Payload]:
    """The method for the local channel, where the connection has the session. Raises whatever the method raises."""
    answer, from_bytes, add, clock = method.answer, method.parse, latency.add, time.perf_counter

    def call(session: Session, payload: bytes) -> Payload:
        started = clock()
        try:
            request = from_bytes(payload)
        except DecodeError:
            raise CallError(pb.REASON_BAD_ARGUMENT, f"the request of {method.name} is not a valid message") from None
        named = request.session
        if named and named != session.id:
            raise CallError(pb.REASON_SESSION_UNKNOWN, "on the local channel the session is the connection's own")
        response = answer(session, request)
        if isinstance(response, Future):
            return serialized(response)
        if isinstance(response, Subscription):
            return response
        encoded: bytes = response if type(response) is bytes else response.SerializeToString()
        add(clock() - started)
        return encoded

    return call


def to_bytes(response: Any) -> bytes:
    """The encoded message; calls on the critical path answer it encoded already."""
    encoded: bytes = response if type(response) is bytes else response.SerializeToString()
    return encoded


def serialized(source: "Future[Any]") -> "Future[bytes]":
    """A future of the encoded message."""
    target: Future[bytes] = Future()

    def done(resolved: "Future[Any]") -> None:
        failure = resolved.exception()
        if failure is not None:
            target.set_exception(failure)
        else:
            target.set_result(to_bytes(resolved.result()))

    source.add_done_callback(done)
    return target
