"""Moves bytes between a pool and an engine's tensors in the engine's own order: few interpreter locks, one thread.

Two ways give the same bytes. numpy takes the interpreter lock once a move and is the fastest for few large moves;
torch's `_foreach_copy_` takes it once for all of them, which wins by far where another thread keeps the interpreter
busy. So moves of 2 MiB and more on average, or only a few, go by numpy and the rest by torch, if the worker has it
loaded. Device memory always goes by torch.

Generations are checked by the caller, after the copy (and after its CUDA event).
"""

import sys
from collections.abc import Iterable, Sequence

import numpy as np

from prefixcache_offload.engine import Job, Move
from prefixcache_offload.memory import Memory

LARGE_MOVE_BYTES = 2 << 20
FEW_MOVES = 4


def load(pool: Memory, jobs: Sequence[Job]) -> int:
    """Copy from the pool into the engine's tensors; answer the bytes moved. A read-only pool will do.

    Raises ValueError, before anything is written by that move, when a view reaches out of its memory.
    """
    return _copy(pool, jobs, to_engine=True)


def store(pool: Memory, jobs: Sequence[Job]) -> int:
    """Copy from the engine's tensors into the pool; answer the bytes moved. Raises ValueError as `load`."""
    return _copy(pool, jobs, to_engine=False)


def _copy(pool: Memory, jobs: Sequence[Job], *, to_engine: bool) -> int:
    moves = sum(len(job.moves) for job in jobs)
    total = sum(move.pool.elements * job.itemsize for job in jobs for move in job.moves)
    on_host = pool.on_host and all(job.memory.on_host for job in jobs)
    few = moves <= FEW_MOVES or total >= moves * LARGE_MOVE_BYTES
    if on_host and (few or "torch" not in sys.modules):
        _by_numpy(pool, jobs, to_engine=to_engine)
    else:
        _by_torch(pool, jobs, to_engine=to_engine)
    return total


def _each(jobs: Iterable[Job]) -> Iterable[tuple[Job, Move]]:
    return ((job, move) for job in jobs for move in job.moves)


def _by_numpy(pool: Memory, jobs: Sequence[Job], *, to_engine: bool) -> None:
    for job, move in _each(jobs):
        ours = pool.array(move.pool, job.itemsize)
        theirs = job.memory.array(move.engine, job.itemsize)
        if to_engine:
            np.copyto(theirs, ours)
        else:
            np.copyto(ours, theirs)


def _by_torch(pool: Memory, jobs: Sequence[Job], *, to_engine: bool) -> None:
    import torch

    ours = [pool.tensor(m.pool, j.itemsize, as_source=to_engine) for j, m in _each(jobs)]
    theirs = [j.memory.tensor(m.engine, j.itemsize, as_source=not to_engine) for j, m in _each(jobs)]
    if not ours:
        return
    targets, sources = (theirs, ours) if to_engine else (ours, theirs)
    with torch.no_grad():
        torch._foreach_copy_(targets, sources, non_blocking=True)
