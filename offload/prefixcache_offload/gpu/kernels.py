"""Pages to slots and back on a device, in one launch for all layers and blocks of one shape.

A list copy of strided views launches a kernel a view, some thousands for a prompt; here a table says where each tensor
and each piece begins, and one kernel moves all of them. It moves whole words and computes nothing, so every dtype comes
through bit for bit. Works for any `Job`s whose views are made of forward steps; what has more than four axes that
cannot be merged is left to torch.

triton (the extra `gpu`) and torch are imported at first use. With TRITON_INTERPRET=1 the same kernel runs on host
memory, which is how it is tested without a device.
"""

import contextlib
import importlib.util
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache_offload.engine import Job
from prefixcache_offload.memory import Memory
from prefixcache_offload.strides import Strided

Offsets = npt.NDArray[np.int64]

_RANK: Final = 4
_WORDS: Final = (8, 4, 2, 1)
_BLOCK_WORDS: Final = 1024
_MAX_ROWS: Final = 1 << 30
_MAX_WORDS: Final = 65535 * _BLOCK_WORDS
"""The grid's second axis ends there, and indices stay within 32 bits."""


class Axis(NamedTuple):
    """Length, and byte strides in the pool and in the tensor."""

    length: int
    pool: int
    engine: int


class Shape(NamedTuple):
    """Four axes, the innermost last, in words of `word` bytes; padded in front with axes of length one."""

    axes: tuple[Axis, ...]
    word: int

    @property
    def words(self) -> int:
        """Words of one piece."""
        return int(np.prod([axis.length for axis in self.axes], dtype=np.int64))


class Launch(NamedTuple):
    """Pieces of one shape. Addresses of each tensor's piece 0 on both sides i64[t], offsets of each piece i64[n]."""

    shape: Shape
    pool: list[int]
    engine: list[int]
    pool_at: Offsets
    engine_at: Offsets


def can_run_on(device: str) -> bool:
    """Whether `device` ("cuda:0") is one that the kernel runs on, and triton is installed; imports nothing."""
    return device.startswith("cuda") and _installed()


@lru_cache(maxsize=1)
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def launches(pool: Memory, jobs: Sequence[Job]) -> list[Launch] | None:
    """What to launch for `jobs`, or None when a piece has too many axes.

    Raises ValueError when a piece reaches out of its memory, on either side: the kernel itself checks nothing.
    """
    grouped: dict[tuple[Any, ...], Launch] = {}
    for job in jobs:
        engine_start, pool_start = job.memory.identity[1], pool.identity[1]
        for some in job.moves:
            piece, pool_at, engine_at = some.spread()
            if not pool_at.size or not piece.pool.elements:
                continue
            for memory, view, at in ((pool, piece.pool, pool_at), (job.memory, piece.engine, engine_at)):
                _check(view, job.itemsize, at, memory.size_bytes)
            axes = [Axis(*each) for each in zip(*piece.pool[1:], piece.engine.strides, strict=True)]
            ours, theirs = pool_start + piece.pool.offset, engine_start + piece.engine.offset
            shape = _shape(axes, job.itemsize, (ours, theirs), (pool_at, engine_at))
            if shape is None:
                return None
            key = (shape, pool_at.tobytes(), engine_at.tobytes())
            launch = grouped.setdefault(key, Launch(shape, [], [], pool_at, engine_at))
            launch.pool.append(ours)
            launch.engine.append(theirs)
    return list(grouped.values())


def move(found: Iterable[Launch], device: str, *, to_engine: bool) -> None:
    """Launch on the current stream of `device` ("cuda:0"; "cpu" when triton interprets)."""
    import torch

    for launch in found:
        pieces, tensors = launch.pool_at.size, len(launch.pool)
        if pieces * tensors > _MAX_ROWS:
            raise ValueError(f"{pieces * tensors} pieces are more than one launch can take")
        if launch.shape.words > _MAX_WORDS:
            raise ValueError(f"a piece of {launch.shape.words} words is more than one launch can take")
        table = torch.from_numpy(_table(launch))
        if device != "cpu":
            table = table.pin_memory().to(device, non_blocking=True)
        kernel, word = _kernel(launch.shape.word)
        grid = (pieces * tensors, -(-launch.shape.words // _BLOCK_WORDS))
        with contextlib.nullcontext() if device == "cpu" else torch.cuda.device(device):
            kernel[grid](table, pieces, tensors, WORD=word, BLOCK=_BLOCK_WORDS, TO_ENGINE=to_engine)


def _table(launch: Launch) -> Offsets:
    """What the kernel is told, i64; see there."""
    shape = launch.shape
    lengths = [axis.length for axis in shape.axes[1:]]
    strides = [stride for axis in shape.axes for stride in (axis.pool, axis.engine)]
    head = np.array([shape.words, *lengths, *strides, *launch.pool, *launch.engine], np.int64)
    return np.concatenate([head, launch.pool_at, launch.engine_at])


def _check(view: Strided, itemsize: int, at: Offsets, size_bytes: int) -> None:
    first, last = view.offset + int(at.min()), view.offset + int(at.max()) + itemsize
    last += sum((length - 1) * stride for length, stride in zip(view.shape, view.strides, strict=True))
    if min(view.strides, default=0) < 0 or first < 0 or last > size_bytes:
        raise ValueError(f"a piece reaches out of {size_bytes} bytes, or has backward steps")


def _merged(axes: Sequence[Axis]) -> list[Axis]:
    """Without axes of length one, and neighbours that go on evenly on both sides as one."""
    merged: list[Axis] = []
    for axis in axes:
        before = merged[-1] if merged else None
        if axis.length == 1:
            continue
        if before and before.pool == axis.length * axis.pool and before.engine == axis.length * axis.engine:
            merged[-1] = Axis(before.length * axis.length, axis.pool, axis.engine)
        else:
            merged.append(axis)
    return merged


def _shape(
    axes: Sequence[Axis], itemsize: int, addresses: tuple[int, int], offsets: tuple[Offsets, Offsets]
) -> Shape | None:
    """The merged axes in the largest words that everything is aligned to; None when there are too many."""
    merged = _merged(axes)
    word, inner = itemsize, Axis(1, itemsize, itemsize)
    if merged and merged[-1].pool == merged[-1].engine == itemsize:
        inner = merged.pop()
        outer = [stride for axis in merged for stride in axis[1:]]
        everything = [inner.length * itemsize, *outer, *addresses, *(int(np.gcd.reduce(each)) for each in offsets)]
        word = next(size for size in _WORDS if size <= itemsize or all(one % size == 0 for one in everything))
        inner = Axis(inner.length * itemsize // word, word, word)
    if len(merged) >= _RANK:
        return None
    padding = [Axis(1, 0, 0)] * (_RANK - 1 - len(merged))
    return Shape((*padding, *merged, inner), word)


@lru_cache(maxsize=4)
def _kernel(word: int) -> tuple[Any, Any]:
    """(the kernel, its type of words of 1, 2, 4 or 8 bytes)."""
    import triton.language as tl

    from prefixcache_offload.gpu.move_kernel import move_pieces

    return move_pieces, {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[word]
