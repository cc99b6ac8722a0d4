"""Another process's device memory in this one, as a torch tensor that is only read.

The device is found by its UUID, because two processes may number devices differently. The mapping is read-only where
the driver offers that. torch is imported here and nowhere else in this package.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prefixcache_offload.export import HandleKind, PoolExport
from prefixcache_offload.gpu import driver as driver_module
from prefixcache_offload.gpu.cuda import Context, map_whole, releasing, retain
from prefixcache_offload.gpu.driver import IPC_HANDLE_BYTES
from prefixcache_offload.gpu.errors import DeviceError, DeviceReason

if TYPE_CHECKING:
    import torch


def import_memory(export: PoolExport, fd: int, device: str) -> "tuple[torch.Tensor, Callable[[], None]]":
    """(u8[size_bytes] on the device, what lets go of it). `fd` is not looked at for CUDA_IPC.

    Raises DeviceError, NO_SUCH_DEVICE and WRONG_DEVICE among others; nothing is left behind then.
    """
    size = export.descriptor.size_bytes
    with contextlib.ExitStack() as undo:
        context = retain(driver_module.load(), device, undo)
        if context.uuid != export.device_uuid:
            text = f"the pool is on device {export.device_uuid}, {device} is {context.uuid}"
            raise DeviceError(DeviceReason.WRONG_DEVICE, text)
        with context.current():
            address = _open(context, export, fd, undo)
        tensor = tensor_over(address, size, context.index)
        kept = undo.pop_all()

    def let_go() -> None:
        with contextlib.suppress(DeviceError), context.current():
            kept.close()
        kept.close()  # where the context could not be made current

    return tensor, let_go


def _open(context: Context, export: PoolExport, fd: int, undo: contextlib.ExitStack) -> int:
    driver, size = context.driver, export.descriptor.size_bytes
    if export.handle is HandleKind.CUDA_FD:
        handle = _announced(lambda: driver.import_fd(fd))
        releasing(undo, driver, "cuMemRelease", handle)
        return int(_announced(lambda: _map_read_only(context, handle, size, undo)))
    if len(export.ipc_handle) != IPC_HANDLE_BYTES:
        raise DeviceError(DeviceReason.BAD_EXPORT, f"an IPC handle has {IPC_HANDLE_BYTES} bytes")
    address = _announced(lambda: driver.open_ipc(export.ipc_handle))
    releasing(undo, driver, "cuIpcCloseMemHandle", address)
    base, length = driver.call("cuMemGetAddressRange", address)
    if int(base) != int(address) or int(length) < size:
        raise DeviceError(DeviceReason.BAD_EXPORT, f"{length} bytes were exported, announced were {size}")
    return int(address)


def _map_read_only(context: Context, handle: Any, size: int, undo: contextlib.ExitStack) -> int:
    with contextlib.ExitStack() as attempt:
        try:
            address = map_whole(context, handle, size, attempt, write=False)
        except DeviceError as error:
            if error.reason not in (DeviceReason.NOT_SUPPORTED, DeviceReason.DRIVER):
                raise
        else:
            undo.push(attempt.pop_all())
            return address
    return map_whole(context, handle, size, undo, write=True)  # a driver that knows no read-only mappings


def _announced(call: Callable[[], Any]) -> Any:
    """The driver's plain complaint about what was received means that it is not what was announced."""
    try:
        return call()
    except DeviceError as error:
        if error.reason is DeviceReason.DRIVER:
            raise DeviceError(DeviceReason.BAD_EXPORT, f"the pool cannot be imported: {error}") from error
        raise


class _Range:
    """Device memory in the form that torch takes without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        # torch accepts no read-only ranges; that nobody writes is `ImportedPool`'s word
        data = (address, False)
        self.__cuda_array_interface__ = {"version": 3, "shape": (size_bytes,), "typestr": "|u1", "data": data}


def tensor_over(address: int, size_bytes: int, index: int) -> "torch.Tensor":
    """A torch u8[size_bytes] over device memory; the memory must outlive it."""
    import torch

    made: torch.Tensor = torch.as_tensor(_Range(address, size_bytes), device=torch.device("cuda", index))
    return made
