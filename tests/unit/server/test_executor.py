"""Every order ends in exactly one Done event, also when the bytes cannot be reached."""

import queue
from collections.abc import Iterator

import numpy as np
import pytest

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache.server.executor import Executor
from prefixcache_offload.checksum import checksum
from prefixcache_offload.pool import HostPool

SLOTS = np.array([1, 5], np.uint32)
OUTSIDE = np.array([1, 5000], np.uint32)


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool.create(0, 1 << 20, 1 << 20)
    yield pool
    pool.close()


class Running:
    """An executor whose Done events come out of a queue."""

    def __init__(self, pool: HostPool) -> None:
        self.events: queue.SimpleQueue[e.Event] = queue.SimpleQueue()
        self.executor = Executor({0: pool}, lambda: None)
        self.executor.start(self.events.put)

    def run(self, order: c.Command) -> e.Event:
        self.executor.orders[type(order)](order)
        return self.events.get(timeout=20)


@pytest.fixture
def running(pool: HostPool) -> Iterator[Running]:
    running = Running(pool)
    yield running
    running.executor.stop()
    assert running.events.empty()


def test_generations_are_set_on_the_spot(pool: HostPool) -> None:
    executor = Executor({0: pool}, lambda: None)
    executor.orders[c.SetGenerations](c.SetGenerations(0, SLOTS, 77))
    assert pool.check_generations(SLOTS, np.array([77, 77], np.uint64)).all()
    assert int(pool.control.sum()) == 2 * 77
    executor.stop()


def test_slots_are_copied(pool: HostPool, running: Running) -> None:
    pool.slot(1, 4096)[:] = 3
    done = running.run(c.CopySlots(4, 0, SLOTS[:1], SLOTS[1:], 4096))
    assert done == e.CopyDone(4, ok=True)
    assert (pool.slot(5, 4096) == 3).all()
    assert running.run(c.CopySlots(5, 0, SLOTS, OUTSIDE, 4096)) == e.CopyDone(5, ok=False)


def test_checksums_are_of_the_parts_own_bytes(pool: HostPool, running: Running) -> None:
    pool.slot(5, 4096)[:] = np.arange(4096) % 251
    rows, generations = np.array([8, 9], np.uint32), np.array([1, 2], np.uint64)
    pool.set_generations(SLOTS, generations)
    done = running.run(c.ComputeChecksum(1, 0, 0, 1000, rows, SLOTS, generations))
    assert isinstance(done, e.ChecksumDone)
    assert done.digests is not None
    assert [bytes(row) for row in done.digests] == [checksum(pool.slot(slot, 1000)) for slot in (1, 5)]
    pool.set_generations(SLOTS[:1], np.array([7], np.uint64))
    stale = running.run(c.ComputeChecksum(1, 0, 0, 1000, rows, SLOTS, generations))
    assert isinstance(stale, e.ChecksumDone)
    assert stale.digests is not None
    assert bytes(stale.digests[0]) == bytes(16), "its slot has another owner by now"
    failed = running.run(c.ComputeChecksum(1, 0, 0, 1000, rows, OUTSIDE, generations))
    assert isinstance(failed, e.ChecksumDone)
    assert failed.digests is None


def test_a_verification_does_not_wait_for_checksums(pool: HostPool) -> None:
    rows, generations = np.array([8, 9], np.uint32), np.array([1, 2], np.uint64)
    events: queue.SimpleQueue[e.Event] = queue.SimpleQueue()
    executor = Executor({0: pool}, lambda: None)
    for _ in range(3):
        executor.orders[c.ComputeChecksum](c.ComputeChecksum(1, 0, 0, 1000, rows, SLOTS, generations))
    executor.orders[c.VerifyParts](c.VerifyParts(6, 1, ()))
    assert executor.backlog == 4
    assert not executor.finish(0)
    executor.start(events.put)
    assert executor.finish(20)
    assert [type(events.get(timeout=20)) for _ in range(4)] == [e.VerifyDone, *[e.ChecksumDone] * 3]
    executor.stop()


def test_verification_names_what_does_not_match(pool: HostPool, running: Running) -> None:
    rows = np.array([8, 9], np.uint32)
    digests = np.stack([np.frombuffer(checksum(pool.slot(slot, 100)), np.uint8) for slot in (1, 5)])
    pool.slot(5, 4096)[50] ^= 1
    check = c.PartCheck(2, 0, 100, rows, SLOTS, digests)
    assert running.run(c.VerifyParts(6, 1, (check,))) == e.VerifyDone(6, ((2, 9),))
    outside = c.PartCheck(2, 0, 100, rows, OUTSIDE, digests)
    assert running.run(c.VerifyParts(7, 1, (outside,))) == e.VerifyDone(7, ((2, 8), (2, 9)))
