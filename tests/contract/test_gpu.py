"""GPU pools over the wire: who is told of them, what an Acquire names, and what a lost device changes."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prefixcache.server.app import Daemon
from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common
from prefixcache.v1 import local_pb2
from prefixcache_offload.gpu import DeviceError, DeviceReason
from tests.contract.conftest import BLOCK_TOKENS, Worker, new_id, new_keys, start_daemon, stop_daemon
from tests.contract.drivers import Failure, GrpcDriver, LocalDriver
from tests.e2e.processes import wait_until


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = start_daemon(tmp_path, gpu="cpu=1MiB")
    yield daemon
    stop_daemon(daemon)


class GpuWorker(Worker):
    """A worker on the local channel that maps the device "cpu"."""

    def __init__(self, daemon: Daemon, devices: tuple[str, ...] = ("cpu",)) -> None:
        self.local = LocalDriver(daemon.place.local_path)
        self._devices = devices
        super().__init__(self)  # type: ignore[arg-type]  # it adds the devices to OpenSession, and passes on the rest

    transport = "local"

    def call(self, rpc: str, request: object) -> object:
        if isinstance(request, pb.OpenSessionRequest):
            request.devices.extend(self._devices)
        return self.local.call(rpc, request)

    def close(self) -> None:
        for fd in self.local.fds:
            os.close(fd)
        self.local.close()


@pytest.fixture
def worker(daemon: Daemon) -> Iterator[GpuWorker]:
    made = GpuWorker(daemon)
    yield made
    made.close()


def stored(worker: Worker, count: int = 4) -> bytes:
    keys, reservation = new_keys(count), new_id()
    worker.reserve(reservation, keys)
    worker.commit(reservation)
    return keys


def pools(worker: Worker, keys: bytes) -> list[int]:
    """Pools of a lease that was used."""
    lease = new_id()
    answer = worker.acquire(keys, lease=lease)
    worker.release(lease, answer.planned_blocks)
    return [run.pool for run in answer.runs]


def climb(worker: Worker, keys: bytes) -> None:
    assert wait_until(lambda: pools(worker, keys) == [1])


def test_a_worker_is_told_of_pools_on_its_devices(daemon: Daemon, worker: GpuWorker) -> None:
    host, device = worker.welcome.pools
    assert (host.tier, host.device) == (common.TIER_HOST, "")
    assert (device.pool, device.tier, device.device, device.writable) == (1, common.TIER_GPU, "cpu", False)
    assert device.size_bytes == 1 << 20
    assert device.control_bytes == 4096
    for devices in ((), ("GPU-0",)):
        other = GpuWorker(daemon, devices)
        assert [pool.tier for pool in other.welcome.pools] == [common.TIER_HOST]
        other.close()


def test_a_worker_elsewhere_is_told_of_none(daemon: Daemon) -> None:
    driver = GrpcDriver(f"unix:{daemon.config.socket}")
    hello = pb.OpenSessionRequest(client_name="test", protocol_min=1, protocol_max=1, devices=["cpu"])
    assert [pool.tier for pool in driver.call("OpenSession", hello).pools] == [common.TIER_HOST]
    driver.close()


def test_descriptors_come_with_the_pool(worker: GpuWorker) -> None:
    answer = worker.local.call("MapPool", local_pb2.MapPoolRequest(pool=1))
    assert answer.pool.handle == common.POOL_HANDLE_UNSPECIFIED
    assert [os.fstat(fd).st_size for fd in worker.local.fds] == [1 << 20, 4096]
    with pytest.raises(Failure) as caught:
        worker.local.call("MapPool", local_pb2.MapPoolRequest(pool=2))
    assert caught.value.reason == common.REASON_BAD_ARGUMENT


def test_copies_are_named_with_their_generations_and_tier(daemon: Daemon, worker: GpuWorker) -> None:
    keys = stored(worker)
    climb(worker, keys)
    answer = worker.acquire(keys)
    assert answer.tokens == common.TierTokens(gpu=4 * BLOCK_TOKENS)
    (run,) = answer.runs
    slots, generations = np.frombuffer(run.slots, "<u4"), np.frombuffer(run.generations, "<u8")
    assert (daemon.gpus.pools[1].control[slots] == generations).all()


def test_copies_are_not_streamed(daemon: Daemon, worker: GpuWorker) -> None:
    keys = stored(worker)
    climb(worker, keys)
    lease = new_id()
    worker.acquire(keys, lease=lease)
    driver = GrpcDriver(f"unix:{daemon.config.socket}")
    method = driver.channel.unary_stream(
        "/prefixcache.v1.CacheService/ReadBlocks",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=pb.ReadBlocksResponse.FromString,
    )
    import grpc

    with pytest.raises(grpc.RpcError) as caught:
        list(method(pb.ReadBlocksRequest(session=worker.session, lease=lease)))
    assert "GPU pool 1" in str(caught.value.details())
    driver.close()


def test_a_lost_device_turns_its_tier_off_and_nothing_else(
    daemon: Daemon, worker: GpuWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = stored(worker)
    climb(worker, keys)
    held = worker.acquire(keys)
    assert daemon.health.state()[0] == "serving"

    def lost(batch: object) -> object:
        raise DeviceError(DeviceReason.LOST, "it fell off the bus")

    monkeypatch.setattr(daemon.gpus.pools[1]._memory, "start", lost)
    other = stored(worker)
    assert wait_until(lambda: pools(worker, other) == [0] and daemon.health.state()[0] == "degraded")
    assert "fell off the bus" in daemon.health.state()[1]
    row = next(row for row in daemon.statistics.snapshot().tiers if row.tier == common.TIER_GPU)
    assert (row.state, row.blocks) == ("off", 0)
    slots, generations = (np.frombuffer(each, kind) for each, kind in
                          ((held.runs[0].slots, "<u4"), (held.runs[0].generations, "<u8")))  # fmt: skip
    assert (daemon.gpus.pools[1].control[slots] != generations).all()
    assert pools(worker, keys) == [0]
    assert b'prefixcache_tier_on{tier="gpu"} 0.0' in daemon.metrics.text()


def test_metrics_tell_of_the_tier(daemon: Daemon, worker: GpuWorker) -> None:
    keys = stored(worker)
    climb(worker, keys)
    text = daemon.metrics.text().decode()
    assert 'prefixcache_tier_blocks{tier="gpu"} 4.0' in text
    assert "prefixcache_blocks_promoted_total 4.0" in text
    assert f'prefixcache_tokens_hit_total{{tier="gpu"}} {float(4 * BLOCK_TOKENS)}' in text


def test_a_prefix_is_described_with_its_copies(daemon: Daemon, worker: GpuWorker) -> None:
    keys = stored(worker)
    climb(worker, keys)
    with daemon.owner.lock:
        blocks = daemon.statistics.describe_blocks(worker.namespace, keys)
    assert [list(block.tiers) for block in blocks] == [[common.TIER_GPU, common.TIER_HOST]] * 4
