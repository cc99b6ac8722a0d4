"""What becomes of blocks that were read from disk: from the slots of a load into the tree, or back.

Rules: slots being read belong to the load until their reads have ended, whatever became of the blocks. Rows are settled
from the front of their path. A block is in memory when all its full parts came; a part of a sliding or state group may
come without them only where they are there already, or waits for the load that brings them. A record that is lost takes
its block with it, and what follows; of a part that not every block has, only itself. Must not know: why it was loaded.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.arriving import tell_waiters
from prefixcache.core.commands import Command
from prefixcache.core.events import ReadEnd, RecordsRead
from prefixcache.core.ids import NO_SLOT, Rows
from prefixcache.core.loading import Loader
from prefixcache.core.loads import Load
from prefixcache.core.nodes import run_in
from prefixcache.core.radix import DETACHED, Node
from prefixcache.core.reasons import DiskDrop, Kind, Refusal
from prefixcache.core.removal import Remover
from prefixcache.core.state import State

_PLACE, _DROP, _LOSE = range(3)
_OK, _FAILED, _LOST = int(ReadEnd.OK), int(ReadEnd.FAILED), int(ReadEnd.LOST)
"""As numbers: numpy asks a member of an enum for a dozen names before it compares."""


class Lander:
    """Handler of RecordsRead; the loads are the loader's."""

    def __init__(self, state: State, remover: Remover, loader: Loader) -> None:
        self.state = state
        self.remover = remover
        self.loader = loader

    def done(self, event: RecordsRead, now: float, out: list[Command]) -> None:
        """Some records ended."""
        loads = self.loader.loads
        load = loads.get(event.job)
        if load is None:
            self.state.refuse(out, Kind.NOT_FOUND, Refusal.COPY_UNKNOWN, f"no read {event.job} is under way")
            return
        self._count(load, event, now)
        ends = self._judged(load, event.index, event.ends)
        load.note(event.index, ends)
        self._forget_records(load, event.index, ends)
        moved = [
            load,
            *(each for each in loads.values() if each.waits and each is not load and each.space is load.space),
        ]
        for each in moved:  # in the order in which they began: what one waits for began before it
            self._settle(each)
        for each in moved:
            if not each.open_records and not each.waits:
                assert each.front == len(each.rows)
                del loads[each.number]
                self.remover.unpin_all(each.pins)
            tell_waiters(self.state, each, over=each.number not in loads, out=out)

    def _count(self, load: Load, event: RecordsRead, now: float) -> None:
        records, index = load.records, event.index
        sizes = np.array([part.size_bytes for part in load.space.spec.parts], np.int64)
        fine = bool((event.ends == _OK).any())
        self.loader.meter.end(int(sizes[records.parts[index]].sum()), now, fine=fine)
        for number, count in Counter(records.segments[index].tolist()).items():
            segment = self.state.disk.segments.get(number)
            if segment is not None:
                segment.reads -= count

    def _judged(self, load: Load, index: NDArray[np.uint32], ends: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """A record that is not where it was read is not lost if it was appended again meanwhile."""
        if (ends != _LOST).all():
            return ends
        judged, records = ends.copy(), load.records
        for place in np.flatnonzero(ends == _LOST).tolist():
            at = index[place]
            segment = int(records.segments[at])
            known = self.state.disk.segments.get(segment)
            column = load.space.table.parts[int(records.parts[at])]
            if known is None or known.frozen or int(column.segments[records.rows[at]]) != segment:
                judged[place] = _FAILED
        return judged

    def _forget_records(self, load: Load, index: NDArray[np.uint32], ends: NDArray[np.uint8]) -> None:
        """Of a part that not every block has, the record alone is lost."""
        space = load.space
        lost = index[ends == _LOST]
        if not len(lost) or not space.has_full:
            return
        for part in space.optional_parts:
            rows = load.records.rows[lost[load.records.parts[lost] == part]]
            if len(rows):
                self.state.stats.disk_drops[DiskDrop.LOST] += len(rows)
                self.remover.lose_records(space, part, rows)
                self.remover.reorder(space, rows)

    def _settle(self, load: Load) -> None:
        """Places what came, from the front, and forgets what is lost."""
        load.waits = False
        ended = np.flatnonzero(load.left[load.front :])
        end = load.front + int(ended[0]) if len(ended) else len(load.rows)
        verdicts = self._verdicts(load, slice(load.front, end))
        begin = load.front
        while load.front < end:
            verdict = verdicts[load.front - begin]
            other = np.flatnonzero(verdicts[load.front - begin :] != verdict)
            stop = load.front + int(other[0]) if len(other) else end
            which = slice(load.front, stop)
            if verdict == _PLACE and (which := self._that_may(load, which)).stop == which.start:
                return
            for name in load.names(which):
                load.space.loading.pop(name, None)
            if verdict == _PLACE:
                self._place(load, which)
            else:
                self._give_back(load, which)
                if verdict == _LOSE:
                    self._lose(load, load.rows[which])
            load.front = which.stop

    def _verdicts(self, load: Load, which: slice) -> NDArray[np.uint8]:
        """u8[rows]: what becomes of rows all of whose records have ended."""
        space = load.space
        verdicts = np.zeros(which.stop - which.start, np.uint8)
        for part, ends in load.ends.items():
            if part in space.optional_parts and space.has_full:
                continue
            mine = load.slots[part][which] != NO_SLOT
            verdicts[mine & (ends[which] == _FAILED) & (verdicts == _PLACE)] = _DROP
            verdicts[mine & (ends[which] == _LOST)] = _LOSE
        return verdicts

    def _that_may(self, load: Load, which: slice) -> slice:
        """The leading ones of rows that came which may be placed now. The first of the others waits for the load of
        its full parts, where there is one (`waits`); else it is given back here, as what it belongs to did not come."""
        space = load.space
        if not space.has_full or not space.optional_parts:
            return which
        key = space.full_parts[0]
        rows = load.rows[which]
        alone = space.table.cold[rows]
        if key in load.slots:
            alone &= load.slots[key][which] == NO_SLOT
        first = int(np.argmax(alone)) if alone.any() else len(rows)
        if first:
            return slice(which.start, which.start + first)
        if (int(rows[0]), key) in space.loading:
            load.waits = True
            return slice(which.start, which.start)
        one = slice(which.start, which.start + 1)
        for part, slots in load.slots.items():
            load.ends[part][one] = np.where(slots[one] != NO_SLOT, _FAILED, load.ends[part][one])
        return one

    def _give_back(self, load: Load, which: slice) -> None:
        slots = np.concatenate([slots[which] for slots in load.slots.values()])
        self.remover.release_slots(slots[slots != NO_SLOT])

    def _place(self, load: Load, which: slice) -> None:
        """Rows that came are in memory from now on, where their blocks still are."""
        index = load.space.tree.index
        assert index is not None
        at = which.start
        while at < which.stop:
            node = index.node_of(int(load.rows[at]))
            assert node is not None  # pinned
            # A path's rows lie in its nodes in order, but rows that came earlier may lie between.
            place, count = run_in(node, load.rows[at : which.stop])
            piece = slice(at, at + count)
            if node.state == DETACHED:
                self._give_back(load, piece)
            else:
                self._bring(load, node, place, piece)
            at += count

    def _bring(self, load: Load, node: Node, place: int, which: slice) -> None:
        space = load.space
        came = {part: (load.slots[part][which] != NO_SLOT) & (load.ends[part][which] == _OK) for part in load.slots}
        any_came = np.logical_or.reduce(list(came.values()))
        cold = node.cold and bool(any_came.any())
        if cold:
            node = self.remover.warm(space, node, place, which.stop - which.start)
        self.state.stats.blocks_loaded += int(np.count_nonzero(any_came))
        rows = load.rows[which]
        for part, slots in load.slots.items():
            mine = slots[which]
            # A worker may have stored it again meanwhile.
            good = came[part] & (space.table.parts[part].slots[rows] == NO_SLOT)
            space.table.bring(part, rows[good], mine[good], load.generation)
            self.remover.release_slots(mine[~good & (mine != NO_SLOT)])
        if cold:
            self.remover.settle_warm(space, node)

    def _lose(self, load: Load, rows: Rows) -> None:
        """Records that will never be read: their blocks leave, and all that follows them; of what a worker stored again
        meanwhile only the records."""
        space = load.space
        self.state.stats.disk_drops[DiskDrop.LOST] += len(rows)
        index = space.tree.index
        assert index is not None
        again = ~space.table.cold[rows] if space.has_full else np.zeros(len(rows), np.bool_)
        for row in rows[~again].tolist():
            node = index.node_of(row)
            if node is not None and node.state != DETACHED:
                self.remover.forget_block(space, node, row)
        if again.any():
            for part in set(load.slots) & set(space.full_parts):
                self.remover.lose_records(space, part, rows[again])
            self.remover.reorder(space, rows[again])
