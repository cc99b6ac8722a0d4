"""Warm restart: blocks survive a graceful stop, and nothing else does."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prefixcache.v1 import common_pb2
from tests.contract.conftest import Worker, new_id, new_keys
from tests.contract.drivers import LocalDriver
from tests.e2e.processes import DaemonProcess, wait_until
from tests.e2e.test_daemon_process import stats_of, store

pytestmark = pytest.mark.slow
WARM_DIR = Path("/dev/shm")


@pytest.fixture
def leftovers() -> Iterator[set[str]]:
    """What is in the folder before; a test must leave no more than it says."""
    before = set(os.listdir(WARM_DIR))
    yield before
    for name in set(os.listdir(WARM_DIR)) - before:
        if name.startswith("prefixcache-"):
            (WARM_DIR / name).unlink()


def new(before: set[str]) -> set[str]:
    return {name for name in set(os.listdir(WARM_DIR)) - before if name.startswith("prefixcache-")}


def start(folder: Path, *flags: str) -> DaemonProcess:
    return DaemonProcess(folder, "--warm-restart=true", "--drain-timeout=5s", *flags)


def stored(daemon: DaemonProcess) -> tuple[bytes, common_pb2.NamespaceSpec]:
    """Store blocks, hang up, and say what was stored."""
    worker = Worker(LocalDriver(str(daemon.local)))
    keys = store(worker, 4)
    worker.driver.close()
    return keys, worker.spec


def test_blocks_survive_a_graceful_stop(tmp_path: Path, leftovers: set[str]) -> None:
    first = start(tmp_path)
    keys, spec = stored(first)
    assert new(leftovers) == set(), "while it runs the pool has no name"
    assert first.terminate() == 0
    assert len(new(leftovers)) == 2
    second = start(tmp_path)
    worker = Worker(LocalDriver(str(second.local)), spec)
    assert worker.opened.known
    lease = new_id()
    answer = worker.acquire(keys, lease=lease)
    assert (answer.planned_blocks, answer.ready_blocks) == (4, 4)
    worker.release(lease, 4)
    worker.driver.close()
    assert second.terminate() == 0
    third = start(tmp_path)
    worker = Worker(LocalDriver(str(third.local)), spec)
    assert worker.acquire(keys).planned_blocks == 4
    worker.driver.close()
    third.kill()
    assert start_and_kill(tmp_path, spec, keys) == 0, "nothing survives kill -9"
    assert new(leftovers) == set()


def start_and_kill(folder: Path, spec: common_pb2.NamespaceSpec, keys: bytes) -> int:
    """Blocks that a fresh start finds."""
    daemon = start(folder)
    worker = Worker(LocalDriver(str(daemon.local)), spec)
    planned = worker.acquire(keys).planned_blocks
    worker.driver.close()
    daemon.kill()
    return planned


def test_bytes_that_changed_meanwhile_are_missed_not_served(tmp_path: Path, leftovers: set[str]) -> None:
    first = start(tmp_path)
    keys, spec = stored(first)
    assert wait_until(lambda: stats_of(first).tiers[0].blocks == 4)
    assert first.terminate() == 0
    pool = next(WARM_DIR / name for name in new(leftovers) if name.endswith(".pool"))
    content = np.memmap(pool, np.uint8, "r+")
    content[: 16 << 20 : 4096] ^= 0xFF
    content.flush()
    del content
    second = start(tmp_path)
    worker = Worker(LocalDriver(str(second.local)), spec)
    assert worker.acquire(keys).planned_blocks == 0
    missed = {item.reason: item.count for item in stats_of(second).tokens.miss}
    assert missed.get(common_pb2.REASON_CHECKSUM_MISMATCH, 0) + missed.get(common_pb2.REASON_NOT_CACHED, 0) == 64
    worker.driver.close()
    second.kill()
    start_and_kill(tmp_path, spec, new_keys(1))


def test_another_pool_size_starts_fresh(tmp_path: Path, leftovers: set[str]) -> None:
    first = start(tmp_path)
    keys, spec = stored(first)
    assert first.terminate() == 0
    second = start(tmp_path, "--host-bytes=24MiB")
    worker = Worker(LocalDriver(str(second.local)), spec)
    assert worker.acquire(keys).planned_blocks == 0
    assert "wrong_size" in second.log.read_text()
    worker.driver.close()
    second.kill()
    assert new(leftovers) == set()


def test_an_open_reservation_is_not_kept(tmp_path: Path, leftovers: set[str]) -> None:
    """Its writer may still write, so its slots cannot be given to anybody after the restart."""
    daemon = DaemonProcess(tmp_path, "--warm-restart=true", "--drain-timeout=1ms")
    worker = Worker(LocalDriver(str(daemon.local)))
    store(worker)
    worker.reserve(new_id(), new_keys(1))
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert "the pool is not kept" in daemon.log.read_text()
    assert new(leftovers) == set()
    worker.driver.close()
