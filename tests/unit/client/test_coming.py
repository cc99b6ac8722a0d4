"""Waiting for blocks of a slower tier: what comes is copied as it comes, and waiting always ends with a reason."""

import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common
from prefixcache_client import framing
from prefixcache_client.coming import Coming
from prefixcache_client.errors import Failure, Refused, Unreachable
from prefixcache_client.local import LocalTransport
from prefixcache_client.namespace import Namespace
from prefixcache_client.transport import ARRIVALS, ECHO

LEASE = b"l" * 16


def part_run(first: int, count: int) -> common.PartRun:
    return common.PartRun(part=0, pool=0, first_block=first, slots=bytes(4 * count), generations=bytes(8 * count))


def message(ready: int, *runs: common.PartRun, stop: int = 0) -> bytes:
    answer = pb.ArrivalsResponse(ready_blocks=ready, runs=runs, stop=common.Reason.ValueType(stop))
    return answer.SerializeToString()


def coming(told: Iterable[bytes], blocks: range = range(2, 6), timeout_s: float = 30.0) -> Coming:
    transport = SimpleNamespace(arrivals=lambda payload, limit_s: iter(told))
    session: Any = SimpleNamespace(transport=transport, session_id=b"s" * 16)
    return Coming(session, LEASE, blocks, time.monotonic() + timeout_s)


def test_it_waits_until_something_came(ns: Namespace) -> None:
    waiting = coming([message(2), message(4, part_run(2, 2)), message(6, part_run(4, 2))])
    (run,) = waiting.wait(ns.form)
    assert run.blocks.tolist() == [2, 3]
    (run,) = waiting.wait(ns.form)
    assert run.blocks.tolist() == [4, 5]
    assert waiting.wait(ns.form) == []
    assert (len(waiting.blocks), waiting.reason) == (0, "")


def test_a_plan_that_is_cut_short_ends_with_the_servers_reason(ns: Namespace) -> None:
    waiting = coming([message(3, part_run(2, 1)), message(3, stop=common.REASON_CHECKSUM_MISMATCH)])
    assert len(waiting.wait(ns.form)) == 1
    assert waiting.wait(ns.form) == []
    assert waiting.reason == "checksum_mismatch"
    assert waiting.blocks == range(3, 6)


def test_the_deadline_ends_it(ns: Namespace) -> None:
    waiting = coming([message(6, part_run(2, 4))], timeout_s=-1.0)
    assert waiting.wait(ns.form) == []
    assert waiting.reason == "deadline"


def test_a_stream_that_breaks_off_ends_it(ns: Namespace) -> None:
    def broken() -> Iterator[bytes]:
        yield message(3, part_run(2, 1))
        raise Unreachable("gone", lost=True)

    waiting = coming(broken())
    assert len(waiting.wait(ns.form)) == 1
    assert waiting.wait(ns.form) == []
    assert waiting.reason == "server_unavailable"


def test_a_stream_without_an_end_is_an_end(ns: Namespace) -> None:
    waiting = coming([])
    assert waiting.wait(ns.form) == []
    assert waiting.reason == "deadline"


def test_a_server_that_takes_back_what_was_ready_is_not_believed(ns: Namespace) -> None:
    waiting = coming([message(1)])
    assert waiting.wait(ns.form) == []
    assert waiting.reason == "internal"


def test_slots_that_do_not_fit_what_came_are_refused(ns: Namespace) -> None:
    with pytest.raises(Failure):
        coming([message(4, part_run(2, 1))]).wait(ns.form)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[tuple[LocalTransport, socket.socket]]:
    """A transport and the server's end of its connection."""
    path = str(tmp_path / "peer")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        transport = LocalTransport(path, 5.0)
        server, _ = listener.accept()
    with server:
        yield transport, server
        transport.close()


def read_frame(server: socket.socket) -> framing.Frame:
    buffer = framing.FrameBuffer()
    while (frame := buffer.take()) is None:
        buffer.feed(server.recv(1 << 16))
    return frame


def test_answers_of_a_stream_and_of_calls_find_their_owners(peers: tuple[LocalTransport, socket.socket]) -> None:
    transport, server = peers
    stream = transport.arrivals(b"lease", 30.0)

    def serve() -> None:
        number, method, _, payload = read_frame(server)
        assert (method, payload) == (ARRIVALS, b"lease")
        server.sendall(framing.pack_frame(number, ARRIVALS, b"1", 0))
        call, method, _, said = read_frame(server)
        news = framing.pack_frame(number, ARRIVALS, b"2", 0) + framing.pack_frame(number, ARRIVALS, b"3", framing.END)
        server.sendall(news + framing.pack_frame(call, method, said))

    thread = threading.Thread(target=serve)
    thread.start()
    assert next(stream) == b"1"
    assert transport.call(ECHO, b"between", 30.0) == b"between"  # takes two answers of the stream in, for later
    assert list(stream) == [b"2", b"3"]
    thread.join()


def test_a_stream_that_is_left_is_called_off(peers: tuple[LocalTransport, socket.socket]) -> None:
    transport, server = peers
    stream = transport.arrivals(b"lease", 30.0)
    thread = threading.Thread(
        target=lambda: server.sendall(framing.pack_frame(read_frame(server)[0], ARRIVALS, b"1", 0))
    )
    thread.start()
    assert next(stream) == b"1"
    thread.join()
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    _, method, flags, _ = read_frame(server)
    assert (method, flags) == (ARRIVALS, framing.CANCEL)


def test_a_refused_stream_raises(peers: tuple[LocalTransport, socket.socket]) -> None:
    transport, server = peers
    error = common.Error(code=5, reason=common.REASON_LEASE_UNKNOWN, message="gone").SerializeToString()
    thread = threading.Thread(
        target=lambda: server.sendall(
            framing.pack_frame(read_frame(server)[0], ARRIVALS, error, framing.ERROR | framing.END)
        )
    )
    thread.start()
    with pytest.raises(Refused, match="gone"):
        next(transport.arrivals(b"lease", 30.0))
    thread.join()


def test_a_stream_that_stays_silent_ends_at_its_deadline(peers: tuple[LocalTransport, socket.socket]) -> None:
    transport, _ = peers
    with pytest.raises(Unreachable) as late:
        next(transport.arrivals(b"lease", 0.05))
    assert late.value.reason == "deadline"
