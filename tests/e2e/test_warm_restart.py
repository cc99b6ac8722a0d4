"""Warm restart: blocks survive a graceful stop, and nothing else does."""

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prefixcache.server.config import load
from prefixcache.server.memory import warm_place
from prefixcache.v1 import common_pb2
from tests.contract.conftest import Worker, new_id, new_keys
from tests.contract.drivers import LocalDriver
from tests.e2e.processes import DaemonProcess, wait_until, warm_files
from tests.e2e.test_daemon_process import stats_of, store

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the socket is. Whatever a failed test left of its pool is removed."""
    yield tmp_path
    place = warm_place(load({"socket": str(tmp_path / "d.sock")}, environ={}).config)
    for path in (place.pool_path, place.mark_path):
        Path(path).unlink(missing_ok=True)


def start(folder: Path, *flags: str) -> DaemonProcess:
    return DaemonProcess(folder, "--warm-restart=true", "--drain-timeout=5s", *flags)


def stored(daemon: DaemonProcess) -> tuple[bytes, common_pb2.NamespaceSpec]:
    """Store blocks, hang up, and say what was stored."""
    worker = Worker(LocalDriver(str(daemon.local)))
    keys = store(worker, 4)
    worker.driver.close()
    return keys, worker.spec


def test_blocks_survive_a_graceful_stop(folder: Path) -> None:
    first = start(folder)
    keys, spec = stored(first)
    assert warm_files(first) == set(), "while it runs the pool has no name"
    assert first.terminate() == 0
    assert len(warm_files(first)) == 2
    second = start(folder)
    worker = Worker(LocalDriver(str(second.local)), spec)
    assert worker.opened.known
    lease = new_id()
    answer = worker.acquire(keys, lease=lease)
    assert (answer.planned_blocks, answer.ready_blocks) == (4, 4)
    worker.release(lease, 4)
    worker.driver.close()
    assert second.terminate() == 0
    third = start(folder)
    worker = Worker(LocalDriver(str(third.local)), spec)
    assert worker.acquire(keys).planned_blocks == 4
    worker.driver.close()
    third.kill()
    assert start_and_kill(folder, spec, keys) == 0, "nothing survives kill -9"
    assert warm_files(first) == set()


def start_and_kill(folder: Path, spec: common_pb2.NamespaceSpec, keys: bytes) -> int:
    """Blocks that a fresh start finds."""
    daemon = start(folder)
    worker = Worker(LocalDriver(str(daemon.local)), spec)
    planned = worker.acquire(keys).planned_blocks
    worker.driver.close()
    daemon.kill()
    return planned


def test_bytes_that_changed_meanwhile_are_missed_not_served(folder: Path) -> None:
    first = start(folder)
    keys, spec = stored(first)
    assert wait_until(lambda: stats_of(first).tiers[0].blocks == 4)
    assert first.terminate() == 0
    pool = next(path for path in warm_files(first) if path.endswith(".pool"))
    content = np.memmap(pool, np.uint8, "r+")
    content[: 16 << 20 : 4096] ^= 0xFF
    content.flush()
    del content
    second = start(folder)
    worker = Worker(LocalDriver(str(second.local)), spec)
    assert worker.acquire(keys).planned_blocks == 0
    missed = {item.reason: item.count for item in stats_of(second).tokens.miss}
    assert missed.get(common_pb2.REASON_CHECKSUM_MISMATCH, 0) + missed.get(common_pb2.REASON_NOT_CACHED, 0) == 64
    worker.driver.close()
    second.kill()
    start_and_kill(folder, spec, new_keys(1))


def test_another_pool_size_starts_fresh(folder: Path) -> None:
    first = start(folder)
    keys, spec = stored(first)
    assert first.terminate() == 0
    second = start(folder, "--host-bytes=24MiB")
    worker = Worker(LocalDriver(str(second.local)), spec)
    assert worker.acquire(keys).planned_blocks == 0
    assert "wrong_size" in second.log.read_text()
    worker.driver.close()
    second.kill()
    assert warm_files(first) == set()


def test_an_open_reservation_is_not_kept(folder: Path) -> None:
    """Its writer may still write, so its slots cannot be given to anybody after the restart."""
    daemon = DaemonProcess(folder, "--warm-restart=true", "--drain-timeout=1ms")
    worker = Worker(LocalDriver(str(daemon.local)))
    store(worker)
    worker.reserve(new_id(), new_keys(1))
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert "the pool is not kept" in daemon.log.read_text()
    assert warm_files(daemon) == set()
    worker.driver.close()
