"""What a pool asks of a device, whether it is a CUDA device or the CPU that stands in for one.

A `Device` makes memory; `DeviceMemory` copies and says how another process reaches it. A new kind of device is a file
with these two, and a line in `pool`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from prefixcache_offload.export import HandleKind
from prefixcache_offload.gpu.runs import Runs
from prefixcache_offload.mapping import Bytes

MIN_POOL_BYTES = 64 << 20
"""A pool that was halved below this is not worth its context."""


def _silent(text: str) -> None:
    del text


@dataclass(frozen=True, slots=True)
class PoolContext:
    """What the caller knows about a pool: its number, how it is cut, how small it may be, who hears warnings."""

    pool_id: int
    slab_bytes: int
    min_bytes: int = MIN_POOL_BYTES
    warn: Callable[[str], None] = _silent


@dataclass(frozen=True, slots=True)
class ContextCost:
    """What it cost to begin using a device, before the first byte of a pool.

    `host_bytes`: growth of this process. `device_used_bytes`: device memory in use right after, by whomever; an upper
    bound of what the context takes.
    """

    seconds: float = 0.0
    host_bytes: int = 0
    device_used_bytes: int = 0


class Batch(NamedTuple):
    """Copies of one ticket. `host` is the whole host pool, kept alive by it; `to_device` is the direction."""

    host: Bytes
    runs: Runs
    to_device: bool


class DeviceMemory(Protocol):
    """Memory of one pool. `start` and `finish` are only called from the pool's copy thread, in order."""

    handle: HandleKind
    ipc_handle: bytes
    fd: int | None
    """The descriptor to send, ours; None with CUDA_IPC."""

    def start(self, batch: Batch) -> object:
        """Queue the copies of a batch; answer what `finish` wants. Raises DeviceError."""
        ...

    def finish(self, started: object) -> None:
        """Wait until a started batch is over. Raises DeviceError."""
        ...

    def close(self) -> None:
        """Give everything back; no copy is under way. Safe to call twice."""
        ...


class Device(Protocol):
    """A device that pools can be made on."""

    name: str
    uuid: str
    granularity: int
    """Pools are a multiple of this many bytes."""
    cost: ContextCost

    def allocate(self, size_bytes: int) -> DeviceMemory:
        """Memory of exactly `size_bytes`. Raises DeviceError, OUT_OF_MEMORY where less might do."""
        ...

    def close(self) -> None:
        """Let go of the device; all memory was closed. Safe to call twice."""
        ...
