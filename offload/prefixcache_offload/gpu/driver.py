"""The calls of the CUDA driver used here, as plain numbers in and out; every error becomes a `DeviceError`.

Goes through cuda-python (`cuda.bindings.driver`, the extra `gpu`), which is imported when a CUDA device is first asked
for. Only this file knows its enums and structs. No policy: the order of calls is in `cuda` and `cuda_import`.
"""

import ctypes
import importlib
import uuid
from typing import Any, Final

from prefixcache_offload.gpu.errors import DeviceError, DeviceReason

IPC_HANDLE_BYTES: Final = 64
_UUID_BYTES: Final = 16

_R = DeviceReason
# What is not here is DRIVER: one call went wrong, the device may well go on.
_REASONS: Final = {
    "CUDA_ERROR_OUT_OF_MEMORY": _R.OUT_OF_MEMORY,
    "CUDA_ERROR_NO_DEVICE": _R.NO_SUCH_DEVICE,
    "CUDA_ERROR_INVALID_DEVICE": _R.NO_SUCH_DEVICE,
    "CUDA_ERROR_NOT_SUPPORTED": _R.NOT_SUPPORTED,
    "CUDA_ERROR_NOT_PERMITTED": _R.NOT_SUPPORTED,
    "CUDA_ERROR_OPERATING_SYSTEM": _R.NOT_SUPPORTED,
    "CUDA_ERROR_STUB_LIBRARY": _R.NO_DRIVER,
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": _R.NO_DRIVER,
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": _R.NO_DRIVER,
    "CUDA_ERROR_SYSTEM_NOT_READY": _R.NO_DRIVER,
    "CUDA_ERROR_NOT_INITIALIZED": _R.NO_DRIVER,
    "CUDA_ERROR_DEINITIALIZED": _R.LOST,
    "CUDA_ERROR_DEVICE_UNAVAILABLE": _R.LOST,
    "CUDA_ERROR_ECC_UNCORRECTABLE": _R.LOST,
    "CUDA_ERROR_NVLINK_UNCORRECTABLE": _R.LOST,
    "CUDA_ERROR_ILLEGAL_ADDRESS": _R.LOST,
    "CUDA_ERROR_HARDWARE_STACK_ERROR": _R.LOST,
    "CUDA_ERROR_LAUNCH_FAILED": _R.LOST,
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": _R.LOST,
    "CUDA_ERROR_INVALID_CONTEXT": _R.LOST,
    "CUDA_ERROR_EXTERNAL_DEVICE": _R.LOST,
    "CUDA_ERROR_UNKNOWN": _R.LOST,
}


def load() -> "Driver":
    """The driver of this machine, initialised. Raises DeviceError: NO_DRIVER, or NO_SUCH_DEVICE where it sees none."""
    try:
        module = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        text = f"cuda-python is not installed ({error}): pip install 'prefixcache[gpu]'"
        raise DeviceError(DeviceReason.NO_DRIVER, text) from error
    driver = Driver(module)
    driver.call("cuInit", 0)
    return driver


class Driver:
    """One loaded driver. Handles, addresses, streams and events are whatever cuda-python made them; treat as opaque."""

    def __init__(self, module: Any) -> None:
        """`module` is cuda.bindings.driver, or a fake of it."""
        self._cuda = module

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver; its only result, all of them as a tuple, or None.

        Raises DeviceError with the reason of its error number.
        """
        function = getattr(self._cuda, name, None)
        if function is None:
            raise DeviceError(DeviceReason.NOT_SUPPORTED, f"this cuda-python has no {name}")
        try:
            code, *values = function(*arguments)
        except RuntimeError as error:  # cuda-python's own: no library, or a driver too old for the call
            reason = DeviceReason.NO_DRIVER if name == "cuInit" else DeviceReason.NOT_SUPPORTED
            raise DeviceError(reason, f"{name}: {error}") from error
        if int(code):
            label = getattr(code, "name", str(code))
            raise DeviceError(_REASONS.get(label, DeviceReason.DRIVER), f"{name} failed: {label}")
        return values[0] if len(values) == 1 else tuple(values) or None

    def uuids(self) -> list[str]:
        """UUIDs of the devices this process sees, in the order of their indices, as "GPU-..."."""
        found = []
        for index in range(int(self.call("cuDeviceGetCount"))):
            raw = self.call("cuDeviceGetUuid", self.call("cuDeviceGet", index))
            found.append(f"GPU-{uuid.UUID(bytes=ctypes.string_at(raw.getPtr(), _UUID_BYTES))}")
        return found

    def can_share_by_descriptor(self, device: int) -> bool:
        """Whether memory can be made with cuMemCreate and handed over as a descriptor."""
        names = self._cuda.CUdevice_attribute
        return all(
            self.call("cuDeviceGetAttribute", wanted, device)
            for wanted in (
                names.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                names.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            )
        )

    def granularity(self, device: int) -> int:
        """Sizes of memory made by `create` are multiples of this."""
        least = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call("cuMemGetAllocationGranularity", self._properties(device), least))

    def create(self, device: int, size_bytes: int) -> Any:
        """Physical memory that can be exported as a descriptor."""
        return self.call("cuMemCreate", size_bytes, self._properties(device), 0)

    def export_fd(self, handle: Any) -> int:
        """A new descriptor of such memory; the caller closes it."""
        return int(self.call("cuMemExportToShareableHandle", handle, self._descriptor_type(), 0))

    def import_fd(self, fd: int) -> Any:
        """The memory behind a received descriptor, which the caller still closes."""
        return self.call("cuMemImportFromShareableHandle", fd, self._descriptor_type())

    def allow(self, address: Any, size_bytes: int, device: int, *, write: bool) -> None:
        """Let `device` use a mapped range."""
        flags = self._cuda.CUmemAccess_flags
        access = self._cuda.CUmemAccessDesc()
        access.location = self._location(device)
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if write else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self.call("cuMemSetAccess", address, size_bytes, [access], 1)

    def ipc_handle(self, address: Any) -> bytes:
        """64 bytes by which another process opens memory of cuMemAlloc."""
        handle = self.call("cuIpcGetMemHandle", address)
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)

    def open_ipc(self, handle: bytes) -> Any:
        """The address of another process's memory."""
        raw = self._cuda.CUipcMemHandle()
        ctypes.memmove(raw.getPtr(), handle, IPC_HANDLE_BYTES)
        lazy = self._cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return self.call("cuIpcOpenMemHandle", raw, int(lazy))

    def stream(self) -> Any:
        """A stream that does not wait for the default one."""
        return self.call("cuStreamCreate", int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def event(self) -> Any:
        """An event that a thread can sleep on."""
        flags = self._cuda.CUevent_flags
        return self.call("cuEventCreate", int(flags.CU_EVENT_BLOCKING_SYNC) | int(flags.CU_EVENT_DISABLE_TIMING))

    def _descriptor_type(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _location(self, device: int) -> Any:
        location = self._cuda.CUmemLocation()
        location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = int(device)
        return location

    def _properties(self, device: int) -> Any:
        wanted = self._cuda.CUmemAllocationProp()
        wanted.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location = self._location(device)
        wanted.requestedHandleTypes = self._descriptor_type()
        return wanted
