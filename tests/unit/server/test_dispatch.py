"""Bytes to bytes; failures to errors; counts."""

from concurrent.futures import Future
from typing import Any, cast

import pytest

from prefixcache.server.dispatch import CallCounters, Latency, local_call, parse, to_error
from prefixcache.server.errors import CallError, status_details
from prefixcache.server.service import Method
from prefixcache.server.sessions import Session
from prefixcache.v1 import cache_pb2, common_pb2

KEEP_ALIVE = cache_pb2.KeepAliveRequest
ANSWER = cache_pb2.KeepAliveResponse(ttl_ms=5)


def session() -> Session:
    return Session(b"s" * 16, "", "local", 1, 1, True, 1.0, 0.0, 0.0)


def method(answer: Any) -> Method:
    return Method("KeepAlive", KEEP_ALIVE.FromString, answer)


def test_a_local_call_answers_bytes_and_counts_its_time() -> None:
    latency = Latency()
    call = local_call(method(lambda _, __: ANSWER), latency)
    assert call(session(), b"") == ANSWER.SerializeToString()
    assert sum(latency.buckets) == 1
    assert call(session(), KEEP_ALIVE(session=b"s" * 16).SerializeToString())


def test_a_late_answer_and_a_late_failure_come_through_the_future() -> None:
    source: Future[Any] = Future()
    late = cast("Future[bytes]", local_call(method(lambda _, __: source), Latency())(session(), b""))
    source.set_result(ANSWER)
    assert late.result(0) == ANSWER.SerializeToString()
    failing: Future[Any] = Future()
    late = cast("Future[bytes]", local_call(method(lambda _, __: failing), Latency())(session(), b""))
    failing.set_exception(CallError(common_pb2.REASON_LIMIT, "no"))
    with pytest.raises(CallError):
        late.result(0)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xff\xff", common_pb2.REASON_BAD_ARGUMENT),
        (KEEP_ALIVE(session=b"t" * 16).SerializeToString(), common_pb2.REASON_SESSION_UNKNOWN),
    ],
)
def test_what_is_no_request_of_this_connection(payload: bytes, reason: int) -> None:
    with pytest.raises(CallError) as refused:
        local_call(method(lambda _, __: ANSWER), Latency())(session(), payload)
    assert refused.value.reason == reason
    if reason == common_pb2.REASON_BAD_ARGUMENT:
        with pytest.raises(CallError):
            parse(method(None), payload)


def test_a_bug_is_internal_and_says_nothing_of_its_insides(caplog: pytest.LogCaptureFixture) -> None:
    counters = CallCounters()
    error = to_error(KeyError(b"secret key material"), "Acquire", counters)
    assert (error.code, error.reason) == (13, common_pb2.REASON_INTERNAL)
    assert "secret" not in error.message
    assert counters.refused == {("Acquire", "internal"): 1}


def test_an_error_is_packed_into_the_grpc_status() -> None:
    error = CallError(common_pb2.REASON_LIMIT, "too many", limit=5).to_proto()
    status = common_pb2.Status.FromString(status_details(error))
    inner = common_pb2.Error()
    assert status.details[0].Unpack(inner)
    assert inner == error
    assert (status.code, status.message, inner.metadata["limit"]) == (8, "too many", "5")


def test_latencies_fall_into_powers_of_two() -> None:
    latency = Latency()
    for seconds in (0.0, 0.9e-6, 1.5e-6, 3e-6, 100.0):
        latency.add(seconds)
    pairs = dict(latency.cumulative())
    assert (pairs[1e-6], pairs[2e-6], pairs[4e-6]) == (2, 3, 4)
    assert max(pairs.values()) == 5
    assert latency.sum_s == pytest.approx(100.0000054)
