"""Slots in host memory beside tensors on a device: whole slots cross the bus, and are cut up on the device.

Strided pieces of host memory would cross a bus a few kilobytes at a time. So the heads that the tensors hold, which are
one stretch of each slot, go as one copy a slot into memory on the device, and from there into pages by the device's own
copies; and back. All copies are on the current stream, in order, so the memory between may be given back at once. No
device has run this yet; the order of copies is tested on the CPU.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from prefixcache_offload import transfer
from prefixcache_offload.engine import Job
from prefixcache_offload.memory import Memory
from prefixcache_offload.strides import PartShape, Span, Strided
from prefixcache_offload.units import SLOT_GRANULE

if TYPE_CHECKING:
    import torch

Slots = npt.NDArray[np.uint32]


class Staging:
    """Memory on a device for `count` slots of a part, and the copies between them and slots in host memory."""

    def __init__(self, part: PartShape, span: Span, count: int, device: "torch.device") -> None:
        """Nothing is copied yet."""
        import torch

        granules = -(-part.part_bytes // SLOT_GRANULE)
        self._first = span.first_head * part.head_bytes
        self._length = span.heads * part.head_bytes
        self._stride = granules * SLOT_GRANULE
        whole = torch.empty(count * self._stride, dtype=torch.uint8, device=device)
        self.memory = Memory.of_tensor(whole)[0]
        self.slots: Slots = (np.arange(count) * granules).astype(np.uint32)

    def fill(self, pool: Memory, slots: Slots) -> None:
        """Copy the span's heads of `slots` (u32[count]) from the pool."""
        self._move(pool, slots, to_device=True)

    def drain(self, pool: Memory, slots: Slots) -> None:
        """Copy them back."""
        self._move(pool, slots, to_device=False)

    def _move(self, pool: Memory, slots: Slots, *, to_device: bool) -> None:
        import torch

        ours = [self._view(pool, slot, as_source=to_device) for slot in slots.tolist()]
        staged = [self._view(self.memory, slot, as_source=not to_device) for slot in self.slots.tolist()]
        if ours:
            targets, sources = (staged, ours) if to_device else (ours, staged)
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def _view(self, memory: Memory, slot: int, *, as_source: bool) -> "torch.Tensor":
        place = Strided(slot * SLOT_GRANULE + self._first, (self._length,), (1,))
        return memory.tensor(place, 1, as_source=as_source)


def load(staging: Staging, pool: Memory, slots: Slots, jobs: Sequence[Job]) -> int:
    """Slots in host memory to tensors on a device; `jobs` are planned for `staging.slots`. The bytes moved."""
    staging.fill(pool, slots)
    return transfer.load(staging.memory, jobs)


def store(staging: Staging, pool: Memory, slots: Slots, jobs: Sequence[Job], *, whole: bool) -> int:
    """Tensors on a device to slots in host memory. `whole`: the jobs cover all heads staged, so nothing is read first.

    The copies back are over when the device's current stream is; see `Memory.wait`.
    """
    if not whole:
        staging.fill(pool, slots)
    moved = transfer.store(staging.memory, jobs)
    staging.drain(pool, slots)
    return moved
