"""Pools: the memory that slots lie in, seen from the daemon (`HostPool`) and from a worker (`MappedPool`).

`Pool` is what the daemon needs of any pool; GPU pools, and the CPU pool that stands in for one, are in `gpu`.
Which slot belongs to whom is decided elsewhere; here a slot is a place, and its generation a number somebody asked to
write.
"""

import contextlib
import mmap
import os
from typing import Protocol

import numpy.typing as npt

from prefixcache_offload import memfd, numa
from prefixcache_offload.control import ControlPage
from prefixcache_offload.export import HandleKind, PoolDescriptor, PoolExport
from prefixcache_offload.generations import Control, Generations, Mask
from prefixcache_offload.mapping import Bytes, Mapping, map_file
from prefixcache_offload.units import SLOT_GRANULE


class Pool(Protocol):
    """What the daemon asks of a pool of any tier (`HostPool`, `gpu.DevicePool`)."""

    @property
    def descriptor(self) -> PoolDescriptor:
        """What a worker is told about this pool."""
        ...

    @property
    def control(self) -> Control:
        """The generations, u64[one per granule], writable."""
        ...

    def export(self) -> PoolExport:
        """What to send to another process; the descriptors in it stay the pool's."""
        ...

    def set_generations(self, slots: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Write the generations (u64[n]) of slots (u32[n])."""
        ...

    def close(self) -> None:
        """Give the memory up; it goes when the last mapping of any process goes."""
        ...


def slot_range(data: Bytes, slot: int, size_bytes: int) -> Bytes:
    """u8[size_bytes] of `data` from `slot` on. Raises IndexError when it does not lie wholly inside."""
    start = slot * SLOT_GRANULE
    if slot < 0 or size_bytes < 0 or start + size_bytes > data.size:
        raise IndexError(f"slot {slot} with {size_bytes} bytes is outside a pool of {data.size} bytes")
    return data[start : start + size_bytes]


class _Shared:
    """The two mappings that both sides of a pool have."""

    def __init__(self, descriptor: PoolDescriptor, pool: Mapping, control: ControlPage) -> None:
        self.descriptor = descriptor
        self.mapping = pool
        self.generations = control

    @property
    def data(self) -> Bytes:
        """The whole pool, u8[size_bytes]."""
        return self.mapping.data

    @property
    def control(self) -> Control:
        """The generations, u64[size_bytes / 4096]."""
        return self.generations.array

    def slot(self, slot: int, size_bytes: int) -> Bytes:
        """The bytes of a slot, u8[size_bytes]. Raises IndexError outside the pool, ValueError once closed."""
        return slot_range(self.mapping.data, slot, size_bytes)

    def slot_read_only(self, slot: int, size_bytes: int) -> Bytes:
        """As `slot`, but for users: the array can never be made writable. It stays readable after `close`."""
        return slot_range(self.mapping.read_only(), slot, size_bytes)

    def read_generations(self, slots: npt.ArrayLike) -> Generations:
        """The generations now, u64[n], of slots u32[n]. Raises IndexError outside the pool."""
        return self.generations.read(slots)

    def check_generations(self, slots: npt.ArrayLike, expected: npt.ArrayLike) -> Mask:
        """bool[n]: which slots still have their expected generation; call it after the copy."""
        return self.generations.check(slots, expected)

    def _unmap(self) -> None:
        self.mapping.close()
        self.generations.close()


class HostPool(_Shared):
    """The daemon's side of a slab pool in a memfd of exactly the size asked for."""

    def __init__(self, descriptor: PoolDescriptor, pool_fd: int) -> None:
        """Take over `pool_fd` (already of the right size) and give it a fresh control page; use `create` or `over`."""
        self._fd: int | None = None
        try:
            control = ControlPage.create(descriptor.size_bytes)
        except (OSError, ValueError):
            os.close(pool_fd)
            raise
        try:
            pool = Mapping(pool_fd, descriptor.size_bytes, writable=True)
            with contextlib.suppress(OSError):  # a gain where the system allows it for shared memory, else nothing
                pool.advise(mmap.MADV_HUGEPAGE)
            numa.interleave(pool)
            if descriptor.sealed:
                last = memfd.Seal.SEAL if descriptor.writable else memfd.Seal.SEAL | memfd.Seal.FUTURE_WRITE
                memfd.add_seals(pool_fd, last)
        except (OSError, ValueError):
            os.close(pool_fd)
            control.close()
            raise
        super().__init__(descriptor, pool, control)
        self._fd = pool_fd

    @classmethod
    def create(cls, pool_id: int, size_bytes: int, slab_bytes: int, *, writable: bool = True) -> "HostPool":
        """Make a pool. With `writable=False` no other process can ever map it writable (F_SEAL_FUTURE_WRITE).

        No page is touched: see `prefault`. Raises ValueError for impossible sizes, OSError when the kernel refuses.
        """
        descriptor = PoolDescriptor(pool_id, "host", size_bytes, slab_bytes, writable)
        return cls(descriptor, memfd.create("prefixcache-pool", size_bytes))

    @classmethod
    def over(cls, descriptor: PoolDescriptor, fd: int) -> "HostPool":
        """A pool over an existing file (warm restart), which it takes over; `descriptor.sealed` says what it is."""
        try:
            memfd.verify(fd, descriptor.size_bytes, sealed=descriptor.sealed)
        except memfd.BadDescriptor:
            os.close(fd)
            raise
        return cls(descriptor, fd)

    def export_fds(self) -> tuple[int, int]:
        """(pool, control) descriptors to send with `export.send_descriptors`; they stay ours. ValueError if closed."""
        if self._fd is None:
            raise ValueError("the pool is closed")
        return self._fd, self.generations.fd

    def export(self) -> PoolExport:
        """What to send to another process; the descriptors in it stay ours. Raises ValueError if closed."""
        return PoolExport(self.descriptor, HandleKind.MEMFD, self.export_fds())

    def set_generations(self, slots: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Store generations u64[n] at slots u32[n]; returns after the stores. Raises IndexError outside the pool."""
        self.generations.write(slots, values)

    def close(self) -> None:
        """Close descriptors and mappings; arrays still held keep their memory. Safe to call twice."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        self._unmap()


class MappedPool(_Shared):
    """A worker's side of a pool: the pool mapped as its descriptor allows, the control page read-only."""

    @classmethod
    def attach(
        cls, descriptor: PoolDescriptor, pool_fd: int, control_fd: int, *, writable: bool, accept_unsealed: bool = False
    ) -> "MappedPool":
        """Verify both received descriptors and map them; the caller closes the descriptors afterwards, also on errors.

        `writable` must not ask for more than `descriptor.writable`. A pool that is not sealed is refused unless
        `accept_unsealed`. Raises memfd.BadDescriptor, OSError, or ValueError for such a request.
        """
        if writable and not descriptor.writable:
            raise ValueError(f"pool {descriptor.pool_id} may only be read")
        if not (descriptor.sealed or accept_unsealed):
            raise memfd.BadDescriptor(f"pool {descriptor.pool_id} is not sealed against resizing")
        pool = map_file(pool_fd, descriptor.size_bytes, writable=writable, sealed=descriptor.sealed)
        try:
            control = ControlPage.attach(control_fd, descriptor.size_bytes)
        except (memfd.BadDescriptor, OSError, ValueError):
            pool.close()
            raise
        return cls(descriptor, pool, control)

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self.mapping.closed

    def close(self) -> None:
        """Drop both mappings; arrays a user still holds stay readable. Safe to call twice."""
        self._unmap()
