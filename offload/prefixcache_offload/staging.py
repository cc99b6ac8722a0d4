"""Slots in host memory beside tensors on a device: long stretches cross the bus, and are cut up on the device.

Pieces of host memory would cross a bus a few kilobytes at a time. So the stretches of the pool in which they lie go as
one copy each into memory on the device, and from there into the tensors by the device's own copies; and back. For slots
that are moved whole, a stretch is a slot, or the heads of one rank in it, or several slots that follow each other.

A store writes whole stretches, so it may come this way only where the pieces cover them: what lies between could be
written by another process at the same time. All copies are on the current stream, in order, so the memory between can
be used again at once; it is bounded, because engines leave little room. No device has run this yet; the arithmetic is
tested on the CPU.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache_offload.engine import Job, Move, Pieces, equal_steps
from prefixcache_offload.memory import Memory
from prefixcache_offload.strides import Strided

if TYPE_CHECKING:
    import torch

Offsets = npt.NDArray[np.int64]

CHUNK_BYTES: Final = 64 << 20
"""Memory taken on the device at a time; a stretch that cannot be cut is larger at most."""

_ALIGNMENT: Final = 512


class Chunk(NamedTuple):
    """Stretches [start, end) of the pool, where each begins in the memory between, and the moves from and to there."""

    starts: list[int]
    ends: list[int]
    places: list[int]
    size_bytes: int
    jobs: list[Job]


class _Stretches(NamedTuple):
    """Of the pool, i64 each, in order; `chunk` says which go together."""

    starts: Offsets
    ends: Offsets
    places: Offsets
    chunk: Offsets


def covers(jobs: Sequence[Job]) -> bool:
    """Whether the jobs, which never move a byte twice, move every byte of the stretches they lie in."""
    firsts, lasts = _intervals(jobs)
    if not firsts.size:
        return True
    found = _stretches(firsts, lasts)
    return int((found.ends - found.starts).sum()) == sum(job.total_bytes for job in jobs)


def chunks(jobs: Sequence[Job]) -> Iterator[Chunk]:
    """The jobs' moves by way of memory on the device, a chunk at a time."""
    firsts, lasts = _intervals(jobs)
    if not firsts.size:
        return
    found = _stretches(firsts, lasts)
    for number in range(int(found.chunk[-1]) + 1):
        here = np.flatnonzero(found.chunk == number)
        size = int(found.places[here[-1]] + found.ends[here[-1]] - found.starts[here[-1]])
        moved = [Job(job.memory, _moved(job, found, number), job.itemsize) for job in jobs]
        starts, ends, places = (column[here].tolist() for column in found[:3])
        yield Chunk(starts, ends, places, size, [job for job in moved if job.moves])


def fill(pool: Memory, chunk: Chunk, between: Memory) -> None:
    """Copy the stretches to the device."""
    _copy(pool, chunk, between, to_device=True)


def drain(pool: Memory, chunk: Chunk, between: Memory) -> None:
    """Copy them back."""
    _copy(pool, chunk, between, to_device=False)


def make(size_bytes: int, device: "torch.device") -> Memory:
    """Memory on the device, in its allocator's order of use."""
    import torch

    return Memory.of_tensor(torch.empty(size_bytes, dtype=torch.uint8, device=device))[0]


def _copy(pool: Memory, chunk: Chunk, between: Memory, *, to_device: bool) -> None:
    import torch

    ours, theirs = [], []
    for start, end, place in zip(chunk.starts, chunk.ends, chunk.places, strict=True):
        ours.append(pool.tensor(Strided(start, (end - start,), (1,)), 1, as_source=to_device))
        theirs.append(between.tensor(Strided(place, (end - start,), (1,)), 1, as_source=not to_device))
    targets, sources = (theirs, ours) if to_device else (ours, theirs)
    torch._foreach_copy_(targets, sources, non_blocking=True)


def _intervals(jobs: Sequence[Job]) -> tuple[Offsets, Offsets]:
    """Where in the pool each piece begins and ends."""
    firsts, lasts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for job in jobs:
        for some in job.moves:
            piece, at, _ = some.spread()
            if piece.pool.elements:
                firsts.append(at + piece.pool.offset)
                lasts.append(firsts[-1] + _reach(piece.pool, job.itemsize))
    return np.concatenate(firsts), np.concatenate(lasts)


def _reach(view: Strided, itemsize: int) -> int:
    return sum((length - 1) * stride for length, stride in zip(view.shape, view.strides, strict=True)) + itemsize


def _stretches(firsts: Offsets, lasts: Offsets) -> _Stretches:
    """Pieces that touch or overlap are one stretch, cut where they only touch and a chunk is full."""
    order = np.argsort(firsts, kind="stable")
    firsts, reached = firsts[order], np.maximum.accumulate(lasts[order])
    apart = np.flatnonzero(np.concatenate(([True], firsts[1:] >= reached[:-1])))
    starts, ends = firsts[apart], reached[np.append(apart[1:], firsts.size) - 1]
    chunk = (np.cumsum(ends - starts) - (ends - starts)) // CHUNK_BYTES
    chunk = np.unique(chunk, return_inverse=True)[1].astype(np.int64)
    new = np.concatenate(([True], (starts[1:] > ends[:-1]) | (chunk[1:] != chunk[:-1])))
    at = np.flatnonzero(new)
    starts, ends, chunk = starts[at], ends[np.append(at[1:], new.size) - 1], chunk[at]
    return _Stretches(starts, ends, _places(starts, ends, chunk), chunk)


def _places(starts: Offsets, ends: Offsets, chunk: Offsets) -> Offsets:
    """Where each stretch lies in its chunk's memory, as far from a multiple of 512 as in the pool."""
    rooms = -(-(ends - starts + _ALIGNMENT) // _ALIGNMENT) * _ALIGNMENT
    before = np.cumsum(rooms) - rooms
    first_of_chunk = np.searchsorted(chunk, chunk)
    places: Offsets = before - before[first_of_chunk] + starts % _ALIGNMENT
    return places


def _moved(job: Job, found: _Stretches, number: int) -> list[Move | Pieces]:
    """The moves of a job that lie in chunk `number`, from and to the memory between."""
    moved: list[Move | Pieces] = []
    for some in job.moves:
        piece, at, engine_at = some.spread()
        if not piece.pool.elements or not at.size:
            continue
        stretch = np.searchsorted(found.starts, at + piece.pool.offset, "right") - 1
        here = np.flatnonzero(found.chunk[stretch] == number)
        if here.size:
            shifted = at[here] + (found.places - found.starts)[stretch[here]]
            theirs = engine_at[here]
            moved.append(Pieces(piece, shifted, theirs, equal_steps(shifted, theirs)))
    return moved
