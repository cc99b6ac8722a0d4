"""Which worker processes are alive, by pidfd.

A socket tells less than that: forked children may hold it open when the worker is dead, and a worker may close it and
still write through its mapping. So slots that a worker could write are bound to a `Process`, and come back when that
exits.

Belongs here: process identities and their pidfds. It must not know sessions or sockets' bytes. Not thread-safe: the
local channel's thread owns it.
"""

import contextlib
import os
import select
import socket
import struct
from dataclasses import dataclass
from typing import Final

_SO_PEERPIDFD: Final = getattr(socket, "SO_PEERPIDFD", 77)  # Linux 6.5; absent from the standard library so far
_UCRED: Final = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a unix socket. `pid` is 0 when it lives in another pid namespace."""

    pid: int
    uid: int


@dataclass(slots=True, eq=False)
class Process:
    """One process of a worker. `number` names it for this daemon's life, as pids are used again; `pid` is shown."""

    number: int
    pid: int
    pidfd: int
    connections: int = 0
    alive: bool = True


def peer_of(sock: socket.socket) -> Peer:
    """The credentials that the kernel noted when the peer connected."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid)


class Processes:
    """Live processes by pid, each with a pidfd that becomes readable when it exits."""

    def __init__(self) -> None:
        self._by_pid: dict[int, Process] = {}
        self._by_fd: dict[int, Process] = {}
        self._next = 1

    def connect(self, sock: socket.socket) -> tuple[Process, bool]:
        """The process behind a connection, and whether its pidfd is new (then watch it for reading).

        Without a pidfd (another pid namespace, an old kernel) the process counts as alive as long as its connection:
        its `pidfd` is -1, and the caller reports its exit at end of file.
        """
        pid = peer_of(sock).pid
        known = self._by_pid.get(pid)
        if known is not None and known.alive and not _has_exited(known.pidfd):
            known.connections += 1
            return known, False
        process = Process(self._next, pid, _open_pidfd(sock, pid), 1)
        self._next += 1
        if process.pidfd >= 0:
            self._by_pid[pid] = process
            self._by_fd[process.pidfd] = process
        return process, process.pidfd >= 0

    def exited(self, pidfd: int) -> Process:
        """The process whose pidfd became readable; it is forgotten and the pidfd closed."""
        process = self._by_fd[pidfd]
        self._forget(process)
        return process

    def disconnect(self, process: Process) -> None:
        """One connection of the process is gone. It stays watched: it may still have our memory mapped."""
        process.connections -= 1
        if process.pidfd < 0 and process.connections == 0:
            process.alive = False

    def close(self) -> None:
        """Close every pidfd."""
        for process in list(self._by_fd.values()):
            self._forget(process)

    def _forget(self, process: Process) -> None:
        process.alive = False
        self._by_fd.pop(process.pidfd, None)
        if self._by_pid.get(process.pid) is process:
            del self._by_pid[process.pid]
        os.close(process.pidfd)


def _open_pidfd(sock: socket.socket, pid: int) -> int:
    """A pidfd of the peer, race-free where the kernel can; -1 when there is none."""
    with contextlib.suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    if pid > 0:
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return -1


def _has_exited(pidfd: int) -> bool:
    """Whether the process is gone although its pidfd has not been reported yet (its pid may be in use again)."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
