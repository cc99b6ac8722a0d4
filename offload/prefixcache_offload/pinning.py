"""Page-locks chunks of a pool for CUDA, so that device copies run at full speed and asynchronously.

Talks to the CUDA runtime by ctypes and never imports torch. Without a runtime or a device, `open_pinner` answers a
pinner that does nothing and says why, so callers need no second path. A registered chunk is at most 1 GiB (larger ones
fail on some drivers) and ends on a slab boundary, which `chunk_ranges` sees to.
"""

import ctypes
import importlib.util
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from prefixcache_offload.mapping import Mapping

MAX_CHUNK_BYTES = 1 << 30

_REGISTER_PORTABLE = 0x01  # pinned for every context of the process
_REGISTER_READ_ONLY = 0x08
_RUNTIME_NAMES = ("libcudart.so", "libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0")


class CudaRuntime(Protocol):
    """The calls of the CUDA runtime used here; each answers 0 or an error number."""

    def device_count(self) -> tuple[int, int]:
        """(error, devices)."""
        ...

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        """CudaHostRegister."""
        ...

    def unregister(self, address: int) -> int:
        """CudaHostUnregister."""
        ...

    def error_text(self, error: int) -> str:
        """CudaGetErrorString."""
        ...


class LoadedRuntime:
    """A libcudart opened with ctypes; its calls run without the interpreter lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError when `library` is not a CUDA runtime."""
        self._get_device_count = library.cudaGetDeviceCount
        self._register = library.cudaHostRegister
        self._unregister = library.cudaHostUnregister
        self._error_string = library.cudaGetErrorString
        self._register.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._unregister.argtypes = (ctypes.c_void_p,)
        self._error_string.restype = ctypes.c_char_p

    def device_count(self) -> tuple[int, int]:
        """(error, devices)."""
        count = ctypes.c_int(0)
        error = int(self._get_device_count(ctypes.byref(count)))
        return error, count.value

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        """Page-lock a range; 0 or an error number."""
        return int(self._register(address, size_bytes, flags))

    def unregister(self, address: int) -> int:
        """Undo `register`; 0 or an error number."""
        return int(self._unregister(address))

    def error_text(self, error: int) -> str:
        """What the number means."""
        text: bytes | None = self._error_string(error)
        return (text or b"unknown error").decode(errors="replace")


class Pinner:
    """Registers chunks of one mapping. `reason` is empty, or says why nothing is pinned."""

    def __init__(self, mapping: Mapping, runtime: CudaRuntime | None, reason: str = "") -> None:
        """Use `open_pinner`."""
        self._mapping = mapping
        self._runtime = runtime
        self._lock = threading.Lock()
        self._chunks: dict[int, int] = {}
        self.reason = reason

    @property
    def enabled(self) -> bool:
        """Whether `register` does anything."""
        return self._runtime is not None

    @property
    def pinned_bytes(self) -> int:
        """Bytes registered now."""
        with self._lock:
            return sum(end - start for start, end in self._chunks.items())

    def register(self, start: int, end: int) -> None:
        """Pin [start, end) of the mapping; may be called from several threads (it is a `PrefaultOptions.prepare`).

        Raises ValueError for a chunk over 1 GiB, OSError when the driver refuses; chunks pinned before stay pinned.
        """
        if end - start > MAX_CHUNK_BYTES:
            raise ValueError(f"a chunk of {end - start} bytes is larger than {MAX_CHUNK_BYTES}")
        if self._runtime is None:
            return
        flags = _REGISTER_PORTABLE | (0 if self._mapping.writable else _REGISTER_READ_ONLY)
        error = self._runtime.register(self._mapping.address + start, end - start, flags)
        if error:
            raise OSError(f"cudaHostRegister of {end - start} bytes: {self._runtime.error_text(error)}")
        with self._lock:
            self._chunks[start] = end

    def close(self) -> list[str]:
        """Unpin everything, before the mapping is closed; answer the driver's complaints. Safe to call twice."""
        with self._lock:
            chunks, self._chunks = self._chunks, {}
        if self._runtime is None:
            return []
        errors = [self._runtime.unregister(self._mapping.address + start) for start in chunks]
        return [self._runtime.error_text(error) for error in errors if error]


def open_pinner(mapping: Mapping, runtime: CudaRuntime | None = None) -> Pinner:
    """A pinner for `mapping`, with the CUDA runtime found on this machine unless one is given. Raises nothing."""
    if runtime is None:
        runtime = next(_runtimes(), None)
    if runtime is None:
        return Pinner(mapping, None, "no CUDA runtime library was found")
    error, devices = runtime.device_count()
    if error:
        return Pinner(mapping, None, f"no usable CUDA device: {runtime.error_text(error)}")
    if not devices:
        return Pinner(mapping, None, "the CUDA runtime sees no device")
    return Pinner(mapping, runtime)


def _runtimes() -> Iterator[CudaRuntime]:
    for name in (*_RUNTIME_NAMES, *_packaged_runtimes()):
        try:
            yield LoadedRuntime(ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue


def _packaged_runtimes() -> Iterable[str]:
    """The libraries that torch's CUDA wheels bring along, found without importing anything."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(str(path) for path in Path(folder).glob("*/lib/libcudart.so*"))
