"""A CUDA device: its context, memory that other processes can reach, and copies on a stream of its own.

The primary context is used, the one that torch uses too, so a process pays for one. Memory is made with cuMemCreate and
exported as a descriptor; where driver or container refuse that, with cuMemAlloc and exported by legacy CUDA IPC. Every
step registers how it is undone before the next one begins, so a failure anywhere leaves nothing behind.
"""

import contextlib
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prefixcache_offload.export import HandleKind
from prefixcache_offload.gpu.device import Batch, ContextCost
from prefixcache_offload.gpu.driver import Driver
from prefixcache_offload.gpu.errors import DeviceError, DeviceReason

_UUID: Final = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_NAME: Final = re.compile(rf"cuda:(?:(?P<index>[0-9]{{1,4}})|(?:GPU-|MIG-)?(?P<uuid>{_UUID}))")


def is_cuda_name(name: str) -> bool:
    """Whether `name` can be the name of a CUDA device."""
    return _NAME.fullmatch(name) is not None


def find(driver: Driver, name: str) -> tuple[int, str]:
    """(index in this process, UUID) of the device called `name`. Raises DeviceError with the devices there are."""
    match = _NAME.fullmatch(name)
    uuids = driver.uuids()
    for index, one in enumerate(uuids):
        if match and (match["index"] == str(index) or (match["uuid"] or "").lower() == one.removeprefix("GPU-")):
            return index, one
    seen = ", ".join(f"cuda:{index} ({one})" for index, one in enumerate(uuids)) or "none"
    raise DeviceError(DeviceReason.NO_SUCH_DEVICE, f"there is no device {name}; this process sees: {seen}")


def releasing(undo: contextlib.ExitStack, driver: Driver, name: str, *arguments: Any) -> None:
    """Have `undo` call a function of the driver that gives something back.

    Its error is ignored: a lost device refuses everything, and the driver gives the rest back when the process ends.
    """

    def release() -> None:
        with contextlib.suppress(DeviceError):
            driver.call(name, *arguments)

    undo.callback(release)


@dataclass(frozen=True, slots=True)
class Context:
    """A device's primary context, retained."""

    driver: Driver
    device: int
    index: int
    uuid: str
    handle: Any

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make it this thread's context for a while."""
        self.driver.call("cuCtxPushCurrent", self.handle)
        try:
            yield
        finally:
            with contextlib.suppress(DeviceError):
                self.driver.call("cuCtxPopCurrent")


def retain(driver: Driver, name: str, undo: contextlib.ExitStack) -> Context:
    """The context of the device called `name`; `undo` gives it back. Raises DeviceError."""
    index, uuid = find(driver, name)
    device = driver.call("cuDeviceGet", index)
    handle = driver.call("cuDevicePrimaryCtxRetain", device)
    releasing(undo, driver, "cuDevicePrimaryCtxRelease", device)
    return Context(driver, device, index, uuid, handle)


class CudaDevice:
    """See device.Device."""

    def __init__(self, driver: Driver, name: str) -> None:
        """Begin to use the device called `name`. Raises DeviceError; nothing is left behind then."""
        with contextlib.ExitStack() as undo:
            before, began = _resident_bytes(), time.perf_counter()
            self._context = retain(driver, name, undo)
            with self._context.current():
                free, total = driver.call("cuMemGetInfo")
            took = time.perf_counter() - began
            self.cost = ContextCost(took, max(_resident_bytes() - before, 0), int(total) - int(free))
            self._by_descriptor = driver.can_share_by_descriptor(self._context.device)
            self.granularity = driver.granularity(self._context.device) if self._by_descriptor else _LEGACY_GRANULARITY
            self._undo = undo.pop_all()
        self.name = f"cuda:{self._context.index}"
        self.uuid = self._context.uuid

    def allocate(self, size_bytes: int) -> "CudaMemory":
        """See Device."""
        if self._by_descriptor:
            try:
                return CudaMemory(self._context, size_bytes, _by_descriptor)
            except DeviceError as error:
                if error.reason is not DeviceReason.NOT_SUPPORTED:
                    raise
                self._by_descriptor = False
        return CudaMemory(self._context, size_bytes, _by_legacy_ipc)

    def close(self) -> None:
        """See Device."""
        self._undo.close()


_LEGACY_GRANULARITY: Final = 2 << 20
"""cuMemAlloc gives smaller sizes a place inside an allocation of others, which IPC would export whole."""


@dataclass(frozen=True, slots=True)
class _Made:
    address: int
    handle: HandleKind
    fd: int | None = None
    ipc_handle: bytes = b""


_Make = Callable[[Context, int, contextlib.ExitStack], _Made]


def _by_descriptor(context: Context, size_bytes: int, undo: contextlib.ExitStack) -> _Made:
    driver = context.driver
    handle = driver.create(context.device, size_bytes)
    releasing(undo, driver, "cuMemRelease", handle)
    fd = driver.export_fd(handle)
    undo.callback(os.close, fd)
    address = map_whole(context, handle, size_bytes, undo, write=True)
    return _Made(address, HandleKind.CUDA_FD, fd)


def map_whole(context: Context, handle: Any, size_bytes: int, undo: contextlib.ExitStack, *, write: bool) -> int:
    """The address at which memory of cuMemCreate can be used by its device; `undo` unmaps. Raises DeviceError."""
    driver = context.driver
    address = driver.call("cuMemAddressReserve", size_bytes, 0, 0, 0)
    releasing(undo, driver, "cuMemAddressFree", address, size_bytes)
    driver.call("cuMemMap", address, size_bytes, 0, handle, 0)
    releasing(undo, driver, "cuMemUnmap", address, size_bytes)
    driver.allow(address, size_bytes, context.device, write=write)
    return int(address)


def _by_legacy_ipc(context: Context, size_bytes: int, undo: contextlib.ExitStack) -> _Made:
    address = context.driver.call("cuMemAlloc", size_bytes)
    releasing(undo, context.driver, "cuMemFree", address)
    return _Made(int(address), HandleKind.CUDA_IPC, None, context.driver.ipc_handle(address))


class CudaMemory:
    """See device.DeviceMemory."""

    def __init__(self, context: Context, size_bytes: int, make: _Make) -> None:
        """Raises DeviceError; nothing is left behind then."""
        self._context, self._driver = context, context.driver
        with context.current(), contextlib.ExitStack() as undo:
            self._stream = self._driver.stream()
            releasing(undo, self._driver, "cuStreamDestroy", self._stream)
            made = make(context, size_bytes, undo)
            self._undo = undo.pop_all()
        self._address = made.address
        self.handle, self.fd, self.ipc_handle = made.handle, made.fd, made.ipc_handle

    def start(self, batch: Batch) -> object:
        """See DeviceMemory. When it raises, no copy of the batch is under way any more."""
        copy = "cuMemcpyHtoDAsync" if batch.to_device else "cuMemcpyDtoHAsync"
        base = int(batch.host.ctypes.data)
        with self._context.current():
            event = self._driver.event()
            try:
                for host, device, size in zip(*(column.tolist() for column in batch.runs), strict=True):
                    ours, theirs = self._address + device, base + host
                    target, source = (ours, theirs) if batch.to_device else (theirs, ours)
                    self._driver.call(copy, target, source, size, self._stream)
                self._driver.call("cuEventRecord", event, self._stream)
            except DeviceError:
                with contextlib.suppress(DeviceError):  # what was queued before must not outlive the ticket
                    self._driver.call("cuStreamSynchronize", self._stream)
                self._forget(event)
                raise
        return event

    def finish(self, started: object) -> None:
        """See DeviceMemory."""
        with self._context.current():
            try:
                self._driver.call("cuEventSynchronize", started)
            finally:
                self._forget(started)

    def close(self) -> None:
        """See DeviceMemory."""
        self.fd = None
        with contextlib.suppress(DeviceError), self._context.current():
            self._undo.close()
        self._undo.close()  # where the context could not be made current

    def _forget(self, event: object) -> None:
        with contextlib.suppress(DeviceError):
            self._driver.call("cuEventDestroy", event)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
