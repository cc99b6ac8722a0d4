"""What of the blocks that are there already a Reserve may fill: parts that are not in memory.

Rules: a part of a sliding or state group may be missing from a block; a block on disk only (cold) lacks all its parts
in memory, and comes back with its full parts together or not at all. Whoever offers one has just computed it, because
waiting for the disk was worth less to it: if it were not taken, a slow disk would keep out of memory what no disk at
all would not. One writer at a time fills a part, and none while a read brings it that somebody waits for.
Must not know: how slots are found.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.events import ReserveRequested
from prefixcache.core.ids import NO_SLOT, Rows
from prefixcache.core.namespaces import Namespace
from prefixcache.core.policy.base import UNKNOWN_BIRTH
from prefixcache.core.radix import ROW_DTYPE, Path
from prefixcache.core.reasons import Skip
from prefixcache.core.table import NORMAL

Mask = NDArray[np.bool_]


class Plan:
    """What a Reserve may get: which visible blocks lack which parts in memory, and how many new blocks follow."""

    __slots__ = (
        "birth", "fresh_from", "fresh_keys", "fresh_parts", "fresh_want", "patch_blocks", "patch_parts", "patch_rows",
        "priority", "skipped",
    )  # fmt: skip

    def __init__(self, priority: int = NORMAL) -> None:
        self.priority = priority
        self.skipped: Counter[Skip] = Counter()
        self.patch_blocks: NDArray[np.uint32] = np.empty(0, np.uint32)
        self.patch_rows: NDArray[np.uint32] = np.empty(0, np.uint32)
        self.patch_parts: dict[int, NDArray[np.bool_]] = {}  # part -> bool[patches]: is wanted there
        self.fresh_from = 0
        self.fresh_want = 0
        self.fresh_keys = b""  # of policies that remember only, as is `birth`
        self.birth = UNKNOWN_BIRTH
        self.fresh_parts: list[int] = []

    def skip(self, reason: Skip, blocks: int) -> None:
        if blocks > 0:
            self.skipped[reason] += blocks


def plan_patches(event: ReserveRequested, space: Namespace, path: Path, visible: int, plan: Plan) -> None:
    """Sorts the visible blocks of a path from `from_block` on: what of them is filled, what is skipped and why."""
    count = visible - event.from_block
    parts = [part for part in range(len(space.strides)) if event.part_mask >> part & 1]
    if not space.cold_blocks and not any(part in space.optional_parts for part in parts):
        plan.skip(Skip.ALREADY_STORED, count)
        return
    rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)[event.from_block : visible]
    cold = space.table.cold[rows] if space.cold_blocks else np.zeros(count, np.bool_)
    lacking = {part: space.table.parts[part].slots[rows] == NO_SLOT for part in parts}
    refused = np.zeros(count, np.bool_)
    if event.part_mask & space.full_mask != space.full_mask:
        for part, lacks in lacking.items():
            refused |= cold & space.lacks(part, rows)
            lacks &= ~cold
    taken = _leave_to_others(space, rows, cold, lacking)
    wanted = np.logical_or.reduce(list(lacking.values()))
    plan.patch_rows = rows[wanted]
    plan.patch_blocks = (event.from_block + np.flatnonzero(wanted)).astype(np.uint32)
    plan.patch_parts = {part: lacks[wanted] for part, lacks in lacking.items() if lacks[wanted].any()}
    busy = taken & ~wanted
    plan.skip(Skip.BEING_WRITTEN, int(np.count_nonzero(busy)))
    plan.skip(Skip.PARTS_MISSING, int(np.count_nonzero(refused)))
    plan.skip(Skip.ALREADY_STORED, int(np.count_nonzero(~wanted & ~refused & ~busy)))


def _leave_to_others(space: Namespace, rows: Rows, cold: Mask, lacking: dict[int, Mask]) -> Mask:
    """Takes out of `lacking` what others fill (of a cold block then everything); bool[n]: blocks of which that is some
    part."""
    taken = np.zeros(len(rows), np.bool_)
    for part, lacks in lacking.items():
        if lacks.any() and (others := filled_by_others(space, part)):
            busy = lacks & np.isin(rows, np.fromiter(others, np.uint32))
            taken |= busy
            lacks &= ~busy
    if taken.any():
        for lacks in lacking.values():
            lacks &= ~(taken & cold)
    return taken


def filled_by_others(space: Namespace, part: int) -> set[int]:
    """Rows of which a reservation, or a read that somebody waits for, fills this part."""
    others = set(space.patching.get(part, ()))
    others.update(row for (row, which), load in space.loading.items() if which == part and not load.cancelled)
    return others
