"""Moves bytes between a pool and an engine's tensors in the engine's own order, and chooses how.

numpy copies fastest, but takes the interpreter lock once a move; beside a thread that keeps the interpreter busy each
taking waits up to 5 ms. Whole slots beside one stretch of bytes are one call of `copying` anyway. Another batch starts
with numpy, and when several copies in a row take far longer than their bytes can, the rest goes in O(1) lock
acquisitions: by `vectored`, or, where the contiguous stretches are too short for that, by torch's `_foreach_copy_` if
the worker has torch loaded. Device memory goes by one kernel launch or by torch, on the current stream.

Generations are checked by the caller, after the copy (and after its CUDA event).
"""

import errno
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixcache_offload import copying, staging, vectored
from prefixcache_offload.engine import Job, Move, Pieces
from prefixcache_offload.memory import WORDS, Memory
from prefixcache_offload.strides import Strided

_SLOWEST_BYTES_PER_S = 0.5e9
_PATIENCE_S = 0.002
"""A copy slower than both together was waiting, for the interpreter or for a core."""

_SLOW_IN_A_ROW = 3
"""Whoever waits for a core waits once in a few milliseconds of work; for a busy interpreter, at every copy."""

_FEWEST_SLOTS = 2


def load(pool: Memory, jobs: Sequence[Job]) -> int:
    """Copy from the pool into the engine's tensors; answer the bytes moved. A read-only pool will do.

    Raises ValueError or IndexError when a view reaches out of its memory, ValueError when the target is read-only;
    nothing outside is touched.
    """
    return _copy(pool, jobs, to_engine=True)


def store(pool: Memory, jobs: Sequence[Job]) -> int:
    """Copy from the engine's tensors into the pool; answer the bytes moved. Raises as `load`."""
    return _copy(pool, jobs, to_engine=False)


def _copy(pool: Memory, jobs: Sequence[Job], *, to_engine: bool) -> int:
    if not all(memory.writable for memory in ([job.memory for job in jobs] if to_engine else [pool])):
        raise ValueError("read-only memory cannot be the target of a copy")
    if not (pool.on_host and all(job.memory.on_host for job in jobs)):
        _on_device(pool, jobs, to_engine=to_engine)
    else:
        left = _by_numpy(pool, jobs, to_engine=to_engine)
        if left:
            _without_lock(pool, left, to_engine=to_engine)
    return sum(job.total_bytes for job in jobs)


def _on_device(pool: Memory, jobs: Sequence[Job], *, to_engine: bool) -> None:
    """By way of memory on the device where the pool is in host memory, else within the device; see `staging`."""
    devices = {job.memory.identity[0] for job in jobs}
    apart = pool.on_host and len(devices) == 1 and not any(job.memory.on_host for job in jobs)
    if not apart or not (to_engine or staging.covers(jobs)):
        _within_device(pool, jobs, to_engine=to_engine)
        return
    for chunk in staging.chunks(jobs):
        between = staging.make(chunk.size_bytes, jobs[0].memory.device)
        if to_engine:
            staging.fill(pool, chunk, between)
        _within_device(between, chunk.jobs, to_engine=to_engine)
        if not to_engine:
            staging.drain(pool, chunk, between)


def _within_device(pool: Memory, jobs: Sequence[Job], *, to_engine: bool) -> None:
    """One launch where pool and tensors are on one CUDA device and triton is there, else a list copy."""
    from prefixcache_offload.gpu import kernels

    where = {memory.identity[0] for memory in (pool, *(job.memory for job in jobs))}
    found = kernels.launches(pool, jobs) if len(where) == 1 and kernels.can_run_on(*where) else None
    if found is None:
        _by_torch(pool, jobs, to_engine=to_engine)
    else:
        kernels.move(found, *where, to_engine=to_engine)


def _each(jobs: Sequence[Job]) -> Iterator[tuple[Job, Move]]:
    return ((job, move) for job in jobs for some in job.moves for move in some.moves())


def _by_numpy(
    pool: Memory, jobs: Sequence[Job], *, to_engine: bool, clock: Callable[[], float] = time.perf_counter
) -> Sequence[Job]:
    """Copy until the interpreter proves busy; answer the jobs that are left (the first of them perhaps half done)."""
    slow = 0
    for index, job in enumerate(jobs):
        if _as_slots(pool, job, to_engine=to_engine):
            continue
        before = clock()
        for copied_bytes in _copies(pool, job, to_engine=to_engine):
            after = clock()
            late = after - before > _PATIENCE_S + copied_bytes / _SLOWEST_BYTES_PER_S
            slow, before = slow + 1 if late else 0, after
            if slow >= _SLOW_IN_A_ROW:
                return jobs[index:]
    return ()


def _copies(pool: Memory, job: Job, *, to_engine: bool) -> Iterator[int]:
    """Do the copies of a job, answering the bytes of each."""
    for some in job.moves:
        for ours, theirs in _arrays(pool, job.memory, some, job.itemsize):
            if to_engine:
                np.copyto(theirs, ours)
            else:
                np.copyto(ours, theirs)
            yield ours.nbytes


def _arrays(
    pool: Memory, memory: Memory, some: Move | Pieces, itemsize: int
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Both sides of every copy, as arrays. No object but these for a piece: there may be tens of thousands."""
    if isinstance(some, Move):
        yield pool.array(some.pool, itemsize), memory.array(some.engine, itemsize)
        return
    (ours, theirs), pool_at, engine_at, runs = some
    pool_offsets, engine_offsets = (pool_at + ours.offset).tolist(), (engine_at + theirs.offset).tolist()
    left, right, word = pool.flat, memory.flat, WORDS[itemsize]
    for first, count in runs:
        at, there = pool_offsets[first], engine_offsets[first]
        if count == 1:
            yield (
                np.ndarray(ours.shape, word, left, at, ours.strides),
                np.ndarray(theirs.shape, word, right, there, theirs.strides),
            )
        else:
            shape = (count, *ours.shape)
            steps = pool_offsets[first + 1] - at, engine_offsets[first + 1] - there
            yield (
                np.ndarray(shape, word, left, at, (steps[0], *ours.strides)),
                np.ndarray(shape, word, right, there, (steps[1], *theirs.strides)),
            )


def _as_slots(pool: Memory, job: Job, *, to_engine: bool) -> bool:
    """Copy a job in one call if it is whole slots on one side and one stretch of bytes on the other."""
    moves = [move for move in job.moves if isinstance(move, Move)]
    if len(moves) != len(job.moves) or len(moves) < _FEWEST_SLOTS:
        return False
    first = moves[0]
    size = vectored.contiguous_bytes(first, job.itemsize)
    if size != first.pool.elements * job.itemsize:
        return False
    form = (first.pool[1:], first.engine[1:])
    for i, move in enumerate(moves):
        if move.engine.offset != first.engine.offset + i * size or (move.pool[1:], move.engine[1:]) != form:
            return False
    flat = job.memory.array(Strided(first.engine.offset, (size * len(moves),), (1,)), 1)
    starts = np.fromiter((move.pool.offset for move in moves), np.int64, len(moves))
    whole = pool.array(Strided(0, (pool.size_bytes,), (1,)), 1)
    if to_engine:
        copying.gather(whole, starts, flat)
    else:
        copying.scatter(whole, starts, flat)
    return True


def _without_lock(pool: Memory, jobs: Sequence[Job], *, to_engine: bool) -> None:
    short = any(
        vectored.contiguous_bytes(moves, job.itemsize) < vectored.MIN_PIECE_BYTES for job in jobs for moves in job.moves
    )
    if not short:
        try:
            _by_kernel(pool, jobs, to_engine=to_engine)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOSYS):
                raise
            short = True  # a sandbox forbids the call
    if short and "torch" in sys.modules:
        _by_torch(pool, jobs, to_engine=to_engine)
    elif short:
        _by_numpy(pool, jobs, to_engine=to_engine, clock=lambda: 0.0)


def _by_kernel(pool: Memory, jobs: Sequence[Job], *, to_engine: bool) -> None:
    ours, theirs, sizes = [], [], []
    for job in jobs:
        for moves in job.moves:
            pool_at, engine_at, size = vectored.offsets(moves, job.itemsize)
            for memory, at in ((pool, pool_at), (job.memory, engine_at)):
                if at.size and (at.min() < 0 or at.max() + size > memory.size_bytes):
                    raise ValueError(f"a piece of {size} bytes reaches out of {memory.size_bytes} bytes")
            ours.append(pool_at + pool.address)
            theirs.append(engine_at + job.memory.address)
            sizes.append(np.full(pool_at.size, size))
    if sizes:
        targets, sources = (theirs, ours) if to_engine else (ours, theirs)
        vectored.copy(np.concatenate(targets), np.concatenate(sources), np.concatenate(sizes))


def _by_torch(pool: Memory, jobs: Sequence[Job], *, to_engine: bool) -> None:
    import torch

    ours = [pool.tensor(m.pool, j.itemsize, as_source=to_engine) for j, m in _each(jobs)]
    theirs = [j.memory.tensor(m.engine, j.itemsize, as_source=not to_engine) for j, m in _each(jobs)]
    if not ours:
        return
    targets, sources = (theirs, ours) if to_engine else (ours, theirs)
    with torch.no_grad():
        torch._foreach_copy_(targets, sources, non_blocking=True)
