"""A flush answered as if all were on disk when the time for draining was over, or while the disk was still starting.

Whoever stored more than memory holds after it lost what was not written yet: those pages were missing from then on,
however often they were asked for.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from prefixcache.core import events as e
from prefixcache.core.reasons import DiskDrop
from prefixcache.server.app import Daemon
from prefixcache.server.disk import DiskStore
from prefixcache.v1 import admin_pb2, admin_pb2_grpc
from prefixcache_client import Client, ClientOptions, ForeignCache, Rows
from tests.contract.conftest import start_daemon, stop_daemon
from tests.e2e.processes import wait_until

BLOCK_BYTES, AT_ONCE, BATCHES = 512 * 1024, 6, 4
SLOTS = 8
OPTIONS = ClientOptions(timeout_s=20, store_timeout_s=20, load_timeout_s=20)


class SlowDisk:
    """Each write of the daemon's begins that much later."""

    def __init__(self, daemon: Daemon, seconds: float) -> None:
        assert daemon.disk is not None
        assert daemon.disk.tier is not None
        self._write: Callable[..., None] = daemon.disk.tier.write
        self._seconds = seconds
        daemon.disk.tier.write = self._later  # type: ignore[method-assign] # it stands in for the disk

    def _later(self, *order: Any, **named: Any) -> None:
        threading.Timer(self._seconds, self._write, order, named).start()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """It would drain for no longer than a millisecond."""
    flags = {"disk": str(tmp_path / "disk"), "disk_bytes": "64MiB", "drain_timeout": "1ms"}
    running = start_daemon(tmp_path, host_bytes=str(SLOTS * BLOCK_BYTES), **flags)
    yield running
    stop_daemon(running)


@pytest.fixture
def cache(daemon: Daemon) -> Iterator[ForeignCache]:
    with Client(f"unix://{daemon.config.socket}", OPTIONS) as client:
        yield client.foreign(client.foreign_namespace("test", b"w" * 32, (BLOCK_BYTES, 64), form={}))


def flush(daemon: Daemon) -> admin_pb2.FlushResponse:
    with grpc.insecure_channel(f"unix:{daemon.config.socket}") as channel:
        answer: admin_pb2.FlushResponse = admin_pb2_grpc.AdminServiceStub(channel).Flush(admin_pb2.FlushRequest())
        return answer


def keys(batch: int) -> list[bytes]:
    return [b"page %d of %d" % (page, batch) for page in range(AT_ONCE)]


def content(batch: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(batch).integers(0, 256, (AT_ONCE, BLOCK_BYTES), np.uint8)


def store(cache: ForeignCache, batch: int) -> None:
    assert cache.store(keys(batch), Rows(content(batch), np.arange(AT_ONCE))).stored.all()


def test_what_a_flush_says_is_written_survives_more_than_memory_holds(daemon: Daemon, cache: ForeignCache) -> None:
    SlowDisk(daemon, 0.03)
    for batch in range(BATCHES):
        store(cache, batch)
        assert flush(daemon).left_blocks == 0
    assert not daemon.planner.state.stats.disk_drops[DiskDrop.UNWRITTEN]
    for batch in range(BATCHES):
        target = np.zeros((AT_ONCE, BLOCK_BYTES), np.uint8)
        with cache.acquire(keys(batch)) as lease:
            assert lease.present.all(), (batch, lease.reason)
            assert lease.copy_to(Rows(target, np.arange(AT_ONCE))).ok
        assert np.array_equal(target, content(batch))


def test_a_flush_says_what_it_left(daemon: Daemon, cache: ForeignCache) -> None:
    """What is leased is not looked at again once it was in the way of something else."""
    store(cache, 0)
    with cache.acquire(keys(0)) as lease:
        assert lease.present.all()
        stored = cache.store(keys(1), Rows(content(1), np.arange(AT_ONCE))).stored
        assert stored.sum() == SLOTS - AT_ONCE
        assert flush(daemon).left_blocks == AT_ONCE
    assert wait_until(lambda: not daemon.planner.state.leases)
    answer = flush(daemon)
    assert (answer.blocks, answer.left_blocks) == (AT_ONCE, 0)


def test_a_flush_says_at_once_that_a_disk_takes_nothing(daemon: Daemon, cache: ForeignCache) -> None:
    flush(daemon)  # it has started
    daemon.owner.call(e.DiskChanged(reads_on=True, writes_on=False, reason="full"))
    store(cache, 0)
    began = daemon.owner.clock()
    answer = flush(daemon)
    assert (answer.blocks, answer.left_blocks) == (0, AT_ONCE)
    assert daemon.owner.clock() - began < 15, "half of the time that a flush has"


def test_a_flush_waits_for_a_disk_that_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was over at once, with nothing written."""
    known = threading.Event()
    tell_all = DiskStore._tell_all

    def tells_late(self: DiskStore, tier: Any) -> None:
        assert known.wait(20)
        tell_all(self, tier)

    monkeypatch.setattr(DiskStore, "_tell_all", tells_late)
    daemon = start_daemon(tmp_path, host_bytes="4MiB", disk=str(tmp_path / "disk"), disk_bytes="64MiB")
    try:
        with Client(f"unix://{daemon.config.socket}", OPTIONS) as client:
            store(client.foreign(client.foreign_namespace("test", b"w" * 32, (BLOCK_BYTES, 64), form={})), 0)
            demoter = daemon.planner.demoter
            assert demoter is not None
            with ThreadPoolExecutor(1) as asking:
                answer = asking.submit(flush, daemon)
                assert wait_until(lambda: demoter.flushing)
                known.set()
                assert (answer.result(20).blocks, answer.result(20).left_blocks) == (AT_ONCE, 0)
    finally:
        known.set()
        stop_daemon(daemon)
