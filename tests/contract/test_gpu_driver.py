"""A daemon and an SDK client over a CUDA driver that is not there (see fake_cuda): the whole tier above it."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prefixcache.server.app import Daemon
from prefixcache.server.config import ConfigError
from prefixcache.v1 import common_pb2 as common
from prefixcache_client import Blocks, Client, ClientOptions
from tests.contract.conftest import start_daemon, stop_daemon
from tests.e2e.processes import wait_until
from tests.issues.workers import BLOCK_BYTES, BLOCK_TOKENS, bytes_of, namespace
from tests.unit.offload.gpu.fake_cuda import NAMES, FakeCuda
from tests.unit.offload.gpu.test_cuda import put

BLOCKS = 4
TOKENS = [1] * (BLOCKS * BLOCK_TOKENS)
GPU = {"gpu": BLOCKS * BLOCK_TOKENS}
HOST = {"host": BLOCKS * BLOCK_TOKENS}


class Running:
    """A daemon with a pool on the fake device, and a client on it."""

    def __init__(self, folder: Path, wish: str = "cuda:0=64MiB") -> None:
        self.daemon: Daemon = start_daemon(folder, gpu=wish)
        options = ClientOptions(timeout_s=10.0, store_timeout_s=20.0, device="cuda:0")
        self.client = Client(f"unix://{self.daemon.config.socket}", options)

    def store(self) -> None:
        stored = self.client.store(namespace(self.client), TOKENS, Blocks(bytes_of(1, BLOCKS)))
        assert stored.stored_blocks == BLOCKS

    def load(self) -> dict[str, int]:
        target = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        with self.client.acquire(namespace(self.client), TOKENS) as lease:
            tiers = lease.tokens_by_tier
            assert lease.copy_to(Blocks(target))
        assert np.array_equal(target, bytes_of(1, BLOCKS))
        return {tier: count for tier, count in tiers.items() if count}

    def row(self) -> tuple[str, int, str]:
        row = next(row for row in self.daemon.statistics.snapshot().tiers if row.tier == common.TIER_GPU)
        return row.state, row.capacity_bytes, row.device

    def stop(self) -> None:
        self.client.close()
        stop_daemon(self.daemon)


@pytest.fixture(params=["by descriptor", "by ipc"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = put(monkeypatch, FakeCuda(by_descriptor=request.param == "by descriptor"))
    yield fake
    assert not fake.held()


def test_blocks_are_copied_to_the_device_and_read_from_it(cuda: FakeCuda, tmp_path: Path) -> None:
    running = Running(tmp_path)
    running.store()
    assert wait_until(lambda: running.load() == GPU)
    assert running.row() == ("on", 64 << 20, NAMES[0])
    assert sum(size for _, size in cuda.copies) == BLOCKS * BLOCK_BYTES
    running.stop()


def test_a_device_lost_in_mid_copy_is_told_and_the_service_goes_on(cuda: FakeCuda, tmp_path: Path) -> None:
    running = Running(tmp_path)
    running.store()
    cuda.fail("cuMemcpyHtoDAsync", "CUDA_ERROR_ECC_UNCORRECTABLE")
    assert wait_until(lambda: running.load() == HOST and running.daemon.health.state()[0] == "degraded")
    assert running.row()[0] == "off"
    assert running.load() == HOST
    running.stop()


def test_a_device_short_of_memory_gives_less_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(monkeypatch, FakeCuda(free_bytes=100 << 20))
    with caplog.at_level(logging.INFO, "prefixcache"):  # whatever level a daemon before set
        running = Running(tmp_path, "cuda:0=256MiB")
    assert running.row()[:2] == ("on", 64 << 20)
    told = [record.getMessage() for record in caplog.records]
    assert "a smaller GPU pool" in told
    assert "a GPU pool" in told
    running.stop()


def test_a_device_without_memory_leaves_the_daemon_without_a_pool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(monkeypatch, FakeCuda(free_bytes=1 << 20))
    running = Running(tmp_path, "cuda:0=256MiB")
    assert running.row()[0] == "off"
    assert running.daemon.health.state()[0] == "degraded"
    running.store()
    assert running.load() == HOST
    running.stop()


@pytest.mark.parametrize(("wish", "told"), [("cuda:7=1GiB", f"this process sees: cuda:0 ({NAMES[0]})")])
def test_a_device_that_is_not_there_is_told_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wish: str, told: str
) -> None:
    put(monkeypatch, FakeCuda())
    with pytest.raises(ConfigError) as caught:
        start_daemon(tmp_path, gpu=wish)
    assert told in str(caught.value)
    start_again = Running(tmp_path)  # the socket's place was given back
    start_again.stop()
