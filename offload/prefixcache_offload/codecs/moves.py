"""Between coded slots of a pool and an engine's tensors: what `transfer` is for raw slots.

The moves between an engine's tensors and canonical blocks are planned as ever (`engine.plan`), as if block i lay raw at
i times the raw size in some memory. Loading looks for K and V in those moves and decodes each from its slot straight
into the engine's tensor; what cannot be told apart (an array of an odd shape, a device, no torch) goes through a raw
copy. Storing always does: the codes of a channel need all of its tokens. Generations are the caller's business.
"""

import dataclasses
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache_offload import transfer
from prefixcache_offload.codecs import arrays, tensors
from prefixcache_offload.codecs.apart import Place, raw_stride, told_apart
from prefixcache_offload.codecs.formats import Format
from prefixcache_offload.engine import Job
from prefixcache_offload.memory import Memory
from prefixcache_offload.strides import Component, PartShape, Strided
from prefixcache_offload.units import SLOT_GRANULE

if TYPE_CHECKING:
    import torch

Slots = npt.NDArray[np.uint32]
AT_ONCE_BYTES: Final = 32 << 20
"""Raw bytes of the blocks that callers give at a time, because of the raw copy."""

_local = threading.local()


class CodedJob(NamedTuple):
    """Blocks of one part. `shape`, `dtype`: of the raw part. `slots`: u32[n], block i's coded slot.

    `jobs`: moves between the engine's tensors and raw blocks of `raw_stride(shape)` bytes each, block i being the i-th.
    `heads`, `layers`: what of the blocks a store writes, where others write the rest; None is all.
    """

    form: Format
    shape: PartShape
    dtype: str
    slots: Slots
    jobs: list[Job]
    heads: range | None = None
    layers: range | None = None

    @property
    def written(self) -> PartShape:
        """The shape of what a store writes of each block, raw."""
        heads = self.shape.kv_heads if self.heads is None else len(self.heads)
        layers = self.shape.layers if self.layers is None else len(self.layers)
        return dataclasses.replace(self.shape, kv_heads=heads, layers=layers)

    @property
    def place(self) -> tuple[slice, slice]:
        """Where among heads and layers that is."""
        return _slice(self.heads), _slice(self.layers)

    @property
    def total_bytes(self) -> int:
        """Raw bytes to move."""
        return sum(job.total_bytes for job in self.jobs)


def _slice(some: range | None) -> slice:
    return slice(None) if some is None else slice(some.start, some.stop)


def raw_slots(shape: PartShape, count: int) -> Slots:
    """Slot numbers of raw blocks in the imagined memory, for planning."""
    made: Slots = (np.arange(count) * (raw_stride(shape) // SLOT_GRANULE)).astype(np.uint32)
    return made


def load(pool: Memory, coded: Sequence[CodedJob]) -> int:
    """Decode from coded slots into the engine's tensors; answer the raw bytes moved. Raises as `transfer.load`."""
    if not all(job.memory.writable for each in coded for job in each.jobs):
        raise ValueError("read-only memory cannot be the target of a copy")
    work: list[tensors.CodedPlanes] = []
    for each in coded:
        planes = _planes(pool, each)
        if planes is None:
            _load_by_copy(pool, each)
        else:
            work.append(tensors.CodedPlanes(each.form, each.shape, planes))
    if work:
        tensors.decode(work)  # all at once: threads wait for each other only at the end
    return sum(each.total_bytes for each in coded)


def store(pool: Memory, coded: Sequence[CodedJob]) -> int:
    """Encode the engine's tensors into coded slots; answer the raw bytes moved. Raises as `transfer.store`."""
    if coded and not pool.writable:
        raise ValueError("read-only memory cannot be the target of a copy")
    for each in coded:
        _store_by_copy(pool, each)
    return sum(each.total_bytes for each in coded)


# --- K and V among the moves ----------------------------------------------------------------------------------------


def _planes(pool: Memory, coded: CodedJob) -> list[tensors.Plane] | None:
    """Every move as planes to decode to, or None if one of them cannot be told apart, is on a device, or torch is not
    there."""
    on_host = pool.on_host and all(job.memory.on_host for job in coded.jobs)
    if "torch" not in sys.modules or not on_host:
        return None
    import torch

    numbers = getattr(torch, coded.dtype)
    planes: list[tensors.Plane] = []
    for job in coded.jobs:
        for some in job.moves:
            found = told_apart(coded.shape, job.itemsize, some)
            if found is None:
                return None
            for place in found:
                target = job.memory.tensor(place.engine, coded.shape.itemsize, as_source=False).view(numbers)
                planes += [
                    tensors.Plane(place.component, layers[:, heads, layer_range], target[first:last], place.first_token)
                    for first, last, layers in _coded_runs(pool, coded, place)
                    for heads, layer_range in (_spans(place, target),)
                ]
    return planes


def _spans(place: Place, target: "torch.Tensor") -> tuple[slice, slice]:
    heads, layers = target.shape[1:3]
    return slice(place.head, place.head + heads), slice(place.layer, place.layer + layers)


def _coded_runs(pool: Memory, coded: CodedJob, place: Place) -> "Iterator[tuple[int, int, torch.Tensor]]":
    """(first, last, u8[blocks, head, layer, coded layer bytes]) of stretches whose slots lie at equal distances."""
    shape = coded.form.coded(coded.shape)
    count = place.engine.shape[0]
    starts = coded.slots[place.first_block : place.first_block + count].astype(np.int64) * SLOT_GRANULE
    inner = (shape.kv_heads, shape.layers, shape.layer_bytes)
    strides = (shape.head_bytes, shape.layer_bytes, 1)
    first = 0
    while first < count:
        last, step = first + 1, 0
        if last < count and starts[last] > starts[first]:
            step = int(starts[last] - starts[first])
            while last < count and starts[last] - starts[last - 1] == step:
                last += 1
        view = Strided(int(starts[first]), (last - first, *inner), (step, *strides))
        yield first, last, pool.tensor(view, 1, as_source=True)
        first = last


# --- by way of a raw copy -------------------------------------------------------------------------------------------


def _load_by_copy(pool: Memory, coded: CodedJob) -> None:
    if "torch" not in sys.modules:
        raw = _raw_array(coded)
        blocks = np.empty((len(coded.slots), coded.shape.part_bytes), np.uint8)
        arrays.decode(coded.form, coded.shape, coded.dtype, _gathered(pool, coded), blocks)
        raw[:, : coded.shape.part_bytes] = blocks
        transfer.load(Memory.of_bytes(raw.reshape(-1)), coded.jobs)
        return
    import torch

    shape, device = coded.shape, _device(coded)
    layers = _gathered_to(pool, coded, device)
    layers = layers.view(len(coded.slots), shape.kv_heads, shape.layers, -1)
    raw_copy = _raw_tensor(coded, device)
    numbers = raw_copy[:, : shape.part_bytes].view(getattr(torch, coded.dtype))
    numbers = numbers.unflatten(1, (shape.kv_heads, shape.layers, -1))
    planes, at = [], 0
    names: tuple[Component, ...] = ("k", "v")
    for component in names:
        size = shape.tokens * shape.dim(component)
        if size:
            target = numbers[..., at : at + size].unflatten(-1, (shape.tokens, shape.dim(component)))
            planes.append(tensors.Plane(component, layers, target, 0))
        at += size
    tensors.decode([tensors.CodedPlanes(coded.form, shape, planes)])
    transfer.load(Memory.of_tensor(raw_copy)[0], coded.jobs)


def _store_by_copy(pool: Memory, coded: CodedJob) -> None:
    shape, written = coded.shape, coded.written
    axes = (shape.kv_heads, shape.layers, shape.layer_bytes)
    heads, layers = coded.place
    if "torch" not in sys.modules:
        raw = _raw_array(coded)
        transfer.store(Memory.of_bytes(raw.reshape(-1)), coded.jobs)
        made = np.empty((len(coded.slots), coded.form.coded(written).part_bytes), np.uint8)
        blocks = raw[:, : shape.part_bytes].reshape(-1, *axes)[:, heads, layers]
        arrays.encode(coded.form, written, coded.dtype, np.ascontiguousarray(blocks).reshape(len(made), -1), made)
        _scatter(pool, coded, made)
        return

    device = _device(coded)
    raw_copy = _raw_tensor(coded, device)
    memory, _ = Memory.of_tensor(raw_copy)
    transfer.store(memory, coded.jobs)
    memory.wait()
    blocks_of = raw_copy[:, : shape.part_bytes].unflatten(1, axes)[:, heads, layers].flatten(1).contiguous()
    if device.type != "cpu" or not pool.on_host or written != shape:
        _scatter(pool, coded, tensors.encode(coded.form, written, coded.dtype, blocks_of).cpu().numpy())
        return
    size = coded.form.coded(shape).part_bytes
    views = [Strided(slot * SLOT_GRANULE, (size,), (1,)) for slot in coded.slots.tolist()]
    targets = [pool.tensor(view, 1, as_source=False) for view in views]
    tensors.encode_into(coded.form, shape, coded.dtype, blocks_of, targets)


def _raw_tensor(coded: CodedJob, device: "torch.device") -> "torch.Tensor":
    """u8[n, raw stride] to copy through; on the host this thread's own and used again: fresh memory costs more than
    the copy."""
    import torch

    shape = (len(coded.slots), raw_stride(coded.shape))
    if device.type != "cpu":
        return torch.empty(shape, dtype=torch.uint8, device=device)
    size = shape[0] * shape[1]
    kept = getattr(_local, "raw", None)
    if kept is None or kept.numel() < size:
        kept = torch.empty(size, dtype=torch.uint8)
        if size <= AT_ONCE_BYTES:
            _local.raw = kept
    made: torch.Tensor = kept[:size].view(shape)
    return made


def _raw_array(coded: CodedJob) -> arrays.Bytes:
    return np.empty((len(coded.slots), raw_stride(coded.shape)), np.uint8)


def _device(coded: CodedJob) -> "torch.device":
    import torch

    return next((job.memory.device for job in coded.jobs if not job.memory.on_host), torch.device("cpu"))


def _slot_view(pool: Memory, coded: CodedJob, slot: int) -> arrays.Bytes:
    size = coded.form.coded(coded.shape).part_bytes
    return pool.array(Strided(slot * SLOT_GRANULE, (size,), (1,)), 1)


def _gathered(pool: Memory, coded: CodedJob) -> arrays.Bytes:
    """u8[n, coded part bytes] of the slots."""
    made = np.empty((len(coded.slots), coded.form.coded(coded.shape).part_bytes), np.uint8)
    for row, slot in zip(made, coded.slots.tolist(), strict=True):
        np.copyto(row, _slot_view(pool, coded, slot))
    return made


def _gathered_to(pool: Memory, coded: CodedJob, device: "torch.device") -> "torch.Tensor":
    """The same on a device, also from a pool on one."""
    import torch

    if pool.on_host:
        return torch.from_numpy(_gathered(pool, coded)).to(device)
    size = coded.form.coded(coded.shape).part_bytes
    views = [Strided(slot * SLOT_GRANULE, (size,), (1,)) for slot in coded.slots.tolist()]
    return torch.stack([pool.tensor(view, 1, as_source=True) for view in views]).to(device)


def _scatter(pool: Memory, coded: CodedJob, blocks: arrays.Bytes) -> None:
    """u8[n, coded bytes of what is written] into the slots; each head's layers lie together, its own as well."""
    shape, written = coded.form.coded(coded.shape), coded.form.coded(coded.written)
    first_head, first_layer = (0 if some is None else some.start for some in (coded.heads, coded.layers))
    offset = first_head * shape.head_bytes + first_layer * shape.layer_bytes
    axes = (written.kv_heads, written.layers * written.layer_bytes)
    for row, slot in zip(blocks, coded.slots.tolist(), strict=True):
        view = Strided(slot * SLOT_GRANULE + offset, axes, (shape.head_bytes, 1))
        np.copyto(pool.array(view, 1), row.reshape(axes))
