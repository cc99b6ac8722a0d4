"""What only a CUDA device can show: run with `pytest -m gpu tests/gpu` on a machine that has one.

The same classes as in tests/unit/offload/gpu, without a fake in between: memory made and exported, imported by a second
process, copies by DMA, the kernel beside torch's copies, generations after the event.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixcache_offload import transfer
from prefixcache_offload.export import send_descriptors
from prefixcache_offload.gpu import DeviceError, DevicePool, DeviceReason, PoolContext, import_device_pool, kernels
from prefixcache_offload.gpu import open_device_pool as open_pool
from prefixcache_offload.gpu.driver import Driver
from prefixcache_offload.memory import Memory
from prefixcache_offload.paged import PagedCache, PagedTensor, Stretch, gather, scatter
from prefixcache_offload.pinning import open_pinner
from prefixcache_offload.pool import HostPool
from prefixcache_offload.strides import PartShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIB = 1 << 20
SIZE = 64 * MIB
DEADLINE_S = 60
CONTEXT = PoolContext(pool_id=3, slab_bytes=4 * MIB)
WORKER = Path(__file__).with_name("device_worker.py")
PART = PartShape(kv_heads=4, layers=3, tokens=64, k_dim=64, v_dim=64, itemsize=2)
STRIDE = -(-PART.part_bytes // 4096)


@pytest.fixture
def host() -> Iterator[HostPool]:
    """A host pool as the daemon has it: pinned, filled at random."""
    made = HostPool.create(1, SIZE, 4 * MIB)
    made.data[:] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    pinner = open_pinner(made.mapping)
    assert pinner.enabled, pinner.reason
    for start in range(0, SIZE, 4 * MIB):  # chunk by chunk, as the daemon does
        pinner.register(start, start + 4 * MIB)
    yield made
    assert pinner.close() == []
    made.close()


@pytest.fixture(params=["cuda_fd", "cuda_ipc"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[DevicePool]:
    """A device pool of each kind of handle."""
    if request.param == "cuda_ipc":
        monkeypatch.setattr(Driver, "can_share_by_descriptor", lambda self, device: False)
    made = open_pool("cuda:0", SIZE, context=CONTEXT)
    assert made.export().handle == request.param
    yield made
    made.close()


@pytest.fixture
def own_pool() -> Iterator[DevicePool]:
    """A pool that this process imports too, which legacy IPC does not allow."""
    made = open_pool("cuda:0", SIZE, context=CONTEXT)
    yield made
    made.close()


def ask_worker(pool: DevicePool, slots: list[int], generations: list[int], device: str = "cuda:0") -> dict[str, Any]:
    export = pool.export()
    told = {
        "pool_id": 3, "size_bytes": pool.size_bytes, "slab_bytes": 4 * MIB, "handle": export.handle,
        "device_uuid": export.device_uuid, "ipc_handle": export.ipc_handle.hex(), "device": device,
        "slots": slots, "generations": generations, "slot_bytes": 2 * MIB,
    }  # fmt: skip
    ours, theirs = socket.socketpair()
    payload = json.dumps(told).encode()
    assert send_descriptors(ours, payload, export.fds) == len(payload)
    done = subprocess.run(
        [sys.executable, str(WORKER), str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    ours.close()
    theirs.close()
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_slots_go_in_to_another_process_and_out_again(host: HostPool, pool: DevicePool) -> None:
    source, device = [0, 512, 4096, 2048], [1024, 0, 2560, 512]
    pool.set_generations(device, [11, 12, 13, 14])
    into = pool.copy_in(host, source, device, 2 * MIB)
    assert into.wait(DEADLINE_S)
    assert into.error is None
    answer = ask_worker(pool, device, [11, 12, 13, 15])
    assert answer["sums"] == [int(host.slot(slot, 2 * MIB).sum(dtype=np.int64)) for slot in source]
    assert answer["intact"] == [True, True, True, False]
    wanted = [host.slot(slot, 2 * MIB).copy() for slot in source]
    back = [8192, 8704, 9216, 9728]
    out = pool.copy_out(host, device, back, 2 * MIB)
    assert out.wait(DEADLINE_S)
    assert out.error is None
    assert all(np.array_equal(host.slot(slot, 2 * MIB), want) for slot, want in zip(back, wanted, strict=True))


def test_a_copy_is_checked_after_its_event(host: HostPool, own_pool: DevicePool) -> None:
    pool = own_pool
    pool.set_generations([0], [7])
    assert pool.copy_in(host, [0], [0], 2 * MIB).wait(DEADLINE_S)
    export = pool.export()
    worker = import_device_pool(export, export.fds, "cuda:0")
    whole = worker.tensor()
    assert isinstance(whole, torch.Tensor)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        copy = whole[: 2 * MIB].clone()
        event = torch.cuda.Event()
        event.record()
    event.synchronize()
    assert worker.check_generations([0], [7]).all()
    assert np.array_equal(copy.cpu().numpy(), host.slot(0, 2 * MIB))
    pool.set_generations([0], [8])  # a new owner, before the worker looked
    assert not worker.check_generations([0], [7]).any()
    del whole, copy
    worker.close()


def test_names_sizes_and_what_is_given_back() -> None:
    first = open_pool("cuda:0", SIZE, context=CONTEXT)
    by_uuid = open_pool(f"cuda:{first.device_uuid}", SIZE, context=CONTEXT)
    assert (by_uuid.device, by_uuid.device_uuid) == (first.device, first.device_uuid)
    free, total = torch.cuda.mem_get_info(0)
    by_uuid.close()
    assert torch.cuda.mem_get_info(0)[0] >= free + SIZE // 2
    print("context:", first.cost)
    first.close()
    warnings: list[str] = []
    halved = open_pool("cuda:0", 4 * total, context=PoolContext(3, 4 * MIB, 64 * MIB, warnings.append))
    assert 0 < halved.size_bytes < total
    assert len(warnings) == 1
    halved.close()
    with pytest.raises(DeviceError) as refused:
        open_pool("cuda:999", SIZE, context=CONTEXT)
    assert refused.value.reason is DeviceReason.NO_SUCH_DEVICE


LAYOUTS = ["cbthd", "cbhtd", "bcthd", "bhtd", "blcthd", "bhdt"]
DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32]


def tensors(axes: str, dtype: torch.dtype, page_tokens: int, pages: int = 20) -> list[PagedTensor]:
    fused = 2 if axes == "bhtd" else 1
    sizes = {"c": 2, "b": pages, "h": 4, "l": 3, "t": page_tokens, "d": 64 * fused}
    made = []
    for layer in range(1 if "l" in axes else 3):
        for holds in ("k", "v") if axes == "bhdt" else ("kv",):
            shape = (*(sizes[a] for a in axes), dtype.itemsize)
            raw = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda:0")
            made.append(PagedTensor(raw.view(dtype)[..., 0], axes, holds, layer))  # type: ignore[arg-type]  # literals
    return made


@pytest.mark.parametrize("page_tokens", [16, 32, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", LAYOUTS)
def test_the_kernel_moves_what_torch_does(axes: str, dtype: torch.dtype, page_tokens: int) -> None:
    part = PartShape(4, 3, 64, 64, 64, dtype.itemsize)
    stride = -(-part.part_bytes // 4096)
    members = tensors(axes, dtype, page_tokens)
    cache = PagedCache(part, members)
    stretch = [Stretch([3 * stride, 0], [7, 2, 11, 5, 9, 1, 0, 3][: -(-128 // page_tokens)], 16, 128)]
    whole = torch.zeros(4 * stride * 4096, dtype=torch.uint8, device="cuda:0")
    plain = torch.zeros_like(whole)
    pool, other = Memory.of_tensor(whole)[0], Memory.of_tensor(plain)[0]
    assert kernels.launches(pool, cache.jobs(stretch)), "left to torch"
    gather(cache, pool, stretch)
    transfer._by_torch(other, cache.jobs(stretch), to_engine=False)
    torch.cuda.synchronize()
    assert torch.equal(whole, plain)
    assert bool(whole.any())
    raw = [member.tensor.view(torch.uint8) for member in members]
    before = [each.clone() for each in raw]
    for each in raw:
        each.zero_()
    scatter(cache, pool, stretch)
    by_kernel = [each.clone() for each in raw]
    for each in raw:
        each.zero_()
    transfer._by_torch(pool, cache.jobs(stretch), to_engine=True)
    torch.cuda.synchronize()
    for kernel, each, was in zip(by_kernel, raw, before, strict=True):
        assert torch.equal(kernel, each)
        assert not torch.equal(each, was)


@pytest.mark.parametrize("start", [0, 16])
def test_host_slots_reach_pages_and_come_back(host: HostPool, start: int) -> None:
    members = tensors("cbthd", torch.bfloat16, 16)
    cache = PagedCache(PART, members)
    ids = [7, 2, 11, 5, 9, 1, 0, 3]
    slots = [0, 3 * STRIDE]
    pool = Memory.of_bytes(host.data)
    gather(cache, pool, [Stretch(slots, ids, start, 128)])
    cache.wait()
    again = [PagedTensor(torch.zeros_like(each.tensor), each.axes, "kv", each.first_layer) for each in members]
    other = PagedCache(PART, again)
    scatter(other, pool, [Stretch(slots, ids, start, 128)])
    other.wait()
    used = ids[start // 16 :]
    for before, after in zip(members, again, strict=True):
        assert torch.equal(before.tensor[:, used].view(torch.uint8), after.tensor[:, used].view(torch.uint8))


def test_pages_come_from_an_imported_pool(host: HostPool, own_pool: DevicePool) -> None:
    """A worker's whole way: pages to host slots, the daemon's copy in, back from the device pool by the kernel."""
    members = tensors("cbthd", torch.bfloat16, 16)
    cache = PagedCache(PART, members)
    ids = [7, 2, 11, 5, 9, 1, 0, 3]
    gather(cache, Memory.of_bytes(host.data), [Stretch([0, STRIDE], ids, 0, 128)])
    cache.wait()
    assert own_pool.copy_in(host, [0, STRIDE], [5 * STRIDE, 2 * STRIDE], PART.part_bytes).wait(DEADLINE_S)
    export = own_pool.export()
    worker = import_device_pool(export, export.fds, "cuda:0")
    again = [PagedTensor(torch.zeros_like(each.tensor), each.axes, "kv", each.first_layer) for each in members]
    other = PagedCache(PART, again)
    scatter(other, worker.memory, [Stretch([5 * STRIDE, 2 * STRIDE], ids, 0, 128)])
    other.wait()
    for before, after in zip(members, again, strict=True):
        assert torch.equal(before.tensor[:, ids].view(torch.uint8), after.tensor[:, ids].view(torch.uint8))
    worker.close()
