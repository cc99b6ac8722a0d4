"""Pools on a CUDA device, against a driver that is not there (see fake_cuda for the faults it makes)."""

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from prefixcache_offload.export import HandleKind, PoolExport
from prefixcache_offload.gpu import (
    DeviceError,
    DevicePool,
    DeviceReason,
    ImportedPool,
    PoolContext,
    cuda_import,
    import_device_pool,
    open_device_pool,
)
from prefixcache_offload.gpu import driver as driver_module
from prefixcache_offload.memory import Memory, _Raw
from prefixcache_offload.pool import HostPool
from tests.unit.offload.gpu.fake_cuda import NAMES, FakeCuda, real
from tests.unit.offload.gpu.leaks import memory_files, memory_files_in_use

MIB = 1 << 20
SIZE = 4 * MIB
DEADLINE_S = 60
BY_DESCRIPTOR = [
    "cuCtxPushCurrent",
    "cuStreamCreate",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuCtxPopCurrent",
]
CLOSING = ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease", "cuStreamDestroy"]


def tensor_on_host(address: int, size_bytes: int, index: int) -> torch.Tensor:
    assert index >= 0
    return torch.from_numpy(np.asarray(_Raw(address, size_bytes, None, writable=True)))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return put(monkeypatch, FakeCuda())


def put(monkeypatch: pytest.MonkeyPatch, fake: FakeCuda) -> FakeCuda:
    monkeypatch.setattr(driver_module.importlib, "import_module", lambda name: fake)
    monkeypatch.setattr(cuda_import, "tensor_over", tensor_on_host)
    return fake


@pytest.fixture
def host() -> Iterator[HostPool]:
    made = HostPool.create(1, 4 * MIB, MIB)
    made.data[:] = np.random.default_rng(1).integers(0, 256, 4 * MIB, dtype=np.uint8)
    yield made
    made.close()


def open_pool(device: str = "cuda:0", size: int = SIZE, min_bytes: int = SIZE) -> DevicePool:
    return open_device_pool(device, size, context=PoolContext(3, MIB, min_bytes))


def test_memory_is_made_exported_and_given_back_in_order(cuda: FakeCuda) -> None:
    before = memory_files_in_use()
    pool = open_pool()
    assert (pool.device, pool.device_uuid, pool.size_bytes) == ("cuda:0", NAMES[0], SIZE)
    assert cuda.calls[-len(BY_DESCRIPTOR) :] == BY_DESCRIPTOR
    assert cuda.access == [real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE]
    export = pool.export()
    assert (export.handle, export.device_uuid, export.ipc_handle, len(export.fds)) == ("cuda_fd", NAMES[0], b"", 2)
    assert pool.cost.device_used_bytes == 300
    assert pool.cost.seconds > 0
    pool.close()
    assert [name for name in cuda.calls if name in CLOSING] == CLOSING
    assert cuda.calls[-1] == "cuDevicePrimaryCtxRelease"
    assert cuda.held() == {}
    assert memory_files_in_use() == before
    pool.close()


@pytest.mark.parametrize("by_descriptor", [True, False])
def test_bytes_go_in_across_processes_boundaries_and_back(
    monkeypatch: pytest.MonkeyPatch, host: HostPool, by_descriptor: bool
) -> None:
    cuda = put(monkeypatch, FakeCuda(by_descriptor=by_descriptor))
    pool = open_pool()
    export = pool.export()
    assert export.handle is (HandleKind.CUDA_FD if by_descriptor else HandleKind.CUDA_IPC)
    worker = import_device_pool(export, export.fds, "cuda:0")
    into = pool.copy_in(host, [0, 2, 300], [8, 10, 0], 8000)
    assert into.wait(DEADLINE_S)
    assert into.error is None
    assert sorted(cuda.copies) == [("cuMemcpyHtoDAsync", 8192), ("cuMemcpyHtoDAsync", 16384)]
    seen: Any = worker.tensor()
    assert np.array_equal(seen[8 * 4096 :][:16000].numpy(), host.data[:16000])
    assert np.array_equal(seen[:8000].numpy(), host.slot(300, 8000))
    assert worker.memory.size_bytes == SIZE
    out = pool.copy_out(host, [0, 8], [600, 700], 8000)
    assert out.wait(DEADLINE_S)
    assert np.array_equal(host.slot(600, 8000), host.slot(300, 8000))
    assert np.array_equal(host.slot(700, 8000), host.slot(0, 8000))
    del seen
    worker.close()
    pool.close()
    assert cuda.held() == {}


def test_a_worker_maps_read_only_where_the_driver_can(cuda: FakeCuda) -> None:
    pool = open_pool()
    export = pool.export()
    import_device_pool(export, export.fds, "cuda:0").close()
    assert [flags.name for flags in cuda.access][1:] == ["CU_MEM_ACCESS_FLAGS_PROT_READ"]
    cuda.fail("cuMemSetAccess", "CUDA_ERROR_NOT_SUPPORTED")
    import_device_pool(export, export.fds, "cuda:0").close()
    assert [flags.name for flags in cuda.access][2:] == ["CU_MEM_ACCESS_FLAGS_PROT_READWRITE"]
    pool.close()
    assert cuda.held() == {}


CODES = ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_UNKNOWN"]


def every_failure(fake: Callable[[], FakeCuda], act: Callable[[FakeCuda], None]) -> Iterator[tuple[FakeCuda, str]]:
    """A fake for each call that `act` makes, which answers an error there, and for each of four errors."""
    dry = fake()
    act(dry)
    for code in CODES:
        seen: Counter[str] = Counter()
        for name in dry.calls:
            one = fake()
            one.fail(name, code, after=seen[name])
            seen[name] += 1
            yield one, f"{code} at {name}"


@pytest.mark.parametrize("by_descriptor", [True, False])
def test_no_failure_of_any_call_leaves_anything_behind(monkeypatch: pytest.MonkeyPatch, by_descriptor: bool) -> None:
    def act(cuda: FakeCuda) -> None:
        put(monkeypatch, cuda)
        open_pool().close()

    before, outcomes = memory_files_in_use(), Counter[str]()
    for cuda, what in every_failure(lambda: FakeCuda(by_descriptor=by_descriptor), act):
        try:
            act(cuda)
        except DeviceError as error:
            outcomes[error.reason] += 1
        else:
            outcomes["opened"] += 1
        assert cuda.held() == {}, what
        assert memory_files() == before or memory_files_in_use() == before, what
    assert set(outcomes) == {"out_of_memory", "not_supported", "driver_error", "device_lost", "opened"}


@pytest.mark.parametrize("by_descriptor", [True, False])
def test_no_failure_of_an_import_leaves_anything_behind(monkeypatch: pytest.MonkeyPatch, by_descriptor: bool) -> None:
    put(monkeypatch, FakeCuda(by_descriptor=by_descriptor))
    pool = open_pool()
    export = pool.export()

    def act(cuda: FakeCuda) -> None:
        put(monkeypatch, cuda)
        import_device_pool(export, export.fds, "cuda:0").close()

    before, reasons = memory_files_in_use(), set()
    for cuda, what in every_failure(FakeCuda, act):
        try:
            act(cuda)
        except DeviceError as error:
            reasons.add(error.reason)
        assert cuda.held() == {}, what
        assert memory_files() == before or memory_files_in_use() == before, what
    assert reasons >= {DeviceReason.BAD_EXPORT, DeviceReason.LOST, DeviceReason.OUT_OF_MEMORY}
    pool.close()


def test_a_device_that_cannot_share_by_descriptor_after_all_shares_by_ipc(cuda: FakeCuda) -> None:
    cuda.fail("cuMemExportToShareableHandle", "CUDA_ERROR_NOT_SUPPORTED")
    pool = open_pool()
    export = pool.export()
    assert (export.handle, len(export.ipc_handle), len(export.fds)) == (HandleKind.CUDA_IPC, 64, 1)
    assert set(cuda.held()) == {"contexts", "streams", "allocations"}
    pool.close()
    assert cuda.held() == {}


def test_a_device_short_of_memory_gives_less_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = put(monkeypatch, FakeCuda(free_bytes=300 * MIB))
    warnings: list[str] = []
    pool = open_device_pool("cuda:0", 1024 * MIB, context=PoolContext(3, MIB, 64 * MIB, warnings.append))
    assert pool.size_bytes == pool.descriptor.size_bytes == 256 * MIB
    assert warnings == [f"cuda:0 has no room for {1024 * MIB} bytes: the pool has {256 * MIB}"]
    pool.close()
    cuda.free_bytes = 50 * MIB
    with pytest.raises(DeviceError, match=f"no room for {64 * MIB} bytes") as refused:
        open_device_pool("cuda:0", 1024 * MIB, context=PoolContext(3, MIB, 64 * MIB))
    assert refused.value.reason is DeviceReason.OUT_OF_MEMORY
    assert cuda.held() == {}


@pytest.mark.parametrize("name", ["cuda:1", f"cuda:{NAMES[1]}", f"cuda:{NAMES[1][4:].upper()}"])
def test_devices_are_found_by_index_and_uuid(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cuda = put(monkeypatch, FakeCuda(devices=2))
    pool = open_pool(name)
    assert (pool.device, pool.device_uuid, cuda.made_on) == ("cuda:1", NAMES[1], [1])
    pool.close()
    with pytest.raises(DeviceError, match=rf"cuda:0 \({NAMES[0]}\), cuda:1") as refused:
        open_pool("cuda:2")
    assert refused.value.reason is DeviceReason.NO_SUCH_DEVICE
    assert cuda.held() == {}


def test_without_devices_a_driver_or_cuda_python_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, FakeCuda(devices=0))
    with pytest.raises(DeviceError, match="sees: none"):
        open_pool()
    for code, reason in (
        ("CUDA_ERROR_NO_DEVICE", DeviceReason.NO_SUCH_DEVICE),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", DeviceReason.NO_DRIVER),
    ):
        put(monkeypatch, FakeCuda()).fail("cuInit", code)
        with pytest.raises(DeviceError, match=code) as refused:
            open_pool()
        assert refused.value.reason is reason

    def missing(name: str) -> Any:
        raise ImportError("no module")

    monkeypatch.setattr(driver_module.importlib, "import_module", missing)
    with pytest.raises(DeviceError, match=r"prefixcache\[gpu\]") as refused:
        open_pool()
    assert refused.value.reason is DeviceReason.NO_DRIVER


def test_without_a_driver_the_real_binding_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has a CUDA driver says something else, so its own is taken away."""
    monkeypatch.setattr(real, "cuInit", lambda flags: (_ for _ in ()).throw(RuntimeError("no library")), raising=True)
    with pytest.raises(DeviceError, match="no library") as refused:
        open_pool()
    assert refused.value.reason is DeviceReason.NO_DRIVER


def test_an_import_is_refused_on_another_device_or_for_bytes_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = put(monkeypatch, FakeCuda(devices=2))
    pool = open_pool()
    export = pool.export()
    held = cuda.held()
    nobody = PoolExport(pool.descriptor, HandleKind.CUDA_IPC, (), NAMES[0], bytes(64))
    short = PoolExport(pool.descriptor, HandleKind.CUDA_IPC, (), NAMES[0], b"x")
    cases: list[tuple[PoolExport, tuple[int, ...], str, DeviceReason]] = [
        (export, export.fds, "cuda:1", DeviceReason.WRONG_DEVICE),
        (export, export.fds, "cpu", DeviceReason.WRONG_DEVICE),
        (export, export.fds, "cuda:5", DeviceReason.NO_SUCH_DEVICE),
        (export, (export.fds[1], export.fds[1]), "cuda:0", DeviceReason.BAD_EXPORT),
        (nobody, export.fds[1:], "cuda:0", DeviceReason.BAD_EXPORT),
        (
            short,
            export.fds[1:],
            "cuda:0",
            DeviceReason.BAD_EXPORT,
        ),
    ]
    for announced, fds, device, reason in cases:
        with pytest.raises(DeviceError) as refused:
            import_device_pool(announced, fds, device)
        assert refused.value.reason is reason
        assert cuda.held() == held
    pool.close()
    assert cuda.held() == {}


def test_a_ticket_is_done_after_its_event_and_not_before(
    cuda: FakeCuda, host: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = open_pool()
    gate, reached, wait = threading.Event(), threading.Event(), FakeCuda.cuEventSynchronize

    def slow(self: FakeCuda, event: int) -> Any:
        reached.set()
        gate.wait(DEADLINE_S)
        return wait(self, event)

    monkeypatch.setattr(FakeCuda, "cuEventSynchronize", slow)
    tickets = [pool.copy_in(host, [i], [i], 4096) for i in range(4)]
    assert reached.wait(DEADLINE_S)
    assert not any(ticket.done() for ticket in tickets)
    export = pool.export()
    worker = import_device_pool(export, export.fds, "cuda:0")
    seen: Any = worker.tensor()
    assert not seen[:4096].any()
    gate.set()
    assert all(ticket.wait(DEADLINE_S) and ticket.error is None for ticket in tickets)
    assert np.array_equal(seen[: 4 * 4096].numpy(), host.data[: 4 * 4096])
    del seen
    worker.close()
    pool.close()
    assert cuda.held() == {}


def test_a_batch_that_fails_half_way_ends_after_its_first_copies(cuda: FakeCuda, host: HostPool) -> None:
    pool = open_pool()
    cuda.fail("cuMemcpyHtoDAsync", "CUDA_ERROR_INVALID_VALUE", after=1)
    ticket = pool.copy_in(host, [0, 8], [8, 0], 4096)
    assert ticket.wait(DEADLINE_S)
    assert ticket.error is not None
    assert ticket.error.reason is DeviceReason.DRIVER
    assert cuda.calls[-4:] == ["cuMemcpyHtoDAsync", "cuStreamSynchronize", "cuEventDestroy", "cuCtxPopCurrent"]
    again = pool.copy_in(host, [0, 8], [8, 0], 4096)
    assert again.wait(DEADLINE_S)
    assert (again.error, pool.broken) == (None, None)
    pool.close()
    assert cuda.held() == {}


@pytest.mark.parametrize("where", ["cuEventCreate", "cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize"])
def test_a_device_lost_in_mid_copy_ends_the_pool_and_leaks_nothing(cuda: FakeCuda, host: HostPool, where: str) -> None:
    before = memory_files_in_use()
    pool = open_pool()
    cuda.fail(where, "CUDA_ERROR_ECC_UNCORRECTABLE")
    ticket = pool.copy_in(host, [0], [0], 4096)
    assert ticket.wait(DEADLINE_S)
    assert ticket.error is not None
    assert ticket.error.reason is DeviceReason.LOST
    with pytest.raises(DeviceError, match="given up"):
        pool.copy_out(host, [0], [0], 4096)
    for stream in cuda.live["streams"].values():
        stream.clear()  # the device is gone, and what was in flight with it
    pool.close()
    assert cuda.held() == {}
    assert memory_files_in_use() == before


WORKER = """
import os, sys, socket
import numpy as np
from prefixcache_offload.export import HandleKind, PoolDescriptor, PoolExport, receive_descriptors
from prefixcache_offload.gpu import cuda_import, driver, import_device_pool
from tests.unit.offload.gpu.fake_cuda import FakeCuda
from tests.unit.offload.gpu.test_cuda import tensor_on_host
fake = FakeCuda()
driver.importlib.import_module = lambda name: fake
cuda_import.tensor_over = tensor_on_host
sock = socket.socket(fileno=int(sys.argv[1]))
data, fds = receive_descriptors(sock, 4096)
kind, uuid, size, handle = data.decode().split()
export = PoolExport(PoolDescriptor(3, "gpu", int(size), 1 << 20, writable=False), HandleKind(kind), (), uuid,
                    bytes.fromhex(handle.strip("-")))
pool = import_device_pool(export, fds, "cuda:0")
print(int(pool.tensor()[:4096].sum()), pool.check_generations([0, 1], [7, 8]).tolist())
pool.close()
print(fake.held())
"""


@pytest.mark.slow
@pytest.mark.parametrize("by_descriptor", [True, False])
def test_another_process_reads_the_bytes_and_the_generations(
    monkeypatch: pytest.MonkeyPatch, host: HostPool, by_descriptor: bool
) -> None:
    import socket

    from prefixcache_offload.export import send_descriptors

    put(monkeypatch, FakeCuda(by_descriptor=by_descriptor))
    pool = open_pool()
    pool.set_generations([0], [7])
    assert pool.copy_in(host, [5], [0], 4096).wait(DEADLINE_S)
    export = pool.export()
    ours, theirs = socket.socketpair()
    payload = f"{export.handle} {export.device_uuid} {SIZE} {export.ipc_handle.hex() or '-'}"
    assert send_descriptors(ours, payload.encode(), export.fds) == len(payload)
    command = [sys.executable, "-c", WORKER, str(theirs.fileno())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, pass_fds=[theirs.fileno()], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == [f"{int(host.slot(5, 4096).sum())} [True, False]", "{}"], done.stderr
    for sock in (ours, theirs):
        sock.close()
    pool.close()


def test_memory_of_an_import_is_for_copies(cuda: FakeCuda) -> None:
    pool = open_pool()
    export = pool.export()
    worker: ImportedPool = import_device_pool(export, export.fds, "cuda:0")
    assert isinstance(worker.memory, Memory)
    worker.close()
    with pytest.raises(ValueError, match="closed"):
        _ = worker.memory
    pool.close()
