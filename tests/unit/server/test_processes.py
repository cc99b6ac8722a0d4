"""Processes behind sockets, watched by pidfd."""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from prefixcache.server.processes import Processes, peer_of


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def is_readable(fd: int, timeout_s: float) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])


def test_one_process_has_one_pidfd_for_all_its_connections(
    processes: Processes, pair: tuple[socket.socket, socket.socket]
) -> None:
    first, is_new = processes.connect(pair[0])
    again, is_new_again = processes.connect(pair[1])
    assert (first.pid, peer_of(pair[0]).uid) == (os.getpid(), os.geteuid())
    assert first is again
    assert (is_new, is_new_again) == (True, False)
    processes.disconnect(first)
    processes.disconnect(first)
    assert first.alive, "it may still have the pool mapped"
    assert not is_readable(first.pidfd, 0)


def test_the_pidfd_tells_of_an_exit_although_the_socket_stays_open(processes: Processes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0prefixcache-test-{os.getpid()}")
        listener.listen()
        program = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()"
        child = subprocess.Popen(
            [sys.executable, "-c", program.replace("sys.argv[1]", repr(listener.getsockname()))], stdin=subprocess.PIPE
        )
        ours, _ = listener.accept()
        with ours:
            process, _ = processes.connect(ours)
            assert process.pid == child.pid
            assert child.stdin is not None
            child.stdin.close()
            assert is_readable(process.pidfd, 20)
            assert processes.exited(process.pidfd) is process
            assert not process.alive
            child.wait()


def test_without_a_pidfd_the_last_connection_decides(
    processes: Processes, pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixcache.server.processes._open_pidfd", lambda *_: -1)
    process, is_new = processes.connect(pair[0])
    assert not is_new
    processes.disconnect(process)
    assert not process.alive
