"""A device pool and its import, on the device "cpu": the code that a CUDA device runs, but for the driver's calls."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from prefixcache_offload import memfd
from prefixcache_offload.export import HandleKind, PoolDescriptor, PoolExport
from prefixcache_offload.gpu import (
    DeviceError,
    DevicePool,
    DeviceReason,
    PoolContext,
    Ticket,
    import_device_pool,
    open_device_pool,
)
from prefixcache_offload.gpu import queue as queue_module
from prefixcache_offload.gpu.standin import StandInMemory
from prefixcache_offload.mapping import Bytes
from prefixcache_offload.pool import HostPool
from tests.unit.offload.gpu.leaks import copy_threads, memory_files_in_use
from tests.unit.offload.test_prefault import MIB

CONTEXT = PoolContext(pool_id=3, slab_bytes=MIB)
DEADLINE_S = 60


@pytest.fixture
def host() -> Iterator[HostPool]:
    made = HostPool.create(1, 4 * MIB, MIB)
    made.data[:] = np.random.default_rng(1).integers(0, 256, 4 * MIB, dtype=np.uint8)
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[DevicePool]:
    made = open_device_pool("cpu", 2 * MIB, context=CONTEXT)
    yield made
    made.close()


def bytes_of(pool: DevicePool) -> Bytes:
    export = pool.export()
    imported = import_device_pool(export, export.fds, "cpu")
    copy = np.array(imported.tensor())
    imported.close()
    return copy


def test_slots_go_in_and_come_out(host: HostPool, pool: DevicePool) -> None:
    source, device, back = [0, 300, 2, 301], [8, 0, 10, 2], [600, 602, 604, 606]
    into = pool.copy_in(host, source, device, 8000)
    assert into.wait(DEADLINE_S)
    assert (into.done(), into.error) == (True, None)
    seen = bytes_of(pool)
    for ours, theirs in zip(source, device, strict=True):
        assert np.array_equal(host.slot(ours, 8000), seen[theirs * 4096 : theirs * 4096 + 8000])
    out = pool.copy_out(host, device, back, 8000)
    assert out.wait(DEADLINE_S)
    assert out.error is None
    for ours, again in zip(source, back, strict=True):
        assert np.array_equal(host.slot(ours, 8000), host.slot(again, 8000))


def test_the_pool_says_what_it_is(pool: DevicePool) -> None:
    assert (pool.device, pool.device_uuid, pool.size_bytes, pool.broken) == ("cpu", "cpu", 2 * MIB, None)
    assert pool.descriptor == PoolDescriptor(3, "gpu", 2 * MIB, MIB, writable=False)
    export = pool.export()
    assert (export.handle, len(export.fds), export.descriptors) == (HandleKind.MEMFD, 2, 2)
    assert pool.cost.seconds == 0


def test_a_worker_sees_generations_and_writes_nothing(pool: DevicePool) -> None:
    pool.set_generations([5, 9], [11, 12])
    export = pool.export()
    worker = import_device_pool(export, export.fds, "cpu")
    expected = worker.read_generations([5, 9])
    assert expected.tolist() == [11, 12]
    pool.control[9] = 13
    assert worker.check_generations([5, 9], expected).tolist() == [True, False]
    data: Any = worker.tensor()
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        worker.control[0] = 1
    assert not worker.memory.writable
    with pytest.raises(PermissionError):
        memfd.add_seals(export.fds[0], memfd.Seal.WRITE)
    worker.close()
    worker.close()
    assert worker.closed
    with pytest.raises(ValueError, match="closed"):
        worker.tensor()


def test_a_worker_keeps_its_import_when_the_pool_goes(host: HostPool, pool: DevicePool) -> None:
    pool.copy_in(host, [3], [0], 4096).wait(DEADLINE_S)
    export = pool.export()
    worker = import_device_pool(export, export.fds, "cpu")
    pool.close()
    assert np.array_equal(worker.tensor()[:4096], host.slot(3, 4096))
    worker.close()


def test_a_lying_peer_is_refused_and_nothing_leaks(pool: DevicePool) -> None:
    export = pool.export()
    small = memfd.create("small", 8192)
    before = memory_files_in_use()
    bigger = PoolExport(PoolDescriptor(3, "gpu", 4 * MIB, MIB, writable=False), HandleKind.MEMFD)
    cases: list[tuple[PoolExport, tuple[int, ...], str, DeviceReason]] = [
        (export, (small, export.fds[1]), "cpu", DeviceReason.BAD_EXPORT),
        (export, (export.fds[0], small), "cpu", DeviceReason.BAD_EXPORT),
        (export, export.fds[:1], "cpu", DeviceReason.BAD_EXPORT),
        (bigger, export.fds, "cpu", DeviceReason.BAD_EXPORT),
        (export, export.fds, "cuda:0", DeviceReason.WRONG_DEVICE),
    ]
    for announced, fds, device, reason in cases:
        with pytest.raises(DeviceError) as refused:
            import_device_pool(announced, fds, device)
        assert refused.value.reason is reason
    assert memory_files_in_use() == before
    os.close(small)


@pytest.mark.parametrize("name", ["", "gpu", "cuda", "cuda:", "cpu:1", "cuda:-1", "cuda:x y"])
def test_names_that_mean_nothing_are_refused_with_what_would(name: str) -> None:
    with pytest.raises(DeviceError, match="cuda:0") as refused:
        open_device_pool(name, MIB, context=CONTEXT)
    assert refused.value.reason is DeviceReason.BAD_NAME


def test_sizes_are_whole_granules(host: HostPool) -> None:
    pool = open_device_pool("cpu", MIB + 5000, context=CONTEXT)
    assert pool.size_bytes == MIB + 4096
    pool.close()
    with pytest.raises(DeviceError) as refused:
        open_device_pool("cpu", 100, context=CONTEXT)
    assert refused.value.reason is DeviceReason.OUT_OF_MEMORY


def test_closing_finishes_or_ends_every_ticket_and_leaves_no_descriptor(
    host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, threads = memory_files_in_use(), copy_threads()
    gate = threading.Event()
    pool = open_device_pool("cpu", 2 * MIB, context=CONTEXT)
    copy = StandInMemory.start
    monkeypatch.setattr(StandInMemory, "start", lambda self, batch: (gate.wait(DEADLINE_S), copy(self, batch)))
    tickets = [pool.copy_in(host, [i], [i], 4096) for i in range(40)]
    told: list[str] = []
    for ticket in tickets:
        ticket.on_done(lambda each: told.append("" if each.error is None else each.error.reason))
    assert not tickets[0].wait(0.01)
    closing = threading.Thread(target=pool.close)
    closing.start()
    while_closing = pytest.raises(DeviceError)
    gate.set()
    closing.join(DEADLINE_S)
    with while_closing as refused:
        pool.copy_in(host, [0], [0], 4096)
    assert refused.value.reason is DeviceReason.CLOSED
    assert all(ticket.done() for ticket in tickets)
    assert len(told) == 40
    assert set(told) <= {"", "closed"}
    late: list[bool] = []
    tickets[0].on_done(lambda ticket: late.append(ticket.done()))
    assert late == [True]
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.export()
    assert (memory_files_in_use(), copy_threads()) == (before, threads)


def test_an_error_of_one_batch_is_its_own(host: HostPool, pool: DevicePool, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = StandInMemory.start

    def fail_once(self: StandInMemory, batch: Any) -> object:
        monkeypatch.setattr(StandInMemory, "start", copy)
        raise DeviceError(DeviceReason.OUT_OF_MEMORY, "no staging memory")

    monkeypatch.setattr(StandInMemory, "start", fail_once)
    first, second = pool.copy_in(host, [0], [0], 4096), pool.copy_in(host, [1], [1], 4096)
    assert first.wait(DEADLINE_S)
    assert second.wait(DEADLINE_S)
    assert (str(first.error), second.error, pool.broken) == ("no staging memory", None, None)


def test_a_lost_device_ends_everything_and_refuses_what_follows(
    host: HostPool, pool: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def lose(self: StandInMemory, started: object) -> None:
        gate.wait(DEADLINE_S)
        raise DeviceError(DeviceReason.LOST, "fell off the bus")

    monkeypatch.setattr(StandInMemory, "finish", lose)
    tickets = [pool.copy_in(host, [i], [i], 4096) for i in range(30)]
    gate.set()
    for ticket in tickets:
        assert ticket.wait(DEADLINE_S)
        assert ticket.error is not None
        assert ticket.error.reason is DeviceReason.LOST
    assert pool.broken is not None
    with pytest.raises(DeviceError, match="fell off the bus") as refused:
        pool.copy_in(host, [0], [0], 4096)
    assert refused.value.reason is DeviceReason.LOST


def test_a_caller_that_is_too_far_ahead_is_refused(
    host: HostPool, pool: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "MAX_QUEUED", 2)
    gate, copy = threading.Event(), StandInMemory.start
    monkeypatch.setattr(StandInMemory, "start", lambda self, batch: (gate.wait(DEADLINE_S), copy(self, batch)))
    tickets: list[Ticket] = []

    def hurry() -> None:
        while len(tickets) < 10:
            tickets.append(pool.copy_in(host, [0], [0], 4096))

    with pytest.raises(DeviceError) as refused:
        hurry()
    assert refused.value.reason is DeviceReason.BUSY
    gate.set()
    assert all(ticket.wait(DEADLINE_S) and ticket.error is None for ticket in tickets)
