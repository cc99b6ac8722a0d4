"""The local channel under threads, late answers, signals and forks."""

import contextlib
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from prefixcache.v1 import cache_pb2
from prefixcache_client import Client, ClientOptions, Namespace
from prefixcache_client import local as local_module
from prefixcache_client.errors import Refused, Unreachable
from prefixcache_client.local import LocalTransport
from prefixcache_client.transport import ECHO, OPEN_SESSION, RELEASE
from tests.unit.client.conftest import TOKENS, block_data, stored
from tests.unit.client.fake_daemon import FakeDaemon, wait_until


@pytest.fixture
def transport(daemon: FakeDaemon) -> Iterator[LocalTransport]:
    made = LocalTransport(daemon.path + ".local", 1.0)
    yield made
    made.close()


def test_threads_get_their_own_answers(transport: LocalTransport) -> None:
    def talk(number: int) -> bool:
        rng = np.random.default_rng(number)
        for _ in range(100):
            said = rng.bytes(int(rng.integers(1, 20_000)))
            if transport.call(ECHO, said, 30.0) != said:
                return False
        return True

    with ThreadPoolExecutor(12) as threads:
        assert all(threads.map(talk, range(12)))


def test_a_large_frame_comes_in_pieces(transport: LocalTransport) -> None:
    said = os.urandom(3 << 20)
    assert transport.call(ECHO, said, 30.0) == said


def test_waiting_threads_have_their_own_deadlines(transport: LocalTransport, daemon: FakeDaemon) -> None:
    daemon.faults.thaw.clear()
    limits = [0.1, 0.3, 0.2, 0.6, 0.4]

    def late(limit: float) -> float:
        began = time.monotonic()
        with pytest.raises(Unreachable) as caught:
            transport.call(ECHO, b"x", limit)
        assert caught.value.reason == "deadline"
        return time.monotonic() - began

    with ThreadPoolExecutor(len(limits)) as threads:
        took = list(threads.map(late, limits))
    for limit, seconds in zip(limits, took, strict=True):
        assert limit * 0.9 <= seconds < limit + 1.0
    daemon.faults.thaw.set()
    assert transport.call(ECHO, b"after", 10.0) == b"after", "the late answers were thrown away"


def test_the_reader_hands_over_when_it_leaves(transport: LocalTransport, daemon: FakeDaemon) -> None:
    """A thread that reads for all runs into its deadline; the others must not wait for nobody."""
    daemon.faults.thaw.clear()
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(transport.call, ECHO, b"first", 0.15)
        wait_until(transport._reading.locked)
        others = [threads.submit(transport.call, ECHO, b"%d" % i, 20.0) for i in range(3)]
        with pytest.raises(Unreachable):
            first.result()
        daemon.faults.thaw.set()
        assert [other.result(10) for other in others] == [b"0", b"1", b"2"]


def test_posted_calls_keep_their_order_and_leave_nothing_behind(transport: LocalTransport, daemon: FakeDaemon) -> None:
    transport.call(OPEN_SESSION, cache_pb2.OpenSessionRequest().SerializeToString(), 5.0)
    for number in range(200):
        transport.post(RELEASE, cache_pb2.ReleaseRequest(lease=b"%d" % number).SerializeToString())
    assert transport.call(ECHO, b"x", 5.0) == b"x"
    assert [lease for lease, _, _ in daemon.released] == [b"%d" % number for number in range(200)]
    with pytest.raises(Refused) as caught:
        transport.call(RELEASE, cache_pb2.ReleaseRequest(lease=b"y").SerializeToString(), 5.0)
    assert (caught.value.reason, caught.value.code) == ("lease_unknown", 5)


def test_end_of_file_wakes_everybody(transport: LocalTransport, daemon: FakeDaemon) -> None:
    daemon.faults.thaw.clear()
    ended = threading.Event()
    transport.on_lost(ended.set)
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(transport.call, ECHO, b"x", 20.0) for _ in range(3)]
        wait_until(lambda: len(transport._calls) == 2)
        began = time.monotonic()
        daemon.stop()
        for call in calls:
            with pytest.raises(Unreachable) as caught:
                call.result(10)
            assert caught.value.lost
    assert time.monotonic() - began < 5
    assert ended.wait(1)
    assert not transport.alive
    again = threading.Event()
    transport.on_lost(again.set)
    assert again.is_set(), "what comes late is told at once"
    daemon.start()


def test_an_idle_connection_learns_of_the_end(transport: LocalTransport, daemon: FakeDaemon) -> None:
    ended = threading.Event()
    transport.on_lost(ended.set)
    try:
        daemon.stop()
        # A second is what is promised; the tests may share two cores with a build.
        assert ended.wait(5.0)
    finally:
        daemon.start()


def test_the_descriptor_is_closed_at_the_end(transport: LocalTransport) -> None:
    transport.call(ECHO, b"x", 5.0)
    transport.close()
    wait_until(lambda: transport._sock.fileno() == -1)
    with pytest.raises(Unreachable):
        transport.call(ECHO, b"x", 5.0)
    with pytest.raises(Unreachable):
        transport.post(ECHO, b"x")


def test_a_signal_handler_that_raises(transport: LocalTransport, daemon: FakeDaemon) -> None:
    class Stop(Exception):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        daemon.faults.thaw.clear()
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGUSR1))
        timer.start()
        with pytest.raises(Stop):
            transport.call(ECHO, b"interrupted", 20.0)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
        daemon.faults.thaw.set()
    assert transport.call(ECHO, b"next", 10.0) == b"next"


def test_a_request_over_the_limit_is_not_sent(transport: LocalTransport) -> None:
    with pytest.raises(Unreachable) as caught:
        transport.call(ECHO, bytes((64 << 20) + 1), 5.0)
    assert caught.value.reason == "message_too_large"
    assert transport.call(ECHO, b"x", 5.0) == b"x"


def test_nobody_listens(tmp_path: object) -> None:
    with pytest.raises(Unreachable) as caught:
        LocalTransport(f"{tmp_path}/none", 1.0)
    assert caught.value.lost


def in_child(work: object) -> int:
    """Run `work` in a forked child; its exit code, 0 when it returned true."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 1)  # type: ignore[operator] # a callable
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_a_session_of_its_own(local_client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    data = stored(local_client, ns)
    lease = local_client.acquire(ns, TOKENS)
    opened = daemon.sessions_opened

    def child() -> bool:
        target = np.zeros_like(data)
        old = lease.copy_to(target)
        lease.release()
        with local_client.acquire(ns, TOKENS) as own:
            return not old.ok and own.copy_to(target).ok and bool((target == data).all())

    assert in_child(child) == 0
    assert daemon.sessions_opened == opened + 1
    assert lease.copy_to(np.zeros_like(data)).ok, "the parent's lease was not released by the child"
    lease.release()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_in_the_middle_of_other_threads_calls(local_client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    stored(local_client, ns)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            local_client.acquire(ns, TOKENS).release()

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        codes = [in_child(lambda: local_client.lookup(ns, TOKENS).tokens == 96) for _ in range(5)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert codes == [0] * 5


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_stores_behind_its_own_requests(local_client: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    local_client.lookup(ns, TOKENS)
    daemon.faults.thaw.clear()
    mine = local_client.store_later(ns, [0, *TOKENS], block_data(ns))
    pid = os.fork()
    if pid == 0:
        stored_blocks = local_client.store_later(ns, TOKENS, block_data(ns)).result(20).stored_blocks
        os._exit(0 if stored_blocks == 6 else 1)
    daemon.faults.thaw.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert mine.result(20).stored_blocks == 6


def test_a_posted_call_never_waits_for_a_frozen_server(transport: LocalTransport, daemon: FakeDaemon) -> None:
    daemon.faults.thaw.clear()
    began = time.monotonic()
    payload = cache_pb2.ReleaseRequest(lease=bytes(1000)).SerializeToString()
    posted = 0
    with contextlib.suppress(Unreachable):
        while posted < 100_000:
            transport.post(RELEASE, payload)
            posted += 1
    assert 10 < posted < 100_000
    assert time.monotonic() - began < 5
    assert not transport.alive, "a frame half sent ends the connection"


def test_no_descriptors_left_is_no_exception(
    ns: Namespace, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    with Client(f"unix://{daemon.path}", ClientOptions(breaker_threshold=9)) as client:
        with monkeypatch.context() as patch:
            patch.setattr(local_module.socket, "socket", refuse)
            assert client.acquire(ns, TOKENS).reason == "server_unavailable"
        assert client.acquire(ns, TOKENS).reason == "not_cached"


def test_no_threads_left_is_no_exception(ns: Namespace, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith("prefixcache-"):
            raise RuntimeError("can't start new thread")
        start(self)

    with Client(f"unix://{daemon.path}", ClientOptions(breaker_threshold=9)) as client:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert client.acquire(ns, TOKENS).reason == "server_unavailable"
            assert client.store_later(ns, TOKENS, block_data(ns)).result(1).reason == "queue_full"
        assert client.acquire(ns, TOKENS).reason == "not_cached"
