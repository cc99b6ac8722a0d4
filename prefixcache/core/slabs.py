"""Slots that cannot come back at once: sources of copies under way, and slots that were moved away under a lease.

Rules: a slot being copied is held until CopyDone, whatever becomes of its block. A moved block's old slot stays as it
is until every lease (and copy to another tier) that is older than the move has ended, so a reader never sees it change.
Every copy begun ends once. Must not know: why a slab is emptied (transfers decide), keys, the tree.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.commands import Command, ComputeChecksum
from prefixcache.core.ids import Generations, PoolId, Rows, Slots
from prefixcache.core.table import DIGEST_KNOWN

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace
    from prefixcache.core.slots import Slab
    from prefixcache.core.state import State


def ask_checksum(space: Namespace, part: int, rows: Rows, pool: PoolId) -> ComputeChecksum:
    """The order for the digests of one part of some rows."""
    column = space.table.parts[part]
    size = space.spec.parts[part].size_bytes
    return ComputeChecksum(space.number, part, pool, size, rows, column.slots[rows], column.generations[rows])


class Move:
    """One CopySlots under way: rows of one part from `sources` to `targets`."""

    __slots__ = ("doomed", "generation", "old_generations", "part", "rows", "slab", "sources", "space", "targets")

    def __init__(self, slab: Slab, space: Namespace, part: int, rows: Rows, targets: Slots, generation: int) -> None:
        column = space.table.parts[part]
        self.space = space
        self.part = part
        self.rows = rows
        self.sources: Slots = column.slots[rows]
        self.old_generations: Generations = column.generations[rows]
        self.targets = targets
        self.generation = generation
        self.doomed: NDArray[np.bool_] = np.zeros(len(rows), np.bool_)  # released by their block meanwhile
        self.slab = slab


class SlabMover:
    """Gives slots back to the host pool, at once or when they may."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.moves: dict[int, Move] = {}
        self._kept: set[int] = set()  # slabs of which a copy failed
        self.retired: deque[tuple[int, Slots]] = deque()  # (serial, slots) wait for older leases

    def release(self, slots: Slots) -> None:
        """Gives slots back that no block and no reservation needs any more."""
        for move in self.moves.values():
            copied = np.isin(slots, move.sources)
            if copied.any():
                move.doomed |= np.isin(move.sources, slots)
                slots = slots[~copied]
        self.state.host.release(slots)

    def finish(self, copy: int, out: list[Command], *, ok: bool) -> None:
        """A copy ended. What is still as it was when the copy began now lives at its target."""
        move = self.moves.pop(copy)
        column = move.space.table.parts[move.part]
        same = (column.slots[move.rows] == move.sources) & (column.generations[move.rows] == move.old_generations)
        moved = same & ~move.doomed if ok else np.zeros(len(move.rows), np.bool_)
        rows = move.rows[moved]
        column.slots[rows] = move.targets[moved]
        column.generations[rows] = move.generation
        self.state.stats.slots_moved += len(rows)
        # A digest on its way is for the old generation and will not be taken.
        self._ask_checksum(move, rows[column.flags[rows] & DIGEST_KNOWN == 0], out)
        self.release(move.targets[~moved])
        self.release(move.sources[move.doomed])
        if len(rows):
            self.retired.append((self.state.next_serial(), move.sources[moved]))
        self.settle_retired()
        self._slab_done(move.slab, ok=ok)

    def _slab_done(self, slab: Slab, *, ok: bool) -> None:
        """After its last copy: a slab that was moved empty stays closed, as what is left in it only waits for leases;
        one of which a copy failed takes slots again."""
        if not ok:
            self._kept.add(slab.number)
        if all(move.slab is not slab for move in self.moves.values()) and slab.number in self._kept:
            self._kept.discard(slab.number)
            self.state.host.reopen_slab(slab)

    def _ask_checksum(self, move: Move, rows: Rows, out: list[Command]) -> None:
        if self.state.config.checksum and len(rows):
            out.append(ask_checksum(move.space, move.part, rows, self.state.host_pool))

    def settle_retired(self) -> None:
        """Frees the old slots of moves that no living lease, and nothing that is being copied, can know."""
        state = self.state
        while self.retired:
            leases = (lease.serial for lease in state.leases.values())
            oldest = min((*leases, *state.disk.writing.values(), *state.promoting.values()), default=None)
            serial, slots = self.retired[0]
            if oldest is not None and oldest < serial:
                return
            self.retired.popleft()
            self.release(slots)

    def held_slots(self) -> Slots:
        """Every slot that only this module knows to be in use (for checks and for what may be emptied)."""
        pieces = [slots for _, slots in self.retired]
        for move in self.moves.values():
            pieces += [move.targets, move.sources[move.doomed]]
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint32)
