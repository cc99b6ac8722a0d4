"""Pinning against a CUDA runtime that is not there.

Faults of the fake: no library, no device, an error from counting, a chunk the driver refuses, an unpin that fails.
"""

import threading
from collections.abc import Iterator

import pytest

from prefixcache_offload import pinning
from prefixcache_offload.pinning import LoadedRuntime, open_pinner
from prefixcache_offload.pool import HostPool, MappedPool
from prefixcache_offload.prefault import Prefault, PrefaultOptions, PrefaultState

MIB = 1 << 20


class FakeRuntime:
    """Remembers registrations; fails as told."""

    def __init__(self, devices: int = 1, count_error: int = 0, refuse_at: int | None = None) -> None:
        self.devices, self.count_error, self.refuse_at = devices, count_error, refuse_at
        self.registered: dict[int, tuple[int, int]] = {}
        self.unregister_error = 0

    def device_count(self) -> tuple[int, int]:
        return self.count_error, self.devices

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        if address == self.refuse_at:
            return 2
        self.registered[address] = (size_bytes, flags)
        return 0

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return self.unregister_error

    def error_text(self, error: int) -> str:
        return {2: "out of memory", 35: "driver too old"}[error]


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = HostPool.create(1, 8 * MIB, 2 * MIB)
    yield made
    made.close()


def test_chunks_are_pinned_before_they_are_ready_and_unpinned_at_the_end(pool: HostPool) -> None:
    runtime = FakeRuntime()
    pinner = open_pinner(pool.mapping, runtime)
    assert (pinner.enabled, pinner.reason) == (True, "")
    seen: list[tuple[int, int]] = []
    over = threading.Event()

    def on_ready(ready_bytes: int) -> None:
        seen.append((ready_bytes, pinner.pinned_bytes))
        if ready_bytes == 8 * MIB:
            over.set()

    options = PrefaultOptions(chunk_bytes=2 * MIB, prepare=pinner.register)
    running = Prefault(pool.mapping, 2 * MIB, on_ready, lambda error: None, options)
    assert running.wait(60) is PrefaultState.DONE
    assert all(pinned >= ready for ready, pinned in seen)
    base = pool.mapping.address
    assert runtime.registered == {base + i * 2 * MIB: (2 * MIB, 1) for i in range(4)}
    assert pinner.close() == []
    assert (runtime.registered, pinner.pinned_bytes, pinner.close()) == ({}, 0, [])


def test_a_refused_chunk_is_an_error_and_the_others_stay(pool: HostPool) -> None:
    runtime = FakeRuntime(refuse_at=pool.mapping.address + 4 * MIB)
    pinner = open_pinner(pool.mapping, runtime)
    pinner.register(0, 4 * MIB)
    with pytest.raises(OSError, match="out of memory"):
        pinner.register(4 * MIB, 8 * MIB)
    assert pinner.pinned_bytes == 4 * MIB
    runtime.unregister_error = 2
    assert pinner.close() == ["out of memory"]


def test_chunks_over_a_gibibyte_are_refused(pool: HostPool) -> None:
    with pytest.raises(ValueError, match="larger"):
        open_pinner(pool.mapping, FakeRuntime()).register(0, (1 << 30) + 4096)


def test_read_only_mappings_are_pinned_as_such(pool: HostPool) -> None:
    worker = MappedPool.attach(pool.descriptor, *pool.export_fds(), writable=False)
    runtime = FakeRuntime()
    open_pinner(worker.mapping, runtime).register(0, 2 * MIB)
    assert runtime.registered[worker.mapping.address] == (2 * MIB, 9)


@pytest.mark.parametrize(
    ("runtime", "reason"),
    [(FakeRuntime(devices=0), "sees no device"), (FakeRuntime(count_error=35), "driver too old")],
)
def test_without_a_device_nothing_happens_and_the_reason_is_told(
    pool: HostPool, runtime: FakeRuntime, reason: str
) -> None:
    pinner = open_pinner(pool.mapping, runtime)
    pinner.register(0, 2 * MIB)
    assert reason in pinner.reason
    assert (pinner.enabled, pinner.pinned_bytes, runtime.registered, pinner.close()) == (False, 0, {}, [])


def test_without_a_library_nothing_happens(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "_RUNTIME_NAMES", ("libno-such-runtime.so", "libc.so.6"))
    monkeypatch.setattr(pinning, "_packaged_runtimes", list)
    assert "no CUDA runtime library" in open_pinner(pool.mapping).reason


def test_a_library_is_called_with_the_right_arguments() -> None:
    calls: list[tuple[str, tuple[object, ...]]] = []

    class Function:
        def __init__(self, name: str, answer: object) -> None:
            self.name, self.answer = name, answer

        def __call__(self, *arguments: object) -> object:
            calls.append((self.name, arguments))
            if self.name == "count":
                arguments[0]._obj.value = 3  # type: ignore[attr-defined]  # what ctypes.byref points to
            return self.answer

    class Library:
        cudaGetDeviceCount = Function("count", 0)
        cudaHostRegister = Function("register", 0)
        cudaHostUnregister = Function("unregister", 0)
        cudaGetErrorString = Function("text", b"bad luck")

    runtime = LoadedRuntime(Library())  # type: ignore[arg-type]  # a stand-in for ctypes.CDLL
    assert runtime.device_count() == (0, 3)
    assert (runtime.register(4096, 8192, 1), runtime.unregister(4096), runtime.error_text(2)) == (0, 0, "bad luck")
    assert calls[1:] == [("register", (4096, 8192, 1)), ("unregister", (4096,)), ("text", (2,))]
