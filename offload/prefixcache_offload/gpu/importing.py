"""A device pool, seen from a worker: the daemon's memory on the worker's own device, and the control page.

The bytes are read only after an Acquire named their slots, on the worker's own stream; the generations are compared
after the copy and after its event. No calls to the daemon are made here.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from prefixcache_offload.control import ControlPage
from prefixcache_offload.export import HandleKind, PoolDescriptor, PoolExport
from prefixcache_offload.generations import Control, Generations, Mask
from prefixcache_offload.gpu import cuda_import
from prefixcache_offload.gpu.cuda import is_cuda_name
from prefixcache_offload.gpu.errors import DeviceError, DeviceReason
from prefixcache_offload.mapping import Bytes, map_file
from prefixcache_offload.memfd import BadDescriptor
from prefixcache_offload.memory import Memory

if TYPE_CHECKING:
    import torch

    Whole = Bytes | torch.Tensor


class ImportedPool:
    """Another process's pool. Make it with `import_device_pool`."""

    def __init__(
        self,
        descriptor: PoolDescriptor,
        whole: "Whole",
        control: ControlPage,
        let_go: Callable[[], Any],
    ) -> None:
        """Take over `control`; `let_go` unmaps the bytes."""
        self.descriptor = descriptor
        self.generations = control
        self._memory: Memory | None = (
            Memory.of_bytes(whole) if isinstance(whole, np.ndarray) else Memory.of_tensor(whole)[0]
        )
        self._bytes: Whole | None = whole
        self._let_go = let_go

    @property
    def control(self) -> Control:
        """The generations, u64[size_bytes / 4096], read-only."""
        return self.generations.array

    @property
    def memory(self) -> Memory:
        """What `transfer` copies from; it must not be the target of a copy. Raises ValueError once closed."""
        if self._memory is None:
            raise ValueError("the pool is closed")
        return self._memory

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._bytes is None

    def tensor(self) -> "Whole":
        """The whole pool: a torch u8[size_bytes] on the CUDA device, or a read-only numpy u8[size_bytes] on "cpu".

        For copies out of it only; gone with `close` on a device. Raises ValueError once closed.
        """
        if self._bytes is None:
            raise ValueError("the pool is closed")
        return self._bytes

    def read_generations(self, slots: npt.ArrayLike) -> Generations:
        """The generations now, u64[n], of slots u32[n]. Raises IndexError outside the pool."""
        return self.generations.read(slots)

    def check_generations(self, slots: npt.ArrayLike, expected: npt.ArrayLike) -> Mask:
        """bool[n]: which slots still have their expected generation; call it after the copy and its event."""
        return self.generations.check(slots, expected)

    def close(self) -> None:
        """Let go of the memory; copies from it must be over. Safe to call twice."""
        if self._bytes is None:
            return
        self._bytes = self._memory = None
        self._let_go()
        self.generations.close()


def import_device_pool(export: PoolExport, fds: Sequence[int], device: str) -> ImportedPool:
    """Reach a pool that another process exported, for copies to tensors on `device` ("cuda:1", or "cpu").

    `fds` are the received descriptors, in the order of `PoolExport.fds`; the caller closes them afterwards, also on
    errors. Raises DeviceError: WRONG_DEVICE when the pool is on another device than `device`, BAD_EXPORT when what was
    received is not what was announced, and the reasons of `open_device_pool`.
    """
    if len(fds) != export.descriptors:
        text = f"a pool of kind {export.handle} comes with {export.descriptors} descriptors, not {len(fds)}"
        raise DeviceError(DeviceReason.BAD_EXPORT, text)
    try:
        control = ControlPage.attach(fds[-1], export.descriptor.size_bytes)
    except (BadDescriptor, OSError, ValueError) as error:
        raise DeviceError(DeviceReason.BAD_EXPORT, f"the control page cannot be mapped: {error}") from error
    try:
        if export.handle is HandleKind.MEMFD:
            return _of_memory_file(export, fds[0], control, device)
        if not is_cuda_name(device):
            raise DeviceError(DeviceReason.WRONG_DEVICE, f"the pool is on device {export.device_uuid}, not on {device}")
        whole, let_go = cuda_import.import_memory(export, fds[0], device)
        return ImportedPool(export.descriptor, whole, control, let_go)
    except DeviceError:
        control.close()
        raise


def _of_memory_file(export: PoolExport, fd: int, control: ControlPage, device: str) -> ImportedPool:
    if device != "cpu":
        raise DeviceError(DeviceReason.WRONG_DEVICE, f"the pool is in host memory, not on {device}")
    try:
        mapping = map_file(fd, export.descriptor.size_bytes, writable=False)
    except (BadDescriptor, OSError, ValueError) as error:
        raise DeviceError(DeviceReason.BAD_EXPORT, f"the pool cannot be mapped: {error}") from error
    return ImportedPool(export.descriptor, mapping.data, control, mapping.close)
