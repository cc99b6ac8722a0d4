"""The CPU as a device: pools in sealed memory files, copied by the same thread that drives a CUDA stream.

So a machine without CUDA runs every line of `pool`, `queue` and what builds on them. Faults that only a device has
are in the fake driver of the tests.
"""

import os

import numpy as np

from prefixcache_offload import memfd
from prefixcache_offload.export import HandleKind
from prefixcache_offload.gpu.device import Batch, ContextCost
from prefixcache_offload.gpu.errors import DeviceError, DeviceReason
from prefixcache_offload.mapping import Mapping
from prefixcache_offload.units import SLOT_GRANULE


class StandInMemory:
    """Memory of a pool in a memfd that no other process can map writable."""

    handle = HandleKind.MEMFD
    ipc_handle = b""

    def __init__(self, size_bytes: int) -> None:
        """Raises OSError when the kernel refuses."""
        self.fd: int | None = None
        fd = memfd.create("prefixcache-device", size_bytes)
        try:
            self._mapping = Mapping(fd, size_bytes, writable=True)
            memfd.add_seals(fd, memfd.Seal.SEAL | memfd.Seal.FUTURE_WRITE)
        except (OSError, ValueError):
            os.close(fd)
            raise
        self.fd = fd

    def start(self, batch: Batch) -> object:
        """Copy: see DeviceMemory."""
        ours = self._mapping.data
        for host, device, size in zip(*(column.tolist() for column in batch.runs), strict=True):
            there, here = batch.host[host : host + size], ours[device : device + size]
            np.copyto(here, there) if batch.to_device else np.copyto(there, here)
        return None

    def finish(self, started: object) -> None:
        """See DeviceMemory."""

    def close(self) -> None:
        """See DeviceMemory."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)
        self._mapping.close()


class StandIn:
    """The device "cpu"."""

    name = "cpu"
    uuid = "cpu"
    granularity = SLOT_GRANULE
    cost = ContextCost()

    def allocate(self, size_bytes: int) -> StandInMemory:
        """See Device."""
        try:
            return StandInMemory(size_bytes)
        except OSError as error:
            raise DeviceError(DeviceReason.OUT_OF_MEMORY, f"{size_bytes} bytes of memory: {error}") from error

    def close(self) -> None:
        """See Device."""
