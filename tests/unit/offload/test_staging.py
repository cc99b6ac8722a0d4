"""Host slots to tensors that say they are on a device: the bytes of plain copies, in few stretches, and no others."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixcache_offload import staging, transfer
from prefixcache_offload.engine import Job
from prefixcache_offload.memory import Memory
from prefixcache_offload.paged import PagedCache, PagedTensor, Stretch
from prefixcache_offload.strides import PartShape
from tests.unit.offload.test_paged import cases, described, made

GRANULE = 4096
PART = PartShape(kv_heads=4, layers=3, tokens=8, k_dim=16, v_dim=16, itemsize=2)


class OnDevice(Memory):
    """Host memory that says it is a device's."""

    on_host = property(lambda self: False)  # type: ignore[assignment]  # a plain property there too
    identity = property(lambda self: ("cuda:0", self.address))  # type: ignore[assignment]  # likewise


def on_device(jobs: list[Job]) -> list[Job]:
    return [Job(OnDevice.of_bytes(job.memory.flat), job.moves, job.itemsize) for job in jobs]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of memory taken on the device, chunk by chunk."""
    sizes: list[int] = []

    def make(size_bytes: int, device: Any) -> Memory:
        sizes.append(size_bytes)
        return OnDevice.of_bytes(np.full(size_bytes, 77, np.uint8))

    monkeypatch.setattr(staging, "make", make)
    from prefixcache_offload.gpu import kernels

    monkeypatch.setattr(kernels, "can_run_on", lambda device: False)
    return sizes


@pytest.mark.parametrize("axes", ["cbthd", "bhtd", "blcthd"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_bytes_of_plain_copies_and_no_others(
    monkeypatch: pytest.MonkeyPatch, used: list[int], axes: str, data: st.DataObject
) -> None:
    case = data.draw(cases(axes))
    monkeypatch.setattr(staging, "CHUNK_BYTES", data.draw(st.sampled_from([1, 300, 5000, 1 << 26])))
    fresh = np.random.default_rng(3).integers(0, 256, 16 * GRANULE, dtype=np.uint8)
    plain, pool = fresh.copy(), fresh.copy()
    tensors = made(case, axes, ("kv",), 4)
    jobs = described(case, axes, tensors).jobs(case.stretches)
    assert transfer.store(Memory.of_bytes(plain), jobs) == transfer.store(Memory.of_bytes(pool), on_device(jobs))
    assert np.array_equal(pool, plain)

    pool[:] = fresh[::-1]
    before = [tensor.copy() for tensor, _, _ in tensors]
    transfer.load(Memory.of_bytes(pool), jobs)
    wanted = [tensor.copy() for tensor, _, _ in tensors]
    for (tensor, _, _), was in zip(tensors, before, strict=True):
        tensor[...] = was
    pool.setflags(write=False)
    transfer.load(Memory.of_bytes(pool), on_device(jobs))
    assert all(np.array_equal(tensor, want) for (tensor, _, _), want in zip(tensors, wanted, strict=True))


def jobs_of(layers: int = 3, first_layer: int = 0, heads: int = 4, start: int = 0, part: PartShape = PART) -> list[Job]:
    tensors = [torch.ones(2, 9, 4, heads, 16, dtype=torch.int16) for _ in range(layers)]
    members = [PagedTensor(each, "cbthd", first_layer=first_layer + i) for i, each in enumerate(tensors)]
    return on_device(PagedCache(part, members).jobs([Stretch([4, 0, 2], [5, 1, 8, 0, 7, 3], start, 24)]))


def test_whole_slots_are_one_stretch_each_and_neighbours_one_together() -> None:
    tight = PartShape(kv_heads=4, layers=2, tokens=8, k_dim=16, v_dim=16, itemsize=2)  # 4 KiB: slots touch
    tensors = [torch.ones(2, 9, 4, 4, 16, dtype=torch.int16) for _ in range(2)]
    cache = PagedCache(tight, [PagedTensor(each, "cbthd", first_layer=i) for i, each in enumerate(tensors)])
    (chunk,) = staging.chunks(on_device(cache.jobs([Stretch([4, 0, 1], [5, 1, 8, 0, 7, 3], 0, 24)])))
    assert (chunk.starts, chunk.ends) == ([0, 16384], [8192, 20480])
    (chunk,) = staging.chunks(jobs_of())
    assert [end - start for start, end in zip(chunk.starts, chunk.ends, strict=True)] == [PART.part_bytes] * 3
    (chunk,) = staging.chunks(jobs_of(heads=2))
    assert [end - start for start, end in zip(chunk.starts, chunk.ends, strict=True)] == [PART.part_bytes // 2] * 3
    assert list(staging.chunks([])) == []


def test_memory_on_the_device_is_bounded(monkeypatch: pytest.MonkeyPatch, used: list[int]) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", PART.part_bytes)
    pool = Memory.of_bytes(np.zeros(8 * GRANULE, np.uint8))
    transfer.load(pool, jobs_of())
    assert len(used) == 3
    assert max(used) <= PART.part_bytes + 1024


@pytest.mark.parametrize(
    ("jobs", "staged"),
    [
        (jobs_of(), True),
        (jobs_of(heads=2), True),
        (jobs_of(start=4), False),  # the front of a block is the engine's own
        (jobs_of(layers=1, heads=2, first_layer=1), False),  # other layers may be written by another process now
        (jobs_of(part=PartShape(4, 3, 8, 16, 16, 2, scale_bytes=8)), False),
    ],
)
def test_a_store_writes_whole_stretches_only_where_it_has_every_byte(
    jobs: list[Job], staged: bool, used: list[int]
) -> None:
    assert staging.covers(jobs) is staged
    transfer.store(Memory.of_bytes(np.zeros(8 * GRANULE, np.uint8)), jobs)
    assert bool(used) is staged
    used.clear()
    transfer.load(Memory.of_bytes(np.zeros(8 * GRANULE, np.uint8)), jobs)
    assert used, "loads always may"
