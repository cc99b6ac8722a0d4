"""A pool in device memory, seen from the daemon.

It holds copies only: `copy_in` brings slots from the host pool, `copy_out` takes them back, each as one batch on the
pool's own stream that a `Ticket` stands for. A slot's generation is written by the caller before it names the slot to
anybody, and a slot is named only after the ticket of its `copy_in` ended without an error.
"""

import contextlib

import numpy.typing as npt

from prefixcache_offload.control import ControlPage
from prefixcache_offload.export import PoolDescriptor, PoolExport
from prefixcache_offload.generations import Control
from prefixcache_offload.gpu import cuda, driver
from prefixcache_offload.gpu.device import Batch, ContextCost, Device, DeviceMemory, PoolContext
from prefixcache_offload.gpu.errors import DeviceError, DeviceReason
from prefixcache_offload.gpu.queue import CopyQueue
from prefixcache_offload.gpu.runs import Side, merged
from prefixcache_offload.gpu.standin import StandIn
from prefixcache_offload.gpu.ticket import Ticket
from prefixcache_offload.pool import HostPool


class DevicePool:
    """A slab pool on one device. Make it with `open_device_pool`. All methods may be called from any thread."""

    def __init__(self, device: Device, memory: DeviceMemory, descriptor: PoolDescriptor) -> None:
        """Take over `device` and `memory`. Raises OSError when there is no memory for the control page."""
        self.generations = ControlPage.create(descriptor.size_bytes)
        self.descriptor = descriptor
        self._device = device
        self._memory = memory
        self._copies = CopyQueue(memory, device.name)
        self._closed = False

    @property
    def device(self) -> str:
        """The device's name: "cpu", or "cuda:" and its index in this process."""
        return self._device.name

    @property
    def device_uuid(self) -> str:
        """The same in every process: "GPU-..." as nvidia-smi shows it, or "cpu"."""
        return self._device.uuid

    @property
    def size_bytes(self) -> int:
        """What was to be had: less than asked for when the device was short of memory."""
        return self.descriptor.size_bytes

    @property
    def cost(self) -> ContextCost:
        """What beginning to use the device cost."""
        return self._device.cost

    @property
    def broken(self) -> DeviceError | None:
        """The error after which the device was given up; every further copy is refused with it."""
        return self._copies.broken

    @property
    def control(self) -> Control:
        """The generations, u64[size_bytes / 4096], writable, in host memory."""
        return self.generations.array

    def set_generations(self, slots: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Store generations u64[n] at slots u32[n]; returns after the stores. Raises IndexError outside the pool."""
        self.generations.write(slots, values)

    def export(self) -> PoolExport:
        """What to send to another process; the descriptors in it stay ours. Raises ValueError if closed."""
        if self._closed:
            raise ValueError("the pool is closed")
        pool = () if self._memory.fd is None else (self._memory.fd,)
        fds = (*pool, self.generations.fd)
        return PoolExport(self.descriptor, self._memory.handle, fds, self._device.uuid, self._memory.ipc_handle)

    def copy_in(
        self, host_pool: HostPool, source_slots: npt.ArrayLike, target_slots: npt.ArrayLike, slot_bytes: int
    ) -> Ticket:
        """Copy slots of the host pool (u32[n]) to slots of this one (u32[n]), `slot_bytes` of each.

        Raises IndexError or ValueError for slots that do not fit, DeviceError (CLOSED, BUSY, LOST). Nobody may write
        the sources or read the targets before the ticket is done. Targets of one batch must differ.
        """
        return self._copy(host_pool, Side(source_slots, host_pool.descriptor.size_bytes), target_slots, slot_bytes)

    def copy_out(
        self, host_pool: HostPool, source_slots: npt.ArrayLike, target_slots: npt.ArrayLike, slot_bytes: int
    ) -> Ticket:
        """Copy slots of this pool (u32[n]) to slots of the host pool (u32[n]); as `copy_in`."""
        side = Side(target_slots, host_pool.descriptor.size_bytes)
        return self._copy(host_pool, side, source_slots, slot_bytes, to_device=False)

    def _copy(
        self, host_pool: HostPool, host: Side, slots: npt.ArrayLike, slot_bytes: int, *, to_device: bool = True
    ) -> Ticket:
        runs = merged(host, Side(slots, self.size_bytes), slot_bytes, host_pool.descriptor.slab_bytes)
        return self._copies.submit(Batch(host_pool.data, runs, to_device))

    def close(self) -> None:
        """Finish the copies in flight, end those that wait as CLOSED, give everything back. Safe to call twice.

        Workers that imported the memory keep it until they let go of it.
        """
        self._closed = True
        self._copies.close()
        self._memory.close()
        self.generations.close()
        self._device.close()


def open_device_pool(device: str, size_bytes: int, *, context: PoolContext) -> DevicePool:
    """A pool of `size_bytes` on `device`: "cpu", "cuda:0", or "cuda:" and a UUID as nvidia-smi shows it.

    Where the device is short of memory the size is halved until it fits, with a warning, down to `context.min_bytes`.
    Raises DeviceError with a reason; nothing is left behind then.
    """
    with contextlib.ExitStack() as undo:
        opened = _open(device)
        undo.callback(opened.close)
        memory, size = _allocate(opened, size_bytes, context)
        undo.callback(memory.close)
        try:
            descriptor = PoolDescriptor(context.pool_id, "gpu", size, context.slab_bytes, writable=False)
            pool = DevicePool(opened, memory, descriptor)
        except (OSError, ValueError) as error:
            raise DeviceError(DeviceReason.OUT_OF_MEMORY, f"a pool of {size} bytes on {device}: {error}") from error
        undo.pop_all()
    return pool


def _open(device: str) -> Device:
    if device == "cpu":
        return StandIn()
    if cuda.is_cuda_name(device):
        return cuda.CudaDevice(driver.load(), device)
    raise DeviceError(DeviceReason.BAD_NAME, f"{device!r} is no device: use cuda:0, cuda:<UUID> or cpu")


def _allocate(device: Device, wanted: int, context: PoolContext) -> tuple[DeviceMemory, int]:
    step = device.granularity
    least = max(min(context.min_bytes, wanted) // step, 1) * step
    size = wanted // step * step
    while size >= least:
        try:
            memory = device.allocate(size)
        except DeviceError as error:
            if error.reason is not DeviceReason.OUT_OF_MEMORY:
                raise
            size = size // 2 // step * step
            continue
        if size < wanted // step * step:
            context.warn(f"{device.name} has no room for {wanted} bytes: the pool has {size}")
        return memory, size
    raise DeviceError(
        DeviceReason.OUT_OF_MEMORY, f"{device.name} has no room for {least} bytes, the least that a pool may have"
    )
