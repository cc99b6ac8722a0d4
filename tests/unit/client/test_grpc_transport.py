"""gRPC: sessions kept alive, channels given up, errors with their reasons."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefixcache.v1 import cache_pb2
from prefixcache_client.errors import Refused, Unreachable
from prefixcache_client.grpc_transport import GrpcTransport
from prefixcache_client.transport import KEEP_ALIVE, LOOKUP, OPEN_SESSION, RELEASE
from tests.unit.client.fake_daemon import FakeDaemon, wait_until

HELLO = cache_pb2.OpenSessionRequest(protocol_min=1, protocol_max=1).SerializeToString()


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest, daemon: FakeDaemon) -> Iterator[GrpcTransport]:
    made = GrpcTransport(f"unix:{daemon.path}" if request.param == "unix" else f"127.0.0.1:{daemon.port}")
    yield made
    made.close()


def opened(transport: GrpcTransport) -> bytes:
    """A session's id."""
    return cache_pb2.OpenSessionResponse.FromString(transport.call(OPEN_SESSION, HELLO, 10.0)).session


def test_a_session_is_kept_alive_until_the_end(transport: GrpcTransport, daemon: FakeDaemon) -> None:
    transport.keep_alive(opened(transport), 0.15)
    wait_until(lambda: daemon.calls[KEEP_ALIVE] >= 3)
    transport.close()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "prefixcache-keepalive"])


def test_a_session_the_server_has_forgotten_ends_the_transport(transport: GrpcTransport, daemon: FakeDaemon) -> None:
    ended = threading.Event()
    transport.on_lost(ended.set)
    transport.keep_alive(opened(transport), 0.15)
    daemon.sessions.clear()
    assert ended.wait(10)
    assert not transport.alive
    again = threading.Event()
    transport.on_lost(again.set)
    assert again.is_set()
    with pytest.raises(Unreachable):
        transport.call(OPEN_SESSION, HELLO, 1.0)
    with pytest.raises(Unreachable):
        transport.post(RELEASE, b"")
    with pytest.raises(Unreachable):
        list(transport.read_blocks(b"", 1.0))
    with pytest.raises(Unreachable):
        transport.write_blocks([], 1.0)


def test_a_frozen_server_ends_the_session_after_its_time(transport: GrpcTransport, daemon: FakeDaemon) -> None:
    transport.keep_alive(opened(transport), 0.3)
    daemon.faults.thaw.clear()
    wait_until(lambda: not transport.alive)
    daemon.faults.thaw.set()


def test_errors_have_their_reason_and_code(transport: GrpcTransport) -> None:
    session = opened(transport)
    request = cache_pb2.ReleaseRequest(session=session, lease=b"x" * 16).SerializeToString()
    with pytest.raises(Refused) as caught:
        transport.call(RELEASE, request, 10.0)
    assert (caught.value.reason, caught.value.code, str(caught.value)) == ("lease_unknown", 5, "refused by the fake")
    assert transport.alive


def test_deadlines_hold(transport: GrpcTransport, daemon: FakeDaemon) -> None:
    session = opened(transport)
    daemon.faults.thaw.clear()
    began = time.monotonic()
    with pytest.raises(Unreachable) as caught:
        transport.call(LOOKUP, cache_pb2.LookupRequest(session=session).SerializeToString(), 0.2)
    assert (caught.value.reason, caught.value.lost) == ("deadline", False)
    assert 0.15 < time.monotonic() - began < 3
    daemon.faults.thaw.set()
    assert transport.alive


def test_closing_wakes_whoever_waits(transport: GrpcTransport, daemon: FakeDaemon) -> None:
    session = opened(transport)
    daemon.faults.thaw.clear()
    with ThreadPoolExecutor(1) as threads:
        request = cache_pb2.LookupRequest(session=session).SerializeToString()
        call = threads.submit(transport.call, LOOKUP, request, 60.0)
        wait_until(call.running)
        transport.close()
        with pytest.raises(Unreachable):
            call.result(10)
    daemon.faults.thaw.set()


def test_posted_calls_arrive_although_nobody_waits(transport: GrpcTransport, daemon: FakeDaemon) -> None:
    session = opened(transport)
    for number in range(20):
        transport.post(RELEASE, cache_pb2.ReleaseRequest(session=session, lease=b"%d" % number).SerializeToString())
    wait_until(lambda: len(daemon.released) == 20)
    wait_until(lambda: not transport._posted)


def test_a_server_that_is_gone_is_lost_at_once(transport: GrpcTransport, daemon: FakeDaemon) -> None:
    opened(transport)
    daemon.stop()
    try:
        with pytest.raises(Unreachable) as caught:
            transport.call(OPEN_SESSION, HELLO, 5.0)
        assert caught.value.lost
        assert not transport.alive
    finally:
        daemon.start()


def test_goodbye_ends_the_session(transport: GrpcTransport, daemon: FakeDaemon) -> None:
    transport.close_session(opened(transport))
    assert daemon.calls[200] == 1
    assert not transport.alive
    transport.close_session(b"")
    assert daemon.calls[200] == 1
