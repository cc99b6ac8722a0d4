"""The control page of a pool of any tier as one object: its memory, its descriptor, and what is asked of it.

The daemon makes one (`ControlPage.create`), a worker maps what it received (`ControlPage.attach`). Why comparing after
the copy is enough is told in `generations`; which generation a slot should have is decided elsewhere.
"""

import os

import numpy as np
import numpy.typing as npt

from prefixcache_offload import generations, memfd
from prefixcache_offload.generations import Control, Generations, Mask
from prefixcache_offload.mapping import Mapping, map_file
from prefixcache_offload.units import SLOT_GRANULE, control_bytes


class ControlPage:
    """One u64 generation per 4 KiB granule of a pool of `pool_bytes`, indexed by slot."""

    def __init__(self, mapping: Mapping, pool_bytes: int, fd: int | None) -> None:
        """Use `create` or `attach`. `fd` is taken over."""
        self._mapping = mapping
        self._granules = pool_bytes // SLOT_GRANULE
        self._fd = fd

    @classmethod
    def create(cls, pool_bytes: int) -> "ControlPage":
        """A fresh page that only this process can ever write (F_SEAL_FUTURE_WRITE). Raises OSError or ValueError."""
        fd = memfd.create("prefixcache-control", control_bytes(pool_bytes))
        try:
            mapping = Mapping(fd, control_bytes(pool_bytes), writable=True)
            memfd.add_seals(fd, memfd.Seal.SEAL | memfd.Seal.FUTURE_WRITE)
        except (OSError, ValueError):
            os.close(fd)
            raise
        return cls(mapping, pool_bytes, fd)

    @classmethod
    def attach(cls, fd: int, pool_bytes: int) -> "ControlPage":
        """Verify a received descriptor and map it read-only; the caller closes the descriptor.

        Raises memfd.BadDescriptor, OSError or ValueError.
        """
        return cls(map_file(fd, control_bytes(pool_bytes), writable=False), pool_bytes, None)

    @property
    def array(self) -> Control:
        """The generations, u64[pool_bytes / 4096]; writable only in the process that made the page."""
        return self._mapping.data.view(np.uint64)[: self._granules]

    @property
    def fd(self) -> int:
        """The descriptor to send; it stays ours. Raises ValueError when closed, or in a process that received it."""
        if self._fd is None:
            raise ValueError("the control page has no descriptor (any more)")
        return self._fd

    def write(self, slots: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Store generations u64[n] at slots u32[n]; returns after the stores. Raises IndexError outside the pool."""
        generations.write_generations(self.array, slots, values)

    def read(self, slots: npt.ArrayLike) -> Generations:
        """The generations now, u64[n], of slots u32[n]. Raises IndexError outside the pool."""
        return generations.read_generations(self.array, slots)

    def check(self, slots: npt.ArrayLike, expected: npt.ArrayLike) -> Mask:
        """bool[n]: which slots still have their expected generation; call it after the copy (and its event)."""
        return generations.check(self.array, slots, expected)

    def close(self) -> None:
        """Close descriptor and mapping; arrays still held keep their memory. Safe to call twice."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        self._mapping.close()
