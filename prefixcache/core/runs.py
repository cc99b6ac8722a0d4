"""Where blocks are, as the runs that leases are told.

Rules: reads the table, changes nothing. Must not know: what is promised, or why.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixcache.core.commands import Run
from prefixcache.core.ids import PoolId, Rows
from prefixcache.core.namespaces import Namespace


def read_run(space: Namespace, part: int, rows: list[slice | Rows], first_block: int, pool: PoolId) -> Run:
    """Where one part of consecutive blocks is. rows: pieces to index a column with (`Path.stretches`)."""
    column = space.table.parts[part]
    if len(rows) == 1:
        return Run(part, first_block, pool, *column.packed(rows[0]))
    pieces = [column.packed(piece) for piece in rows]
    packed_slots = b"".join([slots for slots, _ in pieces])
    return Run(part, first_block, pool, packed_slots, b"".join([generations for _, generations in pieces]))


def scattered_runs(space: Namespace, places: Sequence[int], rows: Rows, pool: PoolId) -> tuple[Run, ...]:
    """Where all parts of blocks at `places` (ascending) are: a run for every part of every stretch of places."""
    edges = np.flatnonzero(np.diff(np.asarray(places, np.int64)) != 1) + 1
    runs: list[Run] = []
    for stretch in np.split(np.arange(len(places)), edges) if len(places) else ():
        mine = rows[stretch]
        runs += [read_run(space, part, [mine], places[int(stretch[0])], pool) for part in range(len(space.strides))]
    return tuple(runs)
