"""Faulting in the background: complete, in order, stoppable at once, and never past the memory there is."""

import ctypes
import errno
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from prefixcache_offload import prefault
from prefixcache_offload.pool import HostPool, MappedPool
from prefixcache_offload.prefault import Prefault, PrefaultOptions, PrefaultState
from prefixcache_offload.units import chunk_ranges

MIB = 1 << 20
DEADLINE_S = 60


class Listener:
    """Records what a prefault reports."""

    def __init__(self) -> None:
        self.ready: list[int] = []
        self.errors: list[OSError] = []
        self.first = threading.Event()

    def on_ready(self, ready_bytes: int) -> None:
        self.ready.append(ready_bytes)
        self.first.set()

    def start(self, pool: HostPool, options: PrefaultOptions) -> Prefault:
        return Prefault(pool.mapping, pool.descriptor.slab_bytes, self.on_ready, self.errors.append, options)


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = HostPool.create(1, 24 * MIB, 3 * MIB)
    yield made
    made.close()


def resident_bytes(pool: HostPool) -> int:
    return os.fstat(pool.export_fds()[0]).st_blocks * 512


@pytest.mark.parametrize("threads", [1, 3, 50])
def test_everything_becomes_resident_and_ready_in_order(pool: HostPool, threads: int) -> None:
    listener = Listener()
    pool.data[5 * MIB] = 7
    running = listener.start(pool, PrefaultOptions(threads=threads, chunk_bytes=7 * MIB))
    assert running.wait(DEADLINE_S) is PrefaultState.DONE
    running.stop()
    assert resident_bytes(pool) == 24 * MIB
    assert listener.ready == sorted(set(listener.ready))
    assert set(listener.ready) <= {6 * MIB, 12 * MIB, 18 * MIB, 24 * MIB}, "chunks end on slab boundaries"
    assert listener.ready[-1] == running.ready_bytes == 24 * MIB
    assert not listener.errors
    assert (int(pool.data.sum()), pool.data[5 * MIB]) == (7, 7), "contents stay"


def test_it_stops_between_chunks_and_keeps_what_is_ready(pool: HostPool) -> None:
    listener = Listener()
    reached, go_on = threading.Event(), threading.Event()

    def prepare(start: int, end: int) -> None:
        if start == 6 * MIB:
            reached.set()
            assert go_on.wait(DEADLINE_S)

    running = listener.start(pool, PrefaultOptions(threads=1, chunk_bytes=6 * MIB, prepare=prepare))
    assert reached.wait(DEADLINE_S)
    stopper = threading.Thread(target=running.stop)
    stopper.start()
    assert running._stopping.wait(DEADLINE_S)
    go_on.set()
    stopper.join(DEADLINE_S)
    assert running.wait(DEADLINE_S) is PrefaultState.STOPPED
    assert listener.ready == [6 * MIB, 12 * MIB]
    assert resident_bytes(pool) == 12 * MIB
    running.stop()


def test_it_stops_within_a_step_of_a_chunk(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()
    steps: list[int] = []
    first_step, go_on = threading.Event(), threading.Event()

    def slow(mapping: object, start: int, end: int) -> None:
        steps.append(end - start)
        first_step.set()
        assert go_on.wait(DEADLINE_S)

    monkeypatch.setattr(prefault, "populate", slow)
    running = listener.start(pool, PrefaultOptions(threads=1, chunk_bytes=24 * MIB))
    assert first_step.wait(DEADLINE_S)
    stopper = threading.Thread(target=running.stop)
    stopper.start()
    assert running._stopping.wait(DEADLINE_S)
    go_on.set()
    stopper.join(DEADLINE_S)
    assert steps == [4 * MIB]
    assert (running.state, listener.ready) == (PrefaultState.STOPPED, [])


def test_too_little_memory_is_reported_once_and_nothing_more_is_touched(pool: HostPool) -> None:
    listener = Listener()
    answers = iter([100 * MIB, 100 * MIB])
    options = PrefaultOptions(
        threads=2, chunk_bytes=6 * MIB, reserve_bytes=10 * MIB, available=lambda: next(answers, 15 * MIB)
    )
    running = listener.start(pool, options)
    assert running.wait(DEADLINE_S) is PrefaultState.FAILED
    running.stop()
    assert [error.errno for error in listener.errors] == [errno.ENOMEM]
    assert resident_bytes(pool) <= 12 * MIB
    assert running.ready_bytes in (0, 6 * MIB, 12 * MIB)


def test_a_chunk_that_cannot_be_prepared_is_reported(pool: HostPool) -> None:
    listener = Listener()

    def refuse(start: int, end: int) -> None:
        raise OSError("driver says no")

    running = listener.start(pool, PrefaultOptions(prepare=refuse, threads=4, chunk_bytes=3 * MIB))
    assert running.wait(DEADLINE_S) is PrefaultState.FAILED
    assert [str(error) for error in listener.errors] == ["driver says no"]
    assert listener.ready == []


def test_a_dead_thread_is_not_taken_for_success(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked: list[object] = []
    monkeypatch.setattr(threading, "excepthook", hooked.append)
    listener = Listener()

    def broken(start: int, end: int) -> None:
        raise RuntimeError("a bug")

    running = listener.start(pool, PrefaultOptions(prepare=broken, threads=1))
    assert running.wait(DEADLINE_S) is PrefaultState.STOPPED
    running.stop()
    assert len(hooked) == 1


def test_kernels_without_the_advice_are_served_by_touching(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "_MADV_POPULATE_WRITE", 12345)
    pool.data[:8192:4096] = (3, 4)
    prefault.populate(pool.mapping, 0, MIB)
    assert resident_bytes(pool) == MIB
    assert pool.data[:8192:4096].tolist() == [3, 4]


def test_a_kernel_without_memory_is_an_error(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        @staticmethod
        def madvise(address: int, size_bytes: int, advice: int) -> int:
            ctypes.set_errno(errno.ENOMEM)
            return -1

    monkeypatch.setattr(prefault, "_libc", Libc)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        prefault.populate(pool.mapping, 0, MIB)
    assert resident_bytes(pool) == 0


def test_a_range_outside_the_mapping_is_refused(pool: HostPool) -> None:
    for start, end in ((0, 25 * MIB), (-4096, 4096), (8192, 4096)):
        with pytest.raises(ValueError, match="outside"):
            prefault.populate(pool.mapping, start, end)


def test_the_first_stretch_is_touched_at_normal_priority_and_the_rest_at_a_low_one(pool: HostPool) -> None:
    seen: dict[int, int] = {}
    listener = Listener()

    def prepare(start: int, end: int) -> None:
        seen[start // MIB] = os.getpriority(os.PRIO_PROCESS, 0)

    mine = os.getpriority(os.PRIO_PROCESS, 0)
    options = PrefaultOptions(threads=1, chunk_bytes=6 * MIB, eager_bytes=12 * MIB, prepare=prepare)
    assert listener.start(pool, options).wait(DEADLINE_S) is PrefaultState.DONE
    assert seen == {0: mine, 6: mine, 12: max(mine, 10), 18: max(mine, 10)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


def test_a_read_only_mapping_is_refused(pool: HostPool) -> None:
    worker = MappedPool.attach(pool.descriptor, *pool.export_fds(), writable=False)
    with pytest.raises(ValueError, match="writable"):
        Prefault(worker.mapping, MIB, lambda ready: None, lambda error: None)


@pytest.mark.parametrize(("size", "slab", "limit"), [(10, 3, 7), (10, 3, 2), (9, 3, 9), (1, 5, 100)])
def test_chunks_cover_the_pool_and_end_on_slab_boundaries(size: int, slab: int, limit: int) -> None:
    chunks = list(chunk_ranges(size, slab, limit))
    assert [i for start, end in chunks for i in range(start, end)] == list(range(size))
    assert all(end % slab == 0 or end == size for _, end in chunks)
    assert all(end - start <= max(limit, slab) for start, end in chunks)
    assert np.all(np.diff([start for start, _ in chunks]) > 0)
