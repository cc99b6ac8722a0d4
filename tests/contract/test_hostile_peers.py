"""Peers that send nonsense, half of something, too much, or never read: each costs itself and nobody else."""

import os
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixcache.server import local_channel
from prefixcache.server.app import Daemon
from prefixcache.server.processes import Peer
from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common
from tests.contract.conftest import Worker, new_keys, start_daemon, stop_daemon
from tests.contract.drivers import HEADER, Failure, LocalDriver
from tests.e2e.processes import wait_until

ECHO, ACQUIRE = 11, 3
END = 1
MIB = 1 << 20


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = start_daemon(tmp_path_factory.mktemp("daemon"), max_message_bytes="1MiB")
    yield daemon
    stop_daemon(daemon)


@pytest.fixture
def witness(daemon: Daemon) -> Iterator[Worker]:
    """An honest worker: whatever the others do, it must be answered."""
    driver = LocalDriver(daemon.place.local_path)
    worker = Worker(driver)
    yield worker
    assert worker.acquire(new_keys(2)).stop == common.REASON_NOT_CACHED
    driver.close()


@pytest.fixture
def peer(daemon: Daemon) -> Iterator[LocalDriver]:
    driver = LocalDriver(daemon.place.local_path)
    yield driver
    driver.close()


def greet(peer: LocalDriver) -> None:
    """Make it a session."""
    peer.call("OpenSession", pb.OpenSessionRequest(protocol_min=1, protocol_max=1))


def is_hung_up(peer: LocalDriver) -> bool:
    """Whether the server closes the connection (whatever it answered before)."""
    try:
        while True:
            peer.read_frame()
    except (EOFError, ConnectionError):
        return True


frames = st.builds(
    lambda length, call, method, flags, payload: HEADER.pack(length, call, method, flags) + payload,
    st.one_of(st.integers(0, 64), st.integers(0, 2**32 - 1)),
    st.integers(0, 2**32 - 1),
    st.integers(0, 255),
    st.one_of(st.just(END), st.integers(0, 255)),
    st.binary(max_size=64),
)


@given(greeted=st.booleans(), chunks=st.lists(st.one_of(frames, st.binary(max_size=200)), max_size=8))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_end_at_worst_their_own_connection(
    daemon: Daemon, witness: Worker, *, greeted: bool, chunks: list[bytes]
) -> None:
    peer = LocalDriver(daemon.place.local_path)
    if greeted:
        greet(peer)
    for chunk in chunks:
        try:
            peer.sock.sendall(chunk)
        except OSError:
            break
    peer.close()
    assert witness.driver.raw(ECHO, b"still here") == b"still here"  # type: ignore[attr-defined]  # it is local
    assert not daemon.owner.failure


@given(method=st.integers(1, 12), payload=st.binary(max_size=300))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_payload_in_a_good_frame_is_answered(
    peer: LocalDriver, daemon: Daemon, method: int, payload: bytes
) -> None:
    assert outcome(peer, method, payload) != common.REASON_INTERNAL
    assert not daemon.owner.failure


def outcome(peer: LocalDriver, method: int, payload: bytes) -> int:
    """The reason of a refusal, 0 for an answer."""
    try:
        peer.raw(method, payload)
    except Failure as failure:
        return failure.reason
    return 0


@pytest.mark.parametrize("pieces", [1, 3, 10, 11, 50])
def test_a_frame_may_come_in_any_pieces(peer: LocalDriver, witness: Worker, pieces: int) -> None:
    greet(peer)
    frame = HEADER.pack(40, 5, ECHO, END) + secrets.token_bytes(40)
    for start in range(0, len(frame), max(len(frame) // pieces, 1)):
        peer.sock.sendall(frame[start : start + max(len(frame) // pieces, 1)])
        assert witness.acquire(new_keys(1)).planned_blocks == 0
    assert peer.read_frame()[3] == frame[HEADER.size :]


def test_many_frames_in_one_piece_are_all_answered_in_order(peer: LocalDriver) -> None:
    greet(peer)
    peer.sock.sendall(b"".join(HEADER.pack(4, call, ECHO, END) + b"ping" for call in range(500)))
    assert [peer.read_frame()[0] for _ in range(500)] == list(range(500))


@pytest.mark.parametrize("flags", [16, 128, END | 2, END | 8])
def test_flags_that_a_client_may_not_send_end_the_connection(peer: LocalDriver, flags: int) -> None:
    greet(peer)
    peer.send_frame(1, ECHO, b"", flags)
    assert is_hung_up(peer)


def test_a_frame_over_64_mib_ends_the_connection(peer: LocalDriver) -> None:
    greet(peer)
    peer.sock.sendall(HEADER.pack((64 << 20) + 1, 1, ECHO, END))
    assert is_hung_up(peer)


def test_a_message_over_the_limit_is_skipped_not_kept(peer: LocalDriver, daemon: Daemon) -> None:
    greet(peer)
    peer.sock.sendall(HEADER.pack(32 * MIB, 7, ACQUIRE, END) + bytes(MIB))
    call, _, flags, payload = peer.read_frame()
    assert (call, flags & 2) == (7, 2)
    assert common.Error.FromString(payload).reason == common.REASON_MESSAGE_TOO_LARGE
    for _ in range(31):
        peer.sock.sendall(bytes(MIB))
    assert peer.raw(ECHO, b"next") == b"next"


def test_half_a_message_and_a_hang_up_loses_nothing(peer: LocalDriver, witness: Worker, daemon: Daemon) -> None:
    greet(peer)
    before = len(daemon.shell.sessions)
    peer.sock.sendall(HEADER.pack(1000, 1, ACQUIRE, END) + bytes(500))
    peer.close()
    assert wait_until(lambda: len(daemon.shell.sessions) == before - 1)


def test_a_peer_that_never_reads_is_paused_and_others_go_on(peer: LocalDriver, witness: Worker) -> None:
    greet(peer)
    sent = [0]

    def flood() -> None:
        frame = HEADER.pack(60_000, 1, ECHO, END) + bytes(60_000)
        peer.sock.settimeout(0.5)
        try:
            while sent[0] < 200 * MIB:
                peer.sock.sendall(frame)
                sent[0] += len(frame)
        except TimeoutError:
            return

    thread = threading.Thread(target=flood)
    thread.start()
    while thread.is_alive():
        assert witness.acquire(new_keys(1)).planned_blocks == 0
    thread.join()
    assert sent[0] < 20 * MIB, "the server stopped reading from it"


def test_a_call_before_open_session_is_refused(peer: LocalDriver) -> None:
    with pytest.raises(Failure) as refused:
        peer.call("Acquire", pb.AcquireRequest(keys=new_keys(1)))
    assert refused.value.reason == common.REASON_SESSION_UNKNOWN
    greet(peer)
    with pytest.raises(Failure) as refused:
        greet(peer)
    assert refused.value.reason == common.REASON_BAD_ARGUMENT


def test_a_session_of_somebody_else_cannot_be_named(peer: LocalDriver, witness: Worker) -> None:
    greet(peer)
    with pytest.raises(Failure) as refused:
        peer.call("KeepAlive", pb.KeepAliveRequest(session=witness.session))
    assert refused.value.reason == common.REASON_SESSION_UNKNOWN


def test_an_unknown_method_is_unimplemented(peer: LocalDriver) -> None:
    greet(peer)
    with pytest.raises(Failure) as refused:
        peer.raw(200, b"")
    assert (refused.value.code, refused.value.reason) == (12, common.REASON_UNIMPLEMENTED)


def test_descriptors_sent_to_us_are_not_kept(peer: LocalDriver, witness: Worker) -> None:
    greet(peer)
    before = len(os.listdir("/proc/self/fd"))
    reader, writer = os.pipe()
    frame = HEADER.pack(2, 9, ECHO, END) + b"ok"
    socket.send_fds(peer.sock, [frame], [reader, writer])
    os.close(reader)
    os.close(writer)
    assert peer.read_frame()[3] == b"ok"
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_silent_connection_is_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_channel, "_GREETING_S", 0.01)
    daemon = start_daemon(tmp_path)
    silent = LocalDriver(daemon.place.local_path)
    try:
        assert is_hung_up(silent)
    finally:
        silent.close()
        stop_daemon(daemon)


def test_another_users_process_is_turned_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path)
    friend = LocalDriver(daemon.place.local_path)
    greet(friend)
    try:
        monkeypatch.setattr(local_channel, "peer_of", lambda _: Peer(pid=1, uid=12345))
        refused = LocalDriver(daemon.place.local_path)
        assert is_hung_up(refused)
        refused.close()
        counted = {c.label: c.value for c in daemon.statistics.snapshot().counters if c.name == "refused_calls"}
        assert counted["connect:not_yours"] == 1
    finally:
        friend.close()
        stop_daemon(daemon)


def test_map_pool_hands_over_both_descriptors(peer: LocalDriver, daemon: Daemon) -> None:
    from prefixcache.v1 import local_pb2
    from prefixcache_offload.pool import MappedPool

    greet(peer)
    answer = peer.call("MapPool", local_pb2.MapPoolRequest(pool=0))
    assert len(peer.fds) == 2
    pool = MappedPool.attach(daemon.memory.pool.descriptor, *peer.fds, writable=True)
    assert (answer.pool.size_bytes, answer.pool.writable) == (daemon.memory.size_bytes, True)
    assert answer.pool.control_bytes == pool.control.nbytes == daemon.memory.size_bytes // 4096 * 8
    daemon.memory.pool.slot(3, 4096)[:] = 9
    assert (pool.slot(3, 4096) == 9).all()
    pool.close()
    for fd in peer.fds:
        os.close(fd)
    with pytest.raises(Failure) as refused:
        peer.call("MapPool", local_pb2.MapPoolRequest(pool=5))
    assert refused.value.reason == common.REASON_BAD_ARGUMENT


def test_running_out_of_descriptors_stops_nobody_who_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path)
    here = LocalDriver(daemon.place.local_path)
    greet(here)
    tries = [0]

    class Full:
        """A listener whose first accept fails."""

        def accept(self) -> tuple[socket.socket, object]:
            tries[0] += 1
            if tries[0] == 1:
                raise OSError(24, "too many open files")
            return real.accept()

        def fileno(self) -> int:
            return real.fileno()

        def close(self) -> None:
            real.close()

    assert daemon._local is not None
    real = daemon._local._listener
    monkeypatch.setattr(daemon._local, "_listener", Full())
    late = LocalDriver(daemon.place.local_path)
    assert here.raw(ECHO, b"x") == b"x"
    greet(late)
    assert tries[0] == 2, "it rested in between"
    here.close()
    late.close()
    stop_daemon(daemon)


def test_a_peer_that_floods_small_frames_is_read_only_as_fast_as_it_is_answered(
    peer: LocalDriver, witness: Worker, daemon: Daemon
) -> None:
    greet(peer)
    assert daemon._local is not None
    frames_sent, most = 60_000, 0
    block = b"".join(HEADER.pack(0, call % 1000, ECHO, END) for call in range(1000))

    def flood() -> None:
        for _ in range(frames_sent // 1000):
            peer.sock.sendall(block)

    def drain() -> None:
        for _ in range(frames_sent):
            peer.read_frame()

    threads = [threading.Thread(target=flood), threading.Thread(target=drain)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert witness.acquire(new_keys(1)).planned_blocks == 0
        most = max(most, daemon._local._buffered)
    assert most <= 2 * 65_536
    for thread in threads:
        thread.join()
