"""Between coded slots of a pool and an engine's tensors: what `transfer` is for raw slots.

The moves between an engine's tensors and canonical blocks are planned as ever (`engine.plan`), as if block i lay raw at
i times the raw size in some memory. Loading looks for K and V in those moves and decodes each from its slot straight
into the engine's tensor; what cannot be told apart (an array of an odd shape, a device, no torch) goes through a raw
copy. Storing always does: the codes of a channel need all of its tokens. Generations are the caller's business.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache_offload import transfer
from prefixcache_offload.codecs import arrays
from prefixcache_offload.codecs.formats import Format
from prefixcache_offload.engine import Job, Move, Pieces
from prefixcache_offload.memory import Memory
from prefixcache_offload.strides import Component, PartShape, Strided
from prefixcache_offload.units import SLOT_GRANULE

if TYPE_CHECKING:
    import torch

    from prefixcache_offload.codecs.tensors import Plane

Slots = npt.NDArray[np.uint32]
AT_ONCE_BYTES: Final = 64 << 20
"""Raw bytes of the blocks that callers give at a time, because of the raw copy."""


class CodedJob(NamedTuple):
    """Blocks of one part. `shape`, `dtype`: of the raw part. `slots`: u32[n], block i's coded slot.

    `jobs`: moves between the engine's tensors and raw blocks of `raw_stride(shape)` bytes each, block i being the i-th.
    """

    form: Format
    shape: PartShape
    dtype: str
    slots: Slots
    jobs: list[Job]

    @property
    def total_bytes(self) -> int:
        """Raw bytes to move."""
        return sum(job.total_bytes for job in self.jobs)


def raw_stride(shape: PartShape) -> int:
    """Bytes from one raw block to the next in the imagined memory: whole granules, so that they have slot numbers."""
    return -(-shape.part_bytes // SLOT_GRANULE) * SLOT_GRANULE


def raw_slots(shape: PartShape, count: int) -> Slots:
    """Slot numbers of raw blocks in the imagined memory, for planning."""
    made: Slots = (np.arange(count) * (raw_stride(shape) // SLOT_GRANULE)).astype(np.uint32)
    return made


def load(pool: Memory, coded: Sequence[CodedJob]) -> int:
    """Decode from coded slots into the engine's tensors; answer the raw bytes moved. Raises as `transfer.load`."""
    for each in coded:
        if not all(job.memory.writable for job in each.jobs):
            raise ValueError("read-only memory cannot be the target of a copy")
        planes = _planes(pool, each)
        if planes is None:
            _load_by_copy(pool, each)
        else:
            from prefixcache_offload.codecs import tensors

            tensors.decode(each.form, each.shape, planes)
    return sum(each.total_bytes for each in coded)


def store(pool: Memory, coded: Sequence[CodedJob]) -> int:
    """Encode the engine's tensors into coded slots; answer the raw bytes moved. Raises as `transfer.store`."""
    if coded and not pool.writable:
        raise ValueError("read-only memory cannot be the target of a copy")
    for each in coded:
        _store_by_copy(pool, each)
    return sum(each.total_bytes for each in coded)


# --- K and V among the moves ----------------------------------------------------------------------------------------


def _planes(pool: Memory, coded: CodedJob) -> "list[Plane] | None":
    """Every move as planes to decode to, or None if one of them cannot be told apart, is on a device, or torch is not
    there."""
    if "torch" not in sys.modules or not all(job.memory.on_host for job in coded.jobs):
        return None
    import torch

    from prefixcache_offload.codecs.tensors import Plane

    numbers = getattr(torch, coded.dtype)
    planes: list[Plane] = []
    for job in coded.jobs:
        for some in job.moves:
            found = _told_apart(coded.shape, job.itemsize, some)
            if found is None:
                return None
            for place in found:
                target = job.memory.tensor(place.engine, coded.shape.itemsize, as_source=False).view(numbers)
                planes += [
                    Plane(place.component, layers[:, heads, layer_range], target[first:last], place.first_token)
                    for first, last, layers in _coded_runs(pool, coded, place)
                    for heads, layer_range in (_spans(place, target),)
                ]
    return planes


class _Place(NamedTuple):
    """K or V of `count` blocks from `first_block` on. engine: [block, head, layer, token, dim]."""

    component: Component
    first_block: int
    head: int
    layer: int
    first_token: int
    engine: Strided


def _spans(place: _Place, target: "torch.Tensor") -> tuple[slice, slice]:
    heads, layers = target.shape[1:3]
    return slice(place.head, place.head + heads), slice(place.layer, place.layer + layers)


def _coded_runs(pool: Memory, coded: CodedJob, place: _Place) -> "Iterator[tuple[int, int, torch.Tensor]]":
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


def _told_apart(shape: PartShape, itemsize: int, some: Move | Pieces) -> list[_Place] | None:
    if isinstance(some, Pieces):
        return [place for move in some.moves() for place in _of_piece(shape, move)]
    return _of_blocks(shape, itemsize, some)


def _of_piece(shape: PartShape, move: Move) -> list[_Place]:
    """A move that `engine.plan` made: axes [run,] head, layer, token, dim; a run is of blocks or of one's tokens."""
    stride = raw_stride(shape)
    pool, engine = move.pool, move.engine
    if len(pool.shape) == 5 and pool.strides[0] != stride:
        singles = [
            Move(Strided(pool.offset + i * pool.strides[0], pool.shape[1:], pool.strides[1:]),
                 Strided(engine.offset + i * engine.strides[0], engine.shape[1:], engine.strides[1:]))
            for i in range(pool.shape[0])
        ]  # fmt: skip
        return [place for single in singles for place in _of_piece(shape, single)]
    if len(pool.shape) == 4:
        pool, engine = pool.stacked(1, stride), engine.stacked(1, 0)
    block, within = divmod(pool.offset, stride)
    head, within = divmod(within, shape.head_bytes)
    layer, within = divmod(within, shape.layer_bytes)
    k_bytes = shape.tokens * shape.k_dim * shape.itemsize
    component: Component = "k" if within < k_bytes else "v"
    token = (within - k_bytes * (component == "v")) // (shape.dim(component) * shape.itemsize)
    return [_Place(component, block, head, layer, token, engine)]


def _of_blocks(shape: PartShape, itemsize: int, move: Move) -> list[_Place] | None:
    """A move of whole blocks, dense on the pool's side: K and V are looked for among the axes of the engine's array."""
    stride = raw_stride(shape)
    block, rest = divmod(move.pool.offset, stride)
    engine = move.engine
    values = shape.part_bytes // shape.itemsize
    if itemsize != shape.itemsize:
        engine_or_none = _as_values(engine, itemsize, shape.itemsize)
        if engine_or_none is None:
            return None
        engine = engine_or_none
    if rest or engine.elements % values:
        return None
    stacked = engine.elements > values or (engine.shape[:1] == (1,) and move.pool.strides[:1] == (stride,))
    if stacked and (move.pool.strides[0] != stride or engine.shape[0] * values != engine.elements):
        return None
    split = _by_heads_and_layers(shape, engine if stacked else engine.stacked(1, 0))
    if split is None:
        return None
    k, v = split
    places = [_Place("k", block, 0, 0, 0, k)]
    return [*places, _Place("v", block, 0, 0, 0, v)] if v is not None else places


def _as_values(view: Strided, have: int, want: int) -> Strided | None:
    """The same bytes as numbers of `want` bytes, where they lie together along the last axis."""
    count = want // have
    ends = count and view.shape and view.shape[-1] % count == 0 and view.strides[-1] == have
    if not ends or any(step % want for step in view.strides[:-1]) or view.offset % want:
        return None
    return Strided(view.offset, (*view.shape[:-1], view.shape[-1] // count), (*view.strides[:-1], want))


def _by_heads_and_layers(shape: PartShape, view: Strided) -> tuple[Strided, Strided | None] | None:
    """(K, V) with axes block, head, layer, token, dim out of [block, ...] in canonical order; None for odd shapes."""
    axes = list(zip(view.shape[1:], view.strides[1:], strict=True))
    lengths = [shape.kv_heads, shape.layers]
    cut: list[tuple[int, int]] = []
    for length in lengths:
        taken = _take(axes, length)
        if taken is None:
            return None
        cut.append(taken)
    front = (view.shape[0], *[n for n, _ in cut]), (view.strides[0], *[s for _, s in cut])
    if not shape.v_dim:
        inner = _token_and_dim(axes, shape.tokens, shape.k_dim)
        return None if inner is None else (_joined(view.offset, front, inner), None)
    if len(axes) > 1 and shape.k_dim == shape.v_dim and axes[0][0] == len(("k", "v")):
        (_, step), inner = axes[0], _token_and_dim(axes[1:], shape.tokens, shape.k_dim)
        if inner is not None:
            return _joined(view.offset, front, inner), _joined(view.offset + step, front, inner)
    if len(axes) == 1:
        step = axes[0][1]
        inners = [_token_and_dim([(shape.tokens * dim, step)], shape.tokens, dim) for dim in (shape.k_dim, shape.v_dim)]
        if inners[0] is not None and inners[1] is not None:
            second = view.offset + shape.tokens * shape.k_dim * step
            return _joined(view.offset, front, inners[0]), _joined(second, front, inners[1])
    return None


def _take(axes: list[tuple[int, int]], length: int) -> tuple[int, int] | None:
    """Split `length` off the front of the axes; (length, stride), or None where they do not allow it."""
    if not axes:
        return None
    while len(axes) > 1 and axes[0][0] == 1 and length != 1:
        axes.pop(0)
    size, step = axes[0]
    if length == 1:
        return (1, 0) if size != 1 else axes.pop(0)
    if size % length:
        return None
    if size == length:
        axes.pop(0)
        return (length, step) if axes else None
    axes[0] = (size // length, step)
    return length, step * (size // length)


def _token_and_dim(axes: list[tuple[int, int]], tokens: int, dim: int) -> list[tuple[int, int]] | None:
    axes = [axis for axis in axes if axis[0] != 1]
    if [length for length, _ in axes] == [tokens, dim]:
        return axes
    if len(axes) == 1 and axes[0][0] == tokens * dim:
        return [(tokens, axes[0][1] * dim), (dim, axes[0][1])]
    return None


def _joined(offset: int, front: tuple[tuple[int, ...], tuple[int, ...]], inner: list[tuple[int, int]]) -> Strided:
    shape, strides = front
    return Strided(offset, (*shape, *[n for n, _ in inner]), (*strides, *[s for _, s in inner]))


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

    from prefixcache_offload.codecs import tensors

    shape, device = coded.shape, _device(coded)
    layers = torch.from_numpy(_gathered(pool, coded)).to(device)
    layers = layers.view(len(coded.slots), shape.kv_heads, shape.layers, -1)
    raw_copy = torch.empty((len(coded.slots), raw_stride(shape)), dtype=torch.uint8, device=device)
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
    tensors.decode(coded.form, shape, planes)
    transfer.load(Memory.of_tensor(raw_copy)[0], coded.jobs)


def _store_by_copy(pool: Memory, coded: CodedJob) -> None:
    shape = coded.shape
    if "torch" not in sys.modules:
        raw = _raw_array(coded)
        transfer.store(Memory.of_bytes(raw.reshape(-1)), coded.jobs)
        made = np.empty((len(coded.slots), coded.form.coded(shape).part_bytes), np.uint8)
        blocks = np.ascontiguousarray(raw[:, : shape.part_bytes])
        arrays.encode(coded.form, shape, coded.dtype, blocks, made)
        _scatter(pool, coded, made)
        return
    import torch

    from prefixcache_offload.codecs import tensors

    device = _device(coded)
    raw_copy = torch.empty((len(coded.slots), raw_stride(shape)), dtype=torch.uint8, device=device)
    memory, _ = Memory.of_tensor(raw_copy)
    transfer.store(memory, coded.jobs)
    memory.wait()
    blocks_of = raw_copy[:, : shape.part_bytes].contiguous()
    _scatter(pool, coded, tensors.encode(coded.form, shape, coded.dtype, blocks_of).cpu().numpy())


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


def _scatter(pool: Memory, coded: CodedJob, blocks: arrays.Bytes) -> None:
    for row, slot in zip(blocks, coded.slots.tolist(), strict=True):
        np.copyto(_slot_view(pool, coded, slot), row)
