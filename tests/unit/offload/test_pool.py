"""Pools between processes: what is shared, what is refused, and what survives what."""

import ctypes
import fcntl
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from prefixcache_offload import memfd
from prefixcache_offload.export import PoolDescriptor, close_all, receive_descriptors, send_descriptors
from prefixcache_offload.pool import HostPool, MappedPool

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = HostPool.create(7, 4 * MIB, MIB)
    yield made
    made.close()


def attach(pool: HostPool, *, writable: bool) -> MappedPool:
    return MappedPool.attach(pool.descriptor, *pool.export_fds(), writable=writable)


def test_pool_has_exactly_its_size_and_private_mode(pool: HostPool) -> None:
    status = os.fstat(pool.export_fds()[0])
    assert status.st_size == 4 * MIB
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks == 0, "a fresh pool must not cost memory"


def test_size_is_sealed(pool: HostPool) -> None:
    for fd in pool.export_fds():
        for size in (0, 8 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            memfd.add_seals(fd, memfd.Seal.WRITE)


def test_worker_writes_are_seen_by_the_daemon(pool: HostPool) -> None:
    worker = attach(pool, writable=True)
    worker.slot(256, 4096)[:] = 9
    assert (pool.slot(256, 4096) == 9).all()
    assert pool.data.sum() == 9 * 4096


@pytest.mark.parametrize(("slot", "size"), [(-1, 1), (1024, 1), (1023, 4097), (0, 4 * MIB + 1), (0, -1)])
def test_slots_outside_the_pool_are_refused(pool: HostPool, slot: int, size: int) -> None:
    with pytest.raises(IndexError):
        pool.slot(slot, size)


def test_generations_are_compared_slot_by_slot(pool: HostPool) -> None:
    pool.set_generations([0, 5, 1023], [11, 12, 2**64 - 1])
    worker = attach(pool, writable=False)
    assert worker.read_generations([5, 1, 1023]).tolist() == [12, 0, 2**64 - 1]
    expected = worker.read_generations([0, 5])
    pool.set_generations([5], [13])
    assert worker.check_generations([0, 5], expected).tolist() == [True, False]
    with pytest.raises(IndexError):
        worker.read_generations([1024])


def test_control_page_stays_sparse() -> None:
    pool = HostPool.create(0, 1 << 32, 64 * MIB)
    pool.set_generations([0, 2**20 - 1], [1, 1])
    assert os.fstat(pool.export_fds()[1]).st_blocks * 512 <= 4 * 4096
    pool.close()


def test_worker_cannot_write_generations(pool: HostPool) -> None:
    worker = attach(pool, writable=True)
    with pytest.raises(ValueError, match="read-only"):
        worker.control[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(pool.export_fds()[1], 4096, access=mmap.ACCESS_WRITE)


def test_read_only_pool_cannot_be_mapped_writable_even_through_proc() -> None:
    pool = HostPool.create(1, MIB, MIB, writable=False)
    fd = pool.export_fds()[0]
    worker = attach(pool, writable=False)
    pool.data[:3] = 5
    assert worker.data[:4].tolist() == [5, 5, 5, 0]
    with pytest.raises(ValueError, match="may only be read"):
        attach(pool, writable=True)
    reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(reopened, MIB, access=mmap.ACCESS_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(reopened, b"x", 0)
    punch_hole_keeping_size = 3
    assert ctypes.CDLL(None).fallocate(reopened, punch_hole_keeping_size, ctypes.c_long(0), ctypes.c_long(4096)) == -1
    assert pool.data[0] == 5
    os.close(reopened)
    pool.close()


def test_views_for_users_can_never_be_made_writable(pool: HostPool) -> None:
    view = attach(pool, writable=True).slot_read_only(0, 4096)
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.setflags(write=True)


def test_arrays_outlive_the_pool_and_the_mapping(pool: HostPool) -> None:
    pool.slot(3, 4096)[:] = 77
    worker = attach(pool, writable=False)
    kept, user = worker.slot(3, 4096), worker.slot_read_only(3, 4096)
    mine = pool.slot(3, 4096)
    worker.close()
    pool.close()
    worker.close()
    gc.collect()
    assert kept.sum() == user.sum() == mine.sum() == 77 * 4096
    with pytest.raises(ValueError, match="closed"):
        worker.slot(3, 4096)
    with pytest.raises(ValueError, match="closed"):
        pool.export_fds()


def test_memory_goes_with_the_last_array(pool: HostPool) -> None:
    worker = attach(pool, writable=False)
    address = worker.mapping.address
    kept = worker.slot_read_only(0, 4096)
    assert not worker.mapping.close()
    assert is_mapped(address)
    del kept
    gc.collect()
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        ranges = (line.split(" ", 1)[0].split("-") for line in maps)
        return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def test_a_lying_peer_is_refused_before_mapping(pool: HostPool) -> None:
    good, control = pool.export_fds()
    unsealed = os.memfd_create("lie", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4 * MIB)
    shrinkable = os.memfd_create("lie", os.MFD_ALLOW_SEALING)
    os.ftruncate(shrinkable, 4 * MIB)
    memfd.add_seals(shrinkable, memfd.Seal.GROW)
    short = memfd.create("short", 2 * MIB)
    read_end, write_end = os.pipe()
    for bad in (unsealed, shrinkable, short, read_end, control):
        with pytest.raises(memfd.BadDescriptor):
            MappedPool.attach(pool.descriptor, bad, control, writable=False)
    for bad in (unsealed, short, good):
        with pytest.raises(memfd.BadDescriptor):
            MappedPool.attach(pool.descriptor, good, bad, writable=False)
    close_all([unsealed, shrinkable, short, read_end, write_end])
    with pytest.raises(memfd.BadDescriptor):
        MappedPool.attach(pool.descriptor, unsealed, control, writable=False)


def test_an_unsealed_pool_needs_consent() -> None:
    descriptor = PoolDescriptor(1, "host", MIB, MIB, writable=True, sealed=False)
    fd = os.memfd_create("warm")
    os.ftruncate(fd, MIB)
    pool = HostPool.over(descriptor, fd)
    with pytest.raises(memfd.BadDescriptor):
        attach(pool, writable=True)
    worker = MappedPool.attach(descriptor, *pool.export_fds(), writable=True, accept_unsealed=True)
    worker.slot(0, 1)[0] = 4
    assert pool.data[0] == 4
    pool.close()


@pytest.mark.parametrize(
    ("size", "slab"), [(0, 4096), (4097, 4096), (4096, 0), (4096, 100), (-4096, 4096), (2**45, 4096)]
)
def test_impossible_sizes_are_refused(size: int, slab: int) -> None:
    with pytest.raises(ValueError, match="size"):
        HostPool.create(0, size, slab)


WORKER = """
import os, socket, sys
from prefixcache_offload.export import PoolDescriptor, close_all, receive_descriptors
from prefixcache_offload.pool import MappedPool
sock = socket.socket(fileno=int(sys.argv[1]))
data, fds = receive_descriptors(sock, 100)
pool = MappedPool.attach(PoolDescriptor(7, "host", 4 << 20, 1 << 20, True), *fds, writable=True)
close_all(fds)
total = int(pool.slot(1, 4096).sum())
pool.slot(2, 4096)[:] = 3
generation = int(pool.read_generations([2])[0])
sock.sendall(f"{data.decode()} {total} {generation}".encode())
sock.recv(1)
"""


def start_worker(pool: HostPool) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    ours, theirs = socket.socketpair()
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    theirs.close()
    ours.settimeout(60)
    assert send_descriptors(ours, b"hello", pool.export_fds()) == 5
    return worker, ours


def test_two_processes_share_a_pool_over_a_socket(pool: HostPool) -> None:
    pool.slot(1, 4096)[:] = 2
    pool.set_generations([2], [99])
    worker, sock = start_worker(pool)
    assert sock.recv(100) == b"hello 8192 99"
    assert (pool.slot(2, 4096) == 3).all()
    sock.close()
    assert worker.wait(60) == 0


def test_a_killed_worker_leaves_nothing(pool: HostPool) -> None:
    for fd in pool.export_fds():
        assert os.fstat(fd).st_nlink == 0, "no name anywhere, so nothing to leave behind"
    worker, sock = start_worker(pool)
    sock.recv(100)
    worker.send_signal(signal.SIGKILL)
    assert worker.wait(60) == -signal.SIGKILL
    assert (pool.slot(2, 4096) == 3).all()
    sock.close()


def test_a_forked_child_inherits_no_mapping(pool: HostPool) -> None:
    pool.data[:] = 5
    kept = pool.slot_read_only(1, 4096)
    child = os.fork()
    if child == 0:
        ok = not pool.data.any() and not kept.any()  # readable, but not the parent's
        pool.data[:] = 9
        pool.close()
        del kept
        gc.collect()
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (pool.data == 5).all()


def test_an_array_of_a_closed_pool_survives_a_fork(pool: HostPool) -> None:
    kept = pool.slot_read_only(1, 4096)
    pool.close()
    child = os.fork()
    if child == 0:
        total = int(kept.sum())
        del kept
        gc.collect()
        os._exit(0 if total == 0 and len(bytearray(1 << 24)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_received_descriptors_close_on_exec_and_are_bounded(pool: HostPool) -> None:
    left, right = socket.socketpair()
    with left, right:
        send_descriptors(left, b"x", pool.export_fds())
        _, fds = receive_descriptors(right, 10)
        assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in fds)
        close_all(fds)
        open_before = len(os.listdir("/proc/self/fd"))
        send_descriptors(left, b"x", [left.fileno()] * 65)
        with pytest.raises(OSError, match="lost"):
            receive_descriptors(right, 10)
        assert len(os.listdir("/proc/self/fd")) == open_before
        with pytest.raises(ValueError, match="at least one byte"):
            send_descriptors(left, b"", [0])
