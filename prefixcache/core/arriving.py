"""Telling leases what came from disk for them, and when nothing more will.

Rules: what was told is readable and stays so; what is ready grows from the front, in a foreign namespace as it comes. A
lease whose next block nobody loads any more is told so, once, with the reason. Must not know: how blocks come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prefixcache.core.commands import Arrived, Command, Run
from prefixcache.core.ids import NO_SLOT
from prefixcache.core.leases import Lease, attached_path
from prefixcache.core.radix import DETACHED, ROW_DTYPE, Path, Pin
from prefixcache.core.reasons import Miss
from prefixcache.core.runs import read_run, scattered_runs

if TYPE_CHECKING:
    from prefixcache.core.loads import Load
    from prefixcache.core.state import State


def tell_waiters(state: State, load: Load, *, over: bool, out: list[Command]) -> None:
    """After some of a load ended. over: all of it did."""
    tell = _tell if load.space.foreign is None else _tell_scattered
    for lease in list(load.waiters):
        tell(state, load, lease, out)
    if over:
        for lease in load.waiters:  # they wait for other loads as well
            lease.loads.remove(load)
        load.waiters.clear()


def _tell(state: State, load: Load, lease: Lease, out: list[Command]) -> None:
    reply = lease.reply
    end = reply.from_block + reply.planned_blocks
    path = attached_path(lease.pins)
    ready, coming = _look(lease, path, end)
    if coming is not None:
        _wait_for(coming, lease)
    done = coming is None
    runs: tuple[Run, ...] = ()
    if ready > lease.ready_end:
        runs = _runs(state, lease, path, ready)
        lease.runs += runs
        lease.ready_end = ready
    _say(state, load, lease, runs, done=done, out=out)


def _tell_scattered(state: State, load: Load, lease: Lease, out: list[Command]) -> None:
    """In a foreign namespace: what came of the blocks that it waits for, wherever they stand."""
    space = lease.space
    came: list[tuple[int, int]] = []
    still: list[tuple[int, Pin]] = []
    for place, pin in lease.awaited:
        node = pin.node
        if node.state == DETACHED:
            continue
        if not node.cold:
            came.append((place, node.first_row))
        elif (coming := space.loading.get((node.first_row, 0))) is not None:
            _wait_for(coming, lease)
            still.append((place, pin))
    lease.awaited = still
    runs: tuple[Run, ...] = ()
    if came:
        rows = np.array([row for _, row in came], np.uint32)
        runs = scattered_runs(space, [place for place, _ in came], rows, state.host_pool)
        lease.runs += runs
        lease.ready_end += len(came)
    _say(state, load, lease, runs, done=not still, out=out)


def _wait_for(load: Load, lease: Lease) -> None:
    """Somebody else may have begun to load it meanwhile."""
    if lease not in load.waiters:
        load.waiters.append(lease)
        lease.loads.append(load)


def _say(state: State, load: Load, lease: Lease, runs: tuple[Run, ...], *, done: bool, out: list[Command]) -> None:
    """Tells what came, and whether that is all; `lease.ready_end` is how far it can read now."""
    reply = lease.reply
    if runs or done:
        short = lease.ready_end < reply.from_block + reply.planned_blocks
        lease.stop = _why(state, load) if done and short else None
        ready = lease.ready_end - reply.from_block
        out.append(Arrived(lease.lease, lease.session, ready, runs, lease.stop, done))
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
