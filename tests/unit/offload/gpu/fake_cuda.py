"""A CUDA driver without a device: the functions of `cuda.bindings.driver` over memory of this machine.

Enums and structs are the real ones, so a call with a wrong argument fails here as it would there. Device memory is
memory files mapped where the code says; copies happen when an event or a stream is waited for, not before. It knows
what is held: `held()` must be empty when everything was closed.

Faults: any function answers any error at its n-th call from now (`fail`); no device; less memory than asked for; memory
that cannot be shared by descriptor; no context current; a descriptor or an IPC handle that is not memory of a device;
a mapping longer than its memory.
"""

import ctypes
import mmap
import os
import struct
import threading
import types
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as real

from prefixcache_offload import memfd

GRANULARITY = 2 << 20
UUIDS = [bytes(range(16)), bytes(range(16, 32))]
NAMES = ["GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FIXED = 0x10
_NONE, _READ, _WRITE = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_MARK = b"fake device memory"

Result = tuple[Any, ...]


def error(name: str) -> Any:
    """An error number by its name."""
    return getattr(real.CUresult, name)


class FakeCuda(types.SimpleNamespace):
    """Give it to `driver.Driver`, or put it in the place of the module. `calls` are the names of all calls."""

    def __init__(self, devices: int = 1, free_bytes: int = 1 << 40, *, by_descriptor: bool = True) -> None:
        super().__init__()
        self.devices, self.free_bytes, self.by_descriptor = devices, free_bytes, by_descriptor
        self.calls: list[str] = []
        self.copies: list[tuple[str, int]] = []
        self.live: dict[str, dict[int, Any]] = {}
        self.access: list[Any] = []
        self.made_on: list[int] = []
        self.when: dict[str, tuple[int, str]] = {}
        self._current = threading.local()
        self._numbers = iter(range(1000, 1 << 30))

    def __getattr__(self, name: str) -> Any:
        """Enums and structs of the real thing."""
        if name.startswith("cu"):
            raise AttributeError(name)
        return getattr(real, name)

    def fail(self, name: str, code: str, after: int = 0) -> None:
        """Let function `name` answer `code` once, `after` calls from now."""
        self.when[name] = (after, code)

    def held(self) -> dict[str, int]:
        """What was not given back, by kind."""
        return {kind: len(things) for kind, things in self.live.items() if things}

    def _enter(self, name: str, *, context: bool = False) -> Any:
        self.calls.append(name)
        after, code = self.when.get(name, (-1, ""))
        if after == 0:
            del self.when[name]
            return error(code)
        if after > 0:
            self.when[name] = (after - 1, code)
        if context and not getattr(self._current, "stack", []):
            return error("CUDA_ERROR_INVALID_CONTEXT")
        return error("CUDA_SUCCESS")

    def _hold(self, kind: str, thing: Any, number: int | None = None) -> int:
        key = next(self._numbers) if number is None else number
        self.live.setdefault(kind, {})[key] = thing
        return key

    def _drop(self, name: str, kind: str, key: Any, end: Callable[[Any], Any] = lambda thing: None) -> Result:
        code = self._enter(name)
        thing = self.live.get(kind, {}).pop(int(key), None)  # also when told to fail: the test counts what was tried
        if thing is None:
            return (error("CUDA_ERROR_INVALID_VALUE"),)
        end(thing)
        return (code,)

    # devices and contexts

    def cuInit(self, flags: int) -> Result:
        assert flags == 0
        return (self._enter("cuInit"),)

    def cuDeviceGetCount(self) -> Result:
        return self._enter("cuDeviceGetCount"), self.devices

    def cuDeviceGet(self, index: int) -> Result:
        return self._enter("cuDeviceGet"), index

    def cuDeviceGetUuid(self, device: int) -> Result:
        made = real.CUuuid()
        ctypes.memmove(made.getPtr(), UUIDS[device], 16)
        return self._enter("cuDeviceGetUuid"), made

    def cuDeviceGetAttribute(self, which: Any, device: int) -> Result:
        assert isinstance(which, real.CUdevice_attribute)
        return self._enter("cuDeviceGetAttribute"), int(self.by_descriptor)

    def cuDevicePrimaryCtxRetain(self, device: int) -> Result:
        code = self._enter("cuDevicePrimaryCtxRetain")
        return (code, self._hold("contexts", device, None)) if not code else (code, 0)

    def cuDevicePrimaryCtxRelease(self, device: int) -> Result:
        contexts = self.live.get("contexts", {})
        key = next((key for key, of in contexts.items() if of == device), 0)
        return self._drop("cuDevicePrimaryCtxRelease", "contexts", key)

    def cuCtxPushCurrent(self, context: int) -> Result:
        code = self._enter("cuCtxPushCurrent")
        if not code:
            self._current.stack = [*getattr(self._current, "stack", []), context]
        return (code,)

    def cuCtxPopCurrent(self) -> Result:
        code = self._enter("cuCtxPopCurrent", context=True)
        return code, self._current.stack.pop()

    def cuMemGetInfo(self) -> Result:
        return self._enter("cuMemGetInfo", context=True), self.free_bytes, self.free_bytes + 300

    # memory that has no address yet

    def cuMemGetAllocationGranularity(self, wanted: Any, option: Any) -> Result:
        assert option == real.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return self._enter("cuMemGetAllocationGranularity"), GRANULARITY

    def cuMemCreate(self, size: int, wanted: Any, flags: int) -> Result:
        code = self._enter("cuMemCreate")
        kinds = real.CUmemAllocationHandleType
        assert wanted.requestedHandleTypes == kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        assert wanted.location.type == real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        assert (flags, size % GRANULARITY) == (0, 0)
        self.made_on.append(wanted.location.id)
        if code or size > self.free_bytes:
            return code or error("CUDA_ERROR_OUT_OF_MEMORY"), 0
        return code, self._hold("memory", _file(size))

    def cuMemRelease(self, handle: int) -> Result:
        return self._drop("cuMemRelease", "memory", handle, os.close)

    def cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> Result:
        code = self._enter("cuMemExportToShareableHandle")
        assert (kind.name, flags) == ("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", 0)
        return code, -1 if code else os.dup(self.live["memory"][handle])

    def cuMemImportFromShareableHandle(self, fd: int, kind: Any) -> Result:
        code = self._enter("cuMemImportFromShareableHandle")
        if not code and not _is_ours(fd):
            code = error("CUDA_ERROR_INVALID_VALUE")
        return code, 0 if code else self._hold("memory", os.dup(fd))

    # addresses

    def cuMemAddressReserve(self, size: int, alignment: int, hint: int, flags: int) -> Result:
        assert (alignment, hint, flags) == (0, 0, 0)
        code = self._enter("cuMemAddressReserve")
        if code:
            return code, 0
        address = _libc.mmap(None, size, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        return code, self._hold("addresses", size, address)

    def cuMemAddressFree(self, address: int, size: int) -> Result:
        assert self.live["addresses"][address] == size
        assert address not in self.live.get("mappings", {}), "freed while mapped"
        return self._drop("cuMemAddressFree", "addresses", address, lambda size: _libc.munmap(address, size))

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> Result:
        assert (offset, flags) == (0, 0)
        assert self.live["addresses"][address] == size
        code, fd = self._enter("cuMemMap"), self.live["memory"][handle]
        if not code and os.fstat(fd).st_size != size:
            code = error("CUDA_ERROR_INVALID_VALUE")
        if not code:
            assert _libc.mmap(address, size, _NONE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == address
            self._hold("mappings", size, address)
        return (code,)

    def cuMemUnmap(self, address: int, size: int) -> Result:
        def unmap(held: int) -> None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
            _libc.mmap(address, held, _NONE, flags, -1, 0)

        return self._drop("cuMemUnmap", "mappings", address, unmap)

    def cuMemSetAccess(self, address: int, size: int, wanted: list[Any], count: int) -> Result:
        assert len(wanted) == count == 1
        code = self._enter("cuMemSetAccess")
        if not code:
            self.access.append(wanted[0].flags)
            write = wanted[0].flags == real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _libc.mprotect(address, size, _WRITE if write else _READ)
        return (code,)

    # legacy memory

    def cuMemAlloc(self, size: int) -> Result:
        code = self._enter("cuMemAlloc", context=True)
        if code or size > self.free_bytes:
            return code or error("CUDA_ERROR_OUT_OF_MEMORY"), 0
        fd = _file(size)
        address = _libc.mmap(None, size, _WRITE, mmap.MAP_SHARED, fd, 0)
        return code, self._hold("allocations", (fd, size), address)

    def cuMemFree(self, address: int) -> Result:
        return self._drop("cuMemFree", "allocations", address, lambda held: _unmap_file(address, held))

    def cuIpcGetMemHandle(self, address: int) -> Result:
        made = real.CUipcMemHandle()
        code = self._enter("cuIpcGetMemHandle", context=True)
        if not code:
            packed = struct.pack("<iiq48x", os.getpid(), *self.live["allocations"][address])
            ctypes.memmove(made.getPtr(), packed, 64)
        return code, made

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> Result:
        assert flags == int(real.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        code = self._enter("cuIpcOpenMemHandle", context=True)
        pid, fd, size = struct.unpack("<iiq48x", ctypes.string_at(handle.getPtr(), 64))
        if code or not os.path.exists(f"/proc/{pid}/fd/{fd}"):
            return code or error("CUDA_ERROR_INVALID_HANDLE"), 0
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        address = _libc.mmap(None, size, _WRITE, mmap.MAP_SHARED, own, 0)
        return code, self._hold("opened", (own, size), address)

    def cuIpcCloseMemHandle(self, address: int) -> Result:
        return self._drop("cuIpcCloseMemHandle", "opened", address, lambda held: _unmap_file(address, held))

    def cuMemGetAddressRange(self, address: int) -> Result:
        return self._enter("cuMemGetAddressRange", context=True), address, self.live["opened"][address][1]

    # streams, events, copies

    def cuStreamCreate(self, flags: int) -> Result:
        assert flags == int(real.CUstream_flags.CU_STREAM_NON_BLOCKING)
        code = self._enter("cuStreamCreate", context=True)
        return (code, 0) if code else (code, self._hold("streams", []))

    def cuStreamDestroy(self, stream: int) -> Result:
        return self._drop("cuStreamDestroy", "streams", stream, _all_done)

    def cuStreamSynchronize(self, stream: int) -> Result:
        code = self._enter("cuStreamSynchronize", context=True)
        return (code or self._run(self.live["streams"][stream]),)

    def cuEventCreate(self, flags: int) -> Result:
        assert flags == int(real.CUevent_flags.CU_EVENT_BLOCKING_SYNC) | int(real.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        code = self._enter("cuEventCreate", context=True)
        return (code, 0) if code else (code, self._hold("events", []))

    def cuEventDestroy(self, event: int) -> Result:
        return self._drop("cuEventDestroy", "events", event)

    def cuEventRecord(self, event: int, stream: int) -> Result:
        code = self._enter("cuEventRecord", context=True)
        if not code:
            self.live["events"][event] = self.live["streams"][stream]
        return (code,)

    def cuEventSynchronize(self, event: int) -> Result:
        code = self._enter("cuEventSynchronize", context=True)
        return (code or self._run(self.live["events"][event]),)

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> Result:
        return self._copy("cuMemcpyHtoDAsync", (target, source, size), stream)

    def cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> Result:
        return self._copy("cuMemcpyDtoHAsync", (target, source, size), stream)

    def _copy(self, name: str, copy: tuple[int, int, int], stream: int) -> Result:
        code = self._enter(name, context=True)
        if not code:
            self.copies.append((name, copy[2]))
            self.live["streams"][stream].append(copy)
        return (code,)

    def _run(self, waiting: list[tuple[int, int, int]]) -> Any:
        while waiting:
            ctypes.memmove(*waiting.pop(0))
        return error("CUDA_SUCCESS")


def _file(size: int) -> int:
    return memfd.create(_MARK.decode(), size)


def _is_ours(fd: int) -> bool:
    return _MARK.decode() in os.readlink(f"/proc/self/fd/{fd}")


def _unmap_file(address: int, held: tuple[int, int]) -> None:
    fd, size = held
    _libc.munmap(address, size)
    os.close(fd)


def _all_done(waiting: list[Any]) -> None:
    assert not waiting, "a stream was destroyed with copies in flight"
