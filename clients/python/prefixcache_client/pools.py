"""The daemon's pools in this process: mapped over the local channel, checked before and after use.

A pool belongs to one session; when the session ends its mappings are dropped, and memory that an array still holds goes
with that array. No calls are made here beyond MapPool, and nothing is known of leases.
"""

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from prefixcache.v1 import common_pb2, local_pb2
from prefixcache_client.devices import WorkerDevice
from prefixcache_client.errors import Unreachable
from prefixcache_client.local import LocalTransport
from prefixcache_client.runs import SlotRun
from prefixcache_client.transport import MAP_POOL, unreadable
from prefixcache_offload.export import HandleKind, PoolDescriptor, PoolExport
from prefixcache_offload.mapping import Bytes
from prefixcache_offload.memfd import FIXED_SIZE, BadDescriptor, get_seals
from prefixcache_offload.memory import Memory
from prefixcache_offload.pool import MappedPool
from prefixcache_offload.prefault import enter_pages
from prefixcache_offload.units import SLOT_GRANULE

if TYPE_CHECKING:
    from prefixcache_offload.gpu import ImportedPool

_STRETCH_BYTES: Final = 2 << 20
"""What is entered into the page table at once; slots are granted only where the daemon has touched memory far ahead."""


_HANDLES: Final = {
    common_pb2.POOL_HANDLE_UNSPECIFIED: HandleKind.MEMFD,
    common_pb2.POOL_HANDLE_CUDA_FD: HandleKind.CUDA_FD,
    common_pb2.POOL_HANDLE_CUDA_IPC: HandleKind.CUDA_IPC,
}


class DeviceUnusable(Unreachable):
    """A pool on this worker's device cannot be reached: the session must be opened without it."""


class MappedPools:
    """Pools by number. Thread-safe: the table is made once and only ever emptied."""

    def __init__(
        self,
        transport: LocalTransport,
        pools: Iterable[common_pb2.Pool],
        timeout_s: float,
        device: WorkerDevice | None = None,
    ) -> None:
        """Map all host pools, and those on `device`. No other call may be under way. Raises Unreachable when one cannot
        be mapped."""
        self._pools: dict[int, tuple[MappedPool, Memory]] = {}
        self._on_device: dict[int, ImportedPool] = {}
        self._lock = threading.Lock()
        self._copies = 0  # under way, off a device
        self._closed = False
        self._entered: dict[int, npt.NDArray[np.bool_]] = {}
        try:
            for pool in pools:
                if pool.tier == common_pb2.TIER_HOST:
                    mapped = _map(transport, pool.pool, timeout_s)
                    self._pools[pool.pool] = (mapped, Memory.of_bytes(mapped.data))
                    self._entered[pool.pool] = np.zeros(-(-pool.size_bytes // _STRETCH_BYTES), np.bool_)
                elif pool.tier == common_pb2.TIER_GPU and device is not None:
                    self._on_device[pool.pool] = _import(transport, pool.pool, device, timeout_s)
        except Unreachable:
            self.close()
            raise
        self.writable = all(mapped.mapping.writable for mapped, _ in self._pools.values())

    def memory(self, run: SlotRun, slot_bytes: int) -> Memory:
        """The memory of a run's pool. Raises Unreachable when the pool is gone or a slot lies outside of it."""
        imported = self._on_device.get(run.pool)
        mapped, memory = self._entry(run.pool) if imported is None else (None, _memory_of(imported))
        if run.count and int(run.slots.max()) * SLOT_GRANULE + slot_bytes > memory.size_bytes:
            raise Unreachable("the server named a slot outside of its pool")
        if mapped is not None:
            self._enter(mapped, self._entered[run.pool], run, slot_bytes)
        return memory

    def unchanged(self, runs: Sequence[SlotRun]) -> bool:
        """Whether every slot still has its generation. Call it after the copy. False also when a pool is gone."""
        try:
            return all(bool(self._checked(run).check_generations(run.slots, run.generations).all()) for run in runs)
        except (Unreachable, ValueError, IndexError):  # ValueError: dropped a moment ago
            return False

    def read_only(self, pool: int, slot: int, size_bytes: int) -> Bytes:
        """u8[size_bytes] of a slot for a user: it can never be made writable, and stays readable for ever. A copy where
        the slot is on a device."""
        imported = self._on_device.get(pool)
        if imported is not None:
            return _copied(imported, slot, size_bytes)
        try:
            return self._entry(pool)[0].slot_read_only(slot, size_bytes)
        except (IndexError, ValueError) as error:
            raise Unreachable(f"a slot cannot be read: {error}") from error

    @property
    def on_device(self) -> bool:
        """Whether some pool is on a device: then copies are made inside `copying`."""
        return bool(self._on_device)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Nothing is unmapped under a device's copies, also when the session ends meanwhile."""
        with self._lock:
            self._copies += 1
        try:
            yield
        finally:
            with self._lock:
                self._copies -= 1
            if self._closed:
                self._let_go()

    def close(self) -> None:
        """Drop the mappings; arrays still held keep their memory, and copies under way on a device theirs."""
        pools, self._pools = self._pools, {}
        while pools:
            _, (mapped, _) = pools.popitem()
            mapped.close()
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            if self._copies:
                return
            on_device, self._on_device = self._on_device, {}
        for imported in on_device.values():
            imported.close()

    def _checked(self, run: SlotRun) -> "MappedPool | ImportedPool":
        return self._on_device.get(run.pool) or self._entry(run.pool)[0]

    def _enter(self, mapped: MappedPool, entered: npt.NDArray[np.bool_], run: SlotRun, slot_bytes: int) -> None:
        """Enter the pages of slots met for the first time, a stretch at a time; the daemon has touched them."""
        starts = run.slots.astype(np.int64) * SLOT_GRANULE
        touched = np.zeros_like(entered)
        for offset in range(0, slot_bytes, _STRETCH_BYTES):
            touched[(starts + offset) // _STRETCH_BYTES] = True
        touched[(starts + slot_bytes - 1) // _STRETCH_BYTES] = True
        fresh = np.flatnonzero(touched & ~entered)
        if fresh.size:
            entered[fresh] = True
            for stretch in np.split(fresh, np.flatnonzero(np.diff(fresh) != 1) + 1):
                first, last = int(stretch[0]), int(stretch[-1]) + 1
                enter_pages(mapped.mapping, first * _STRETCH_BYTES, last * _STRETCH_BYTES)

    def _entry(self, pool: int) -> tuple[MappedPool, Memory]:
        try:
            return self._pools[pool]
        except KeyError:
            raise Unreachable(f"pool {pool} is not mapped (any more)") from None


def _memory_of(imported: "ImportedPool") -> Memory:
    try:
        return imported.memory
    except ValueError as error:
        raise Unreachable(str(error)) from error


def _copied(imported: "ImportedPool", slot: int, size_bytes: int) -> Bytes:
    """The bytes of a slot on a device, in memory of their own."""
    start = slot * SLOT_GRANULE
    try:
        piece = imported.tensor()[start : start + size_bytes]
    except ValueError as error:
        raise Unreachable(f"a slot cannot be read: {error}") from error
    if len(piece) != size_bytes:
        raise Unreachable("the server named a slot outside of its pool")
    copy = piece.copy() if isinstance(piece, np.ndarray) else piece.cpu().numpy()
    copy.flags.writeable = False
    return copy


def _import(transport: LocalTransport, number: int, device: WorkerDevice, timeout_s: float) -> "ImportedPool":
    from prefixcache_offload.gpu import DeviceError, import_device_pool

    try:
        with _handed_over(transport, number, timeout_s) as (pool, fds):
            about = PoolDescriptor(pool.pool, "gpu", pool.size_bytes, SLOT_GRANULE, writable=False)
            export = PoolExport(about, _HANDLES[pool.handle], device_uuid=pool.device, ipc_handle=pool.ipc_handle)
            return import_device_pool(export, fds, device.name)
    except (DeviceError, KeyError, ValueError) as error:
        raise DeviceUnusable(f"pool {number} cannot be reached: {error}") from error


def _map(transport: LocalTransport, number: int, timeout_s: float) -> MappedPool:
    try:
        with _handed_over(transport, number, timeout_s) as (pool, fds):
            if len(fds) != len(("pool", "control")):
                raise Unreachable(f"pool {number} came with {len(fds)} descriptors instead of 2")
            return _attach(pool, *fds)
    except (BadDescriptor, OSError, ValueError) as error:
        raise Unreachable(f"pool {number} cannot be mapped: {error}") from error


@contextlib.contextmanager
def _handed_over(
    transport: LocalTransport, number: int, timeout_s: float
) -> Iterator[tuple[common_pb2.Pool, list[int]]]:
    """A pool as the server describes it, and its descriptors, which are closed at the end."""
    request = local_pb2.MapPoolRequest(pool=number).SerializeToString()
    payload, fds = transport.call_for_descriptors(MAP_POOL, request, timeout_s)
    try:
        try:
            pool = local_pb2.MapPoolResponse.FromString(payload).pool
        except DecodeError as error:
            raise unreadable(error) from error
        yield pool, fds
    finally:
        for fd in fds:
            os.close(fd)


def _attach(pool: common_pb2.Pool, pool_fd: int, control_fd: int) -> MappedPool:
    # A pool that survives restarts is a file that cannot be sealed: taken only from a daemon of our own user.
    sealed = FIXED_SIZE in get_seals(pool_fd)
    ours = os.fstat(pool_fd).st_uid == os.geteuid()
    descriptor = PoolDescriptor(pool.pool, "host", pool.size_bytes, SLOT_GRANULE, pool.writable, sealed)
    return MappedPool.attach(descriptor, pool_fd, control_fd, writable=pool.writable, accept_unsealed=ours)
