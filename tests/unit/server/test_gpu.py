"""Promotions as copies on a device: each ends once, and a device's trouble is told, not passed on."""

import queue
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache.core.copying import PartCopy
from prefixcache.core.ids import SLOT_GRANULE
from prefixcache.core.planner import Planner
from prefixcache.core.spec import PlannerConfig, PoolSpec
from prefixcache.server import gpu
from prefixcache.server.config import Config, ConfigError
from prefixcache.server.gpu import GpuStore
from prefixcache.v1 import common_pb2 as common
from prefixcache_offload.gpu import DeviceError, DeviceReason
from prefixcache_offload.pool import HostPool

SIZE = 1 << 20
SOURCES = np.array([3, 9, 4], np.uint32)
TARGETS = np.array([0, 1, 8], np.uint32)


@pytest.fixture
def host() -> Iterator[HostPool]:
    pool = HostPool.create(0, SIZE, SIZE)
    pool.data[:] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    yield pool
    pool.close()


class Running:
    """A store whose events come out of a queue."""

    def __init__(self, host: HostPool, wish: str = "cpu=1MiB") -> None:
        self.events: queue.SimpleQueue[e.Event] = queue.SimpleQueue()
        self.store = GpuStore(Config(gpu=wish), host)
        self.store.start(lambda work: self.events.put(work()))

    def promote(self, copy: int, *parts: PartCopy) -> None:
        self.store.orders[c.PromoteSlots](c.PromoteSlots(copy, 0, 1, parts))

    def next(self) -> e.Event:
        return self.events.get(timeout=20)


@pytest.fixture
def running(host: HostPool) -> Iterator[Running]:
    running = Running(host)
    yield running
    running.store.close()
    assert running.events.empty()


def planner_of(store: GpuStore) -> Planner:
    return Planner(PlannerConfig((PoolSpec(SIZE, SIZE), *store.specs())))


def mapped(store: GpuStore) -> np.typing.NDArray[np.uint8]:
    from prefixcache_offload.gpu import import_device_pool

    export = store.pools[1].export()
    imported = import_device_pool(export, export.fds, "cpu")
    whole = imported.tensor()
    assert isinstance(whole, np.ndarray)
    return whole


def test_a_promotion_copies_every_part_and_ends_once(running: Running, host: HostPool) -> None:
    other = PartCopy(np.array([20], np.uint32), np.array([40], np.uint32), 2 * SLOT_GRANULE)
    running.promote(7, PartCopy(SOURCES, TARGETS, SLOT_GRANULE), other)
    assert running.next() == e.PromotionDone(7, ok=True)
    there = mapped(running.store)
    for source, target in zip(SOURCES.tolist(), TARGETS.tolist(), strict=True):
        at, to = source * SLOT_GRANULE, target * SLOT_GRANULE
        assert np.array_equal(there[to : to + SLOT_GRANULE], host.data[at : at + SLOT_GRANULE])
    size = 2 * SLOT_GRANULE
    assert np.array_equal(there[40 * SLOT_GRANULE :][:size], host.data[20 * SLOT_GRANULE :][:size])


def test_a_copy_that_cannot_be_ends_once_as_failed(running: Running) -> None:
    outside = PartCopy(SOURCES, np.array([0, 1, 5000], np.uint32), SLOT_GRANULE)
    running.promote(1, PartCopy(SOURCES, TARGETS, SLOT_GRANULE), outside)
    assert running.next() == e.PromotionDone(1, ok=False)
    running.promote(2, PartCopy(SOURCES, TARGETS, SLOT_GRANULE))
    assert running.next() == e.PromotionDone(2, ok=True)


def test_a_lost_device_is_told_once(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(batch: object) -> object:
        raise DeviceError(DeviceReason.LOST, "it fell off the bus")

    monkeypatch.setattr(running.store.pools[1]._memory, "start", lost)
    running.promote(1, PartCopy(SOURCES, TARGETS, SLOT_GRANULE))
    told = running.next()
    assert isinstance(told, e.DeviceLost)
    assert told.pool == 1
    assert "device_lost" in told.reason
    assert running.next() == e.PromotionDone(1, ok=False)
    running.promote(2, PartCopy(SOURCES, TARGETS, SLOT_GRANULE))
    assert running.next() == e.PromotionDone(2, ok=False)


def test_a_device_on_which_nothing_comes_counts_as_lost(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(batch: object) -> object:
        raise DeviceError(DeviceReason.NOT_SUPPORTED, "not today")

    good = running.store.pools[1]._memory.start
    for copy in range(20):
        failed = copy % 10 < 7 if copy < 10 else True
        monkeypatch.setattr(running.store.pools[1]._memory, "start", failing if failed else good)
        running.promote(copy, PartCopy(SOURCES, TARGETS, SLOT_GRANULE))
        told = running.next()
        if isinstance(told, e.DeviceLost):
            assert copy == 17, "not after eight in a row"
            assert "not today" in told.reason
            told = running.next()
        assert told == e.PromotionDone(copy, ok=not failed)


def test_a_closed_store_ends_what_waits(host: HostPool) -> None:
    running = Running(host)
    running.store.close()
    running.promote(1, PartCopy(SOURCES, TARGETS, SLOT_GRANULE))
    assert running.next() == e.PromotionDone(1, ok=False)


def test_a_copy_that_takes_too_long_is_trouble(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = planner_of(running.store)
    assert running.store.troubles(planner) == []
    running.store._under_way[9] = 0.0
    (trouble,) = running.store.troubles(planner)
    assert "under way" in trouble
    del running.store._under_way[9]


def failing(reason: DeviceReason) -> Callable[..., object]:
    def wrong(device: str, size_bytes: int, *, context: object) -> object:
        raise DeviceError(reason, "there is not enough")

    return wrong


def test_a_device_without_memory_is_left_out_and_told(host: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "open_device_pool", failing(DeviceReason.OUT_OF_MEMORY))
    store = GpuStore(Config(gpu="cuda:0=8GiB"), host)
    planner = planner_of(store)
    assert store.specs() == ()
    assert store.troubles(planner) == ["no pool on cuda:0: there is not enough"]
    (row,) = store.tier_stats(planner)
    assert (row.state, row.device, row.tier) == ("off", "cuda:0", common.TIER_GPU)


@pytest.mark.parametrize("reason", [DeviceReason.NO_SUCH_DEVICE, DeviceReason.NO_DRIVER, DeviceReason.NOT_SUPPORTED])
def test_a_device_that_is_not_there_is_refused(
    host: HostPool, monkeypatch: pytest.MonkeyPatch, reason: DeviceReason
) -> None:
    monkeypatch.setattr(gpu, "open_device_pool", failing(reason))
    with pytest.raises(ConfigError, match="gpu: cuda:0: there is not enough"):
        GpuStore(Config(gpu="cuda:0=8GiB"), host)


def test_one_device_under_two_names_is_refused(host: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu.open_device_pool
    monkeypatch.setattr(gpu, "open_device_pool", lambda device, *rest, **more: right("cpu", *rest, **more))
    with pytest.raises(ConfigError, match="listed twice"):
        GpuStore(Config(gpu="cpu=1MiB,cuda:0=1MiB"), host)


def test_pools_are_found_by_device(running: Running) -> None:
    assert running.store.pools_on(["GPU-1", "cpu"]) == (1,)
    assert running.store.pools_on([]) == ()


def test_nothing_is_made_where_nothing_is_listed(host: HostPool) -> None:
    store = GpuStore(Config(), host)
    assert store.specs() == ()
    assert list(store.tier_stats(planner_of(store))) == []
