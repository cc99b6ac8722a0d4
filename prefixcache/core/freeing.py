"""Room on disk: whole segments are given back, oldest and least wanted first.

Rules: what a segment holds of blocks that are in memory is just forgotten. Of the others those that were hit since they
were written, are pinned, or have anything below them that stays are appended again; tails leave, so a prefix loses its
end first. A segment of which nearly everything must stay is passed over: giving it back would only write it again, and
for ever where all are like that. One segment at a time, never one that is being read from or written to. All of it goes
in steps of some nodes, between which anything may happen: what is to be kept is compared with the table once more
before it is ordered, and once more when it is done. Must not know: files.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.commands import Command, FreeSegment, Records, RevokeRecords
from prefixcache.core.disk import Segment
from prefixcache.core.events import SegmentFreed, SegmentLost, WriteEnd
from prefixcache.core.fates import Look, NodesOf
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, Rows
from prefixcache.core.namespaces import Namespace
from prefixcache.core.radix import DETACHED, NOT_QUEUED, Node
from prefixcache.core.reasons import DiskDrop, Kind, Refusal
from prefixcache.core.removal import Remover
from prefixcache.core.spec import DiskSpec
from prefixcache.core.state import State

_LOOKED_AT = 8  # oldest segments compared with each other
_AT_ONCE = 3  # of those never looked at, before one is chosen
_MOST_KEPT = 0.6  # of a segment; beyond it only what must stay is kept
_WORTH_IT = 15 / 16  # of what was put into a segment at most what must stay
# Nodes in one step, as all calls wait meanwhile: 0.1 to 0.3 ms.
_NODES_LOOKED_AT = 64
_NODES_EMPTIED = 8


class _Emptying:
    """A segment that is being freed, node after node. Until it is ordered, `kept` grows by what of it must be kept."""

    def __init__(self, segment: Segment, todo: NodesOf, *, mercy: bool) -> None:
        self.segment = segment
        self.todo = todo
        self.mercy = mercy
        self.kept: dict[Namespace, list[Records]] = {}


class _Comparing:
    """A segment that is being looked at, node after node: bytes that would be kept of it, with mercy and without."""

    def __init__(self, segment: Segment, todo: NodesOf) -> None:
        self.segment = segment
        self.todo = todo
        self.kept_bytes = [0, 0]
        self.gone: tuple[set[Node], set[Node]] = set(), set()


class Freer:
    """See the module's rules."""

    def __init__(self, state: State, remover: Remover, spec: DiskSpec) -> None:
        self.state = state
        self.remover = remover
        self.spec = spec
        self.freeing: dict[int, tuple[Records, ...]] = {}
        self._emptying: _Emptying | None = None
        self._comparing: _Comparing | None = None
        self._unknown: list[int] | None = None  # looked at before a segment is chosen; None: nobody wants to choose
        self._is_due = False  # a write ended: one more segment is looked at, ahead of need
        # What would be kept of a segment, with and without mercy, when last looked at; looked at longest ago first.
        self._kept_bytes: dict[int, tuple[int, int]] = {}
        self._passed_over: set[int] = set()  # those of them that are not worth it

    @property
    def frozen(self) -> set[int]:
        """Segments from which nothing may be read (for checks)."""
        return {*self.freeing, *([self._emptying.segment.number] if self._emptying is not None else ())}

    def note_written(self) -> None:
        """A write ended, and took room."""
        self._is_due = True

    def work(self, out: list[Command]) -> bool:
        """One bounded step of what is to be done; False if nothing is."""
        if self._emptying is not None:
            self._empty(self._emptying, out)
            return True
        disk, size = self.state.disk, self.spec.segment_bytes
        is_short = disk.room_bytes < size
        if self.freeing or not disk.writes_on or not disk.recovered or disk.room_bytes >= 2 * size:
            self._comparing = self._unknown = None
            return False
        if self._comparing is not None:
            self._compare(self._comparing)
            return True
        if not (is_short or self._is_due):
            return False
        oldest = disk.oldest(_LOOKED_AT, self._passed_over)
        if self._is_due:
            self._is_due = False
            return self._begin_look(oldest)
        if oldest:
            self._choose(oldest)
        return bool(oldest)

    def _choose(self, oldest: list[Segment]) -> None:
        """Begins to free the one of which least is kept, once some of those never looked at were."""
        known = self._known(oldest)
        if self._unknown is None:
            self._unknown = [each.number for each in oldest if each.number not in known][:_AT_ONCE]
        while self._unknown:
            number = self._unknown.pop(0)
            segment = self.state.disk.segments.get(number)
            if segment is not None and number not in known:
                self._comparing = _Comparing(segment, NodesOf(self.state.disk, segment))
                return
        self._unknown = None
        numbers = [each.number for each in oldest if each.number in known]
        if not numbers:  # others are the oldest now
            return
        best = min(numbers, key=lambda number: known[number][0])  # of equal ones the oldest
        mercy = known[best][0] <= _MOST_KEPT * self.spec.segment_bytes
        if not mercy:
            best = min(numbers, key=lambda number: known[number][1])
        segment = self.state.disk.segments[best]
        segment.frozen = True
        self._emptying = _Emptying(segment, NodesOf(self.state.disk, segment), mercy=mercy)

    def _known(self, oldest: list[Segment]) -> dict[int, tuple[int, int]]:
        """What is known of these and of those that are passed over; the rest is forgotten."""
        self._passed_over &= self.state.disk.segments.keys()
        numbers = {each.number for each in oldest} | self._passed_over
        self._kept_bytes = {number: kept for number, kept in self._kept_bytes.items() if number in numbers}
        return self._kept_bytes

    def _begin_look(self, oldest: list[Segment]) -> bool:
        """At one never looked at, else again at the one seen longest ago; False if there is none."""
        known = self._known(oldest)
        number = next((each.number for each in oldest if each.number not in known), next(iter(known), None))
        if number is None:
            return False
        segment = self.state.disk.segments[number]
        self._comparing = _Comparing(segment, NodesOf(self.state.disk, segment))
        return True

    def _compare(self, comparing: _Comparing) -> None:
        """Looks at some nodes. They may change before the others are looked at: this is an estimate."""
        if comparing.todo:
            space, nodes = comparing.todo.take(_NODES_LOOKED_AT)
            nodes = [node for node in nodes if node.state != DETACHED]
            if nodes:
                look = Look(space, nodes, comparing.segment.number)
                sizes = _record_bytes(look, comparing.segment.number)
                for mercy, gone in enumerate(comparing.gone):
                    _, kept = look.judge(gone, mercy=bool(mercy))
                    comparing.kept_bytes[mercy] += int(sizes[kept].sum())
        if not comparing.todo:
            number, (without, kept_bytes) = comparing.segment.number, comparing.kept_bytes
            self._kept_bytes.pop(number, None)
            self._kept_bytes[number] = kept_bytes, without
            self._passed_over.discard(number)
            if without > _WORTH_IT * comparing.segment.put_bytes:
                self._passed_over.add(number)
            self._comparing = None

    def done(self, event: SegmentFreed, out: list[Command]) -> None:
        """A segment is gone, or stays."""
        disk = self.state.disk
        keep = self.freeing.pop(event.segment, None)
        if keep is None:
            text = f"segment {event.segment} is not being freed"
            self.state.refuse(out, Kind.NOT_FOUND, Refusal.COPY_UNKNOWN, text)
            return
        disk.room_bytes = event.room_bytes
        segment = disk.segments[event.segment]
        segment.frozen = False
        for records, (ends, segments, pages) in zip(keep, event.kept, strict=True):
            space = self.state.namespaces.get(records.namespace)
            if space is not None:
                self._settle(space, records, ends == WriteEnd.OK, (segments, pages), out)
        if event.freed:
            self._lose(segment)

    def lost(self, event: SegmentLost) -> None:
        """A segment is gone without having been freed."""
        segment = self.state.disk.segments.get(event.segment)
        if segment is not None:
            self._lose(segment)

    def lose_all(self) -> None:
        """Every segment is gone; what was being freed with them."""
        for segment in list(self.state.disk.segments.values()):
            self._lose(segment)
        self.freeing.clear()
        self._kept_bytes.clear()
        self._passed_over.clear()

    def _lose(self, segment: Segment) -> None:
        if self._emptying is not None and self._emptying.segment is segment:
            self._emptying = None
        if self._comparing is not None and self._comparing.segment is segment:
            self._comparing = None
        for space, part, rows, _ in self.state.disk.live_in(segment):
            self.remover.lose_records(space, part, rows)
            if part in space.optional_parts and space.has_full:
                self.state.stats.disk_drops[DiskDrop.LOST] += len(rows)
            else:
                self._forget_cold(space, rows)
            self.remover.reorder(space, rows)  # what came back to memory meanwhile is only there now
        self.state.disk.drop(segment.number)

    def _settle(
        self,
        space: Namespace,
        records: Records,
        fine: NDArray[np.bool_],
        places: tuple[Rows, Rows],
        out: list[Command],
    ) -> None:
        """What was appended again is there from now on, if it is still where it was. What was cleared meanwhile is
        newer on disk than its tombstone now, so it gets another one."""
        segments, pages = places
        gone = np.zeros(len(fine), np.bool_)
        for part in range(len(space.strides)):
            column = space.table.parts[part]
            mine = np.flatnonzero(fine & (records.parts == part))
            rows = records.rows[mine]
            same = (column.segments[rows] == records.segments[mine]) & (column.pages[rows] == records.pages[mine])
            gone[mine[~same]] = True
            if same.any():
                self.state.disk.place(space, part, rows[same], segments[mine][same], pages[mine][same])
        if gone.any():
            keys = np.frombuffer(records.keys, np.uint8).reshape(-1, KEY_BYTES)[gone]
            out.append(RevokeRecords(space.number, keys.tobytes()))

    def _forget_cold(self, space: Namespace, rows: Rows) -> None:
        index = space.tree.index
        assert index is not None
        for row in rows.tolist():
            node = index.node_of(row)
            if node is not None and node.cold and node.state != DETACHED:
                self.state.stats.disk_drops[DiskDrop.LOST] += 1
                self.remover.forget_block(space, node, row)

    def _empty(self, emptying: _Emptying, out: list[Command]) -> None:
        """Decides about some nodes of a segment: tails leave at once, the rest is to be appended again. When all are
        decided about, the segment is given back."""
        if emptying.todo:
            space, nodes = emptying.todo.take(_NODES_EMPTIED)
            for node in nodes:
                if node.state == DETACHED:  # cleared, and a lease holds it: that is no reason to keep its record
                    self._lose_hot(space, emptying.segment.number, node, node.row_array())
            nodes = [node for node in nodes if node.state != DETACHED]
            if nodes:
                self._decide(emptying, Look(space, nodes, emptying.segment.number))
            return
        # Nodes that were split, and blocks that left memory, since.
        for space, rows in self._undecided(emptying):
            emptying.todo.add(space, rows)
        if not emptying.todo:
            self._order(emptying, out)

    def _decide(self, emptying: _Emptying, look: Look) -> None:
        space, segment = look.space, emptying.segment
        cuts, kept = look.judge(set(), mercy=emptying.mercy)
        # Before any node is split: places are those of now.
        if kept.any():
            emptying.kept.setdefault(space, []).append(_records(segment.number, look, kept))
            hits = space.table.hits
            hits[look.rows[kept]] = hits[look.rows[kept]] >> 1
        for place, (node, cut) in enumerate(zip(look.nodes, cuts, strict=True)):
            if not node.cold:
                mine = look.of_node(place)
                self._lose_hot(space, segment.number, node, look.rows[mine][~kept[mine]])
            elif cut < node.count:
                if cut:
                    space.tree.split(node, cut)
                self.state.stats.disk_drops[DiskDrop.NOT_WANTED] += self.remover.drop_cold(node)

    def _undecided(self, emptying: _Emptying) -> list[tuple[Namespace, Rows]]:
        """Rows with a record in the segment that is not among those to be kept."""
        found = []
        for space, part, rows, _ in self.state.disk.live_in(emptying.segment):
            kept = [each.rows[each.parts == part] for each in emptying.kept.get(space, ())]
            left = rows[~np.isin(rows, np.concatenate(kept))] if kept else rows
            if len(left):
                found.append((space, left))
        return found

    def _order(self, emptying: _Emptying, out: list[Command]) -> None:
        """All is decided: what was cleared since is not appended again."""
        keep = []
        for space, pieces in emptying.kept.items():
            if self.state.namespaces.get(space.number) is space:
                keep += [each for piece in pieces if (each := _still_there(space, piece)) is not None]
        self._emptying = None
        self.freeing[emptying.segment.number] = tuple(keep)
        out.append(FreeSegment(emptying.segment.number, tuple(keep)))

    def _lose_hot(self, space: Namespace, segment: int, node: Node, rows: Rows) -> None:
        """Blocks in memory are only in memory from now on. rows: those of the node that are not kept."""
        for part, column in enumerate(space.table.parts):
            mine = rows[column.segments[rows] == segment]
            if len(mine):
                alone = np.count_nonzero(column.slots[mine] == NO_SLOT)
                self.state.stats.disk_drops[DiskDrop.NOT_WANTED] += int(alone)
                self.remover.lose_records(space, part, mine)
        if node.rank != NOT_QUEUED:
            space.policy.retick_leaf(node, space.tail_tick(node))


def _record_bytes(look: Look, segment: int) -> NDArray[np.int64]:
    """i64[n]: what of each block lies in the segment."""
    sizes = np.zeros(len(look.rows), np.int64)
    for part, column in zip(look.space.spec.parts, look.space.table.parts, strict=True):
        sizes += (column.segments[look.rows] == segment) * part.size_bytes
    return sizes


def _records(segment: int, look: Look, kept: NDArray[np.bool_]) -> Records:
    """Everything of the kept blocks that lies in the segment."""
    space = look.space
    keys, parents, depths = [], [], []
    for place in np.unique(look.node_of[kept]).tolist():
        node, places = look.nodes[place], np.flatnonzero(kept[look.of_node(place)])
        before = space.parent_key(node) or bytes(KEY_BYTES)
        packed = np.frombuffer(before + node.edge, np.uint8).reshape(-1, KEY_BYTES)
        keys.append(packed[places + 1])
        parents.append(packed[places])
        depths.append(node.start + places)
    rows, columns = look.rows[kept].astype(np.uint32), space.table.parts
    mine = [np.flatnonzero(column.segments[rows] == segment) for column in columns]
    at = np.concatenate(mine)
    parts = np.repeat(np.arange(len(columns), dtype=np.uint16), [len(each) for each in mine])
    pages = np.concatenate([column.pages[rows[each]] for column, each in zip(columns, mine, strict=True)])
    return Records(
        space.number, parts, rows[at], np.zeros(len(at), np.uint32), np.full(len(at), segment, np.uint32), pages,
        np.concatenate(keys)[at].tobytes(), np.concatenate(parents)[at].tobytes(),
        np.concatenate(depths).astype(np.uint32)[at],
    )  # fmt: skip


def _still_there(space: Namespace, records: Records) -> Records | None:
    """Those of the records that are still the table's; None if none is."""
    there = np.zeros(len(records.rows), np.bool_)
    for part, column in enumerate(space.table.parts):
        rows = records.rows
        same = (column.segments[rows] == records.segments) & (column.pages[rows] == records.pages)
        there |= same & (records.parts == part)
    if there.all():
        return records
    if not there.any():
        return None
    keys, parents = (
        np.frombuffer(packed, np.uint8).reshape(-1, KEY_BYTES)[there] for packed in (records.keys, records.parents)
    )
    return Records(
        records.namespace, records.parts[there], records.rows[there], records.slots[there], records.segments[there],
        records.pages[there], keys.tobytes(), parents.tobytes(), records.depths[there],
    )  # fmt: skip
