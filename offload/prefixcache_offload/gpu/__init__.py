"""Pools in device memory: `open_device_pool` for the daemon, `import_device_pool` for a worker.

Bytes only: which blocks are worth device memory, which slots may be overwritten and when a generation changes is
decided elsewhere. `device` "cpu" is a pool in a sealed memfd behind the same classes, which is how everything above
this package is tested without CUDA. Nothing here imports CUDA or torch before a CUDA device is asked for.
"""

from prefixcache_offload.gpu.device import ContextCost, PoolContext
from prefixcache_offload.gpu.errors import DeviceError, DeviceReason
from prefixcache_offload.gpu.importing import ImportedPool, import_device_pool
from prefixcache_offload.gpu.pool import DevicePool, open_device_pool
from prefixcache_offload.gpu.ticket import Ticket

__all__ = [
    "ContextCost",
    "DeviceError",
    "DevicePool",
    "DeviceReason",
    "ImportedPool",
    "PoolContext",
    "Ticket",
    "import_device_pool",
    "open_device_pool",
]
