"""Pages of a host pool as the SDK's tensors: no byte is copied but between the pool and the cache's slots.

Rules:
1. A key is a page, or one range of its heads (a piece). Of n pages and p pieces, position `piece * n + page` is block
   number so; all pieces of a page are loaded or it is not there.
2. Only integers are made for a transfer; what a pool looks like was described once (see forms).

It must not know SGLang, keys or calls.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixcache_client.blocks import BlockFormat
from prefixcache_offload.engine import Job, Move, Pieces, equal_steps
from prefixcache_offload.memory import Memory
from prefixcache_offload.paged import PagedCache, Stretch
from prefixcache_offload.strides import Strided
from prefixcache_offload.units import SLOT_GRANULE

Places = npt.NDArray[np.int64]
Slots = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class PiecedPages:
    """Pages in canonical order: `caches[i]` describes the pool's tensors cut to the heads of piece i. `pages`: i64[n],
    where in the pool each page is."""

    caches: Sequence[PagedCache]
    pages: Places

    def covers(self, form: BlockFormat, part: int) -> range:
        """See prefixcache_client.tensors.KvTensors."""
        return range(self.pages.size * len(self.caches))

    def jobs(self, form: BlockFormat, part: int, blocks: Places, slots: Slots) -> list[Job]:
        """See prefixcache_client.tensors.KvTensors."""
        jobs: list[Job] = []
        piece, page = np.divmod(blocks, self.pages.size)
        for index, cache in enumerate(self.caches):
            here = piece == index
            if here.any():
                stop = int(here.sum()) * form.block_tokens
                jobs += cache.jobs([Stretch(slots[here], self.pages[page[here]], 0, stop)])
        return jobs


@dataclass(frozen=True, slots=True)
class RunPages:
    """Pages of bytes nobody here understands, each a few runs of memory. `addresses`: i64[n, runs]; `sizes`: of the
    runs, the same for all pages. Whoever told the addresses keeps the memory."""

    addresses: Places
    sizes: Sequence[int]

    def covers(self, form: BlockFormat, part: int) -> range:
        """See prefixcache_client.tensors.KvTensors."""
        return range(len(self.addresses))

    def jobs(self, form: BlockFormat, part: int, blocks: Places, slots: Slots) -> list[Job]:
        """See prefixcache_client.tensors.KvTensors."""
        chosen = self.addresses[blocks]
        base = int(chosen.min())
        memory = _memory(base, int((chosen + np.asarray(self.sizes)).max()) - base)
        starts = np.cumsum([0, *self.sizes])[:-1]
        word = math.gcd(8, base, *self.sizes, *np.unique((chosen - base) % 8).tolist(), *starts.tolist())
        pool_at = slots.astype(np.int64) * SLOT_GRANULE
        moves: list[Move | Pieces] = []
        for run, (start, size) in enumerate(zip(starts.tolist(), self.sizes, strict=True)):
            shape = (size // word,)
            piece = Move(Strided(start, shape, (word,)), Strided(0, shape, (word,)))
            engine_at = chosen[:, run] - base
            moves.append(Pieces(piece, pool_at, engine_at, equal_steps(pool_at, engine_at)))
        return [Job(memory, moves, word)]


def _memory(address: int, size_bytes: int) -> Memory:
    """A range of this process's memory, of which only pieces that a pool has told are touched."""
    return Memory.of_bytes(np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address)))
