"""Telling leases what came from disk for them, and when nothing more will.

Rules: what was told is readable and stays so; what is ready grows from the front. A lease whose next block nobody loads
any more is told so, once, with the reason. Must not know: how blocks come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prefixcache.core.commands import Arrived, Command, Run
from prefixcache.core.foreign_leases import read_run
from prefixcache.core.ids import NO_SLOT
from prefixcache.core.leases import Lease, attached_path
from prefixcache.core.radix import ROW_DTYPE, Path
from prefixcache.core.reasons import Miss

if TYPE_CHECKING:
    from prefixcache.core.loads import Load
    from prefixcache.core.state import State


def tell_waiters(state: State, load: Load, *, over: bool, out: list[Command]) -> None:
    """After some of a load ended. over: all of it did."""
    for lease in list(load.waiters):
        _tell(state, load, lease, out)
    if over:
        for lease in load.waiters:  # they wait for other loads as well
            lease.loads.remove(load)
        load.waiters.clear()


def _tell(state: State, load: Load, lease: Lease, out: list[Command]) -> None:
    reply = lease.reply
    end = reply.from_block + reply.planned_blocks
    path = attached_path(lease.pins)
    ready, coming = _look(lease, path, end)
    if coming is not None and lease not in coming.waiters:
        coming.waiters.append(lease)  # somebody else has begun to load it meanwhile
        lease.loads.append(coming)
    done = coming is None
    runs: tuple[Run, ...] = ()
    if ready > lease.ready_end:
        runs = _runs(state, lease, path, ready)
        lease.runs += runs
        lease.ready_end = ready
    if runs or done:
        lease.stop = _why(state, load) if done and ready < end else None
        out.append(Arrived(lease.lease, lease.session, ready - reply.from_block, runs, lease.stop, done))
    if done:
        for other in lease.loads:
            if lease in other.waiters:
                other.waiters.remove(lease)
        lease.loads = []


def _runs(state: State, lease: Lease, path: Path, ready: int) -> tuple[Run, ...]:
    """What the promised prefix needs of the blocks from `ready_end` to `ready`."""
    space, reply = lease.space, lease.reply
    runs = []
    for part in range(len(space.strides)):
        needed = space.needed_from(part, reply.from_block, reply.from_block + reply.planned_blocks)
        first = max(needed, lease.ready_end)
        if first < ready:
            runs.append(read_run(space, part, path.stretches(first, ready), first, state.host_pool))
    return tuple(runs)


def _look(lease: Lease, path: Path, planned: int) -> tuple[int, Load | None]:
    """(blocks that are ready, who loads the next one)."""
    end = min(planned, path.blocks)
    if end <= lease.ready_end:
        return lease.ready_end, None
    space = lease.space
    rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)[:end]
    ready, coming = end, None
    for part, column in enumerate(space.table.parts):
        first = max(space.needed_from(part, lease.reply.from_block, planned), lease.ready_end)
        lacking = np.flatnonzero(column.slots[rows[first:]] == NO_SLOT)
        if len(lacking) and first + int(lacking[0]) < ready:
            ready = first + int(lacking[0])
            coming = space.loading.get((int(rows[ready]), part))
    return ready, coming


def _why(state: State, load: Load) -> Miss:
    if not state.disk.reads_on:
        return Miss.TIER_OFF
    return Miss.CHECKSUM if load.lost else Miss.COPY_FAILED
