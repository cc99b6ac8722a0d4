"""Room on disk: whole segments are given back, oldest and least wanted first.

Rules: what a segment holds of blocks that are in memory is just forgotten. Of the others those that were hit since they
were written, are pinned, or have anything below them that stays are appended again; tails leave, so a prefix loses its
end first. One segment at a time, never one that is being read from or written to. Must not know: files.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.commands import Command, FreeSegment, Records, RevokeRecords
from prefixcache.core.disk import Segment
from prefixcache.core.events import SegmentFreed, SegmentLost, WriteEnd
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, Rows
from prefixcache.core.namespaces import Namespace
from prefixcache.core.radix import DETACHED, NOT_QUEUED, Node
from prefixcache.core.reasons import DiskDrop, Kind, Refusal
from prefixcache.core.removal import Remover
from prefixcache.core.spec import DiskSpec
from prefixcache.core.state import State

_LOOKED_AT = 8  # oldest segments compared with each other
_AT_ONCE = 3  # looked at in one step at most: all calls wait meanwhile
_MOST_KEPT = 0.6  # of a segment; beyond it only what must stay is kept

_Alone = dict[Node, NDArray[np.bool_]]


class _Fate:
    """What would become of a segment's cold blocks: `tails` of nodes that leave, `kept` places of nodes that stay."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.tails: list[tuple[Node, int]] = []  # (node, first place that leaves), deepest first
        self.kept: list[tuple[Node, NDArray[np.int64]]] = []
        self.kept_bytes = 0


class Freer:
    """See the module's rules."""

    def __init__(self, state: State, remover: Remover, spec: DiskSpec) -> None:
        self.state = state
        self.remover = remover
        self.spec = spec
        self.freeing: dict[int, tuple[Records, ...]] = {}
        # What would be kept of a segment, with and without mercy, when last looked at; looked at longest ago first.
        self._kept_bytes: dict[int, tuple[int, int]] = {}

    def look_ahead(self) -> None:
        """Where the next write may need room, finds out ahead of need which segment is best freed, a segment a call."""
        if self.state.disk.room_bytes < 2 * self.spec.segment_bytes and (oldest := self._oldest()):
            self._compare(oldest, at_once=1)

    def make_room(self, out: list[Command]) -> None:
        """Begins to free a segment if the cap leaves no room for another one."""
        if self.state.disk.room_bytes >= self.spec.segment_bytes or not (oldest := self._oldest()):
            return
        if not all(each.number in self._kept_bytes for each in oldest):
            self._compare(oldest, at_once=_AT_ONCE)
        known = [each for each in oldest if each.number in self._kept_bytes]
        best = min(known, key=lambda each: self._kept_bytes[each.number][0])
        mercy = self._kept_bytes[best.number][0] <= _MOST_KEPT * self.spec.segment_bytes
        if not mercy:
            best = min(known, key=lambda each: self._kept_bytes[each.number][1])
        self._begin(_fate(best, self._alone_in(best), mercy=mercy), out)

    def _oldest(self) -> list[Segment]:
        """Those that may be freed, oldest first; none where nothing can be freed now."""
        disk = self.state.disk
        if self.freeing or not disk.writes_on or not disk.recovered:
            return []
        newest = max(disk.segments, default=0)
        free = [each for each in disk.segments.values() if each.number != newest and not each.reads]
        return sorted(free, key=lambda each: each.number)[:_LOOKED_AT]

    def _compare(self, oldest: list[Segment], at_once: int) -> None:
        """Looks at those never looked at, `at_once` of them at most, else again at the one seen longest ago."""
        numbers = {each.number for each in oldest}
        known = self._kept_bytes = {n: kept for n, kept in self._kept_bytes.items() if n in numbers}
        new = [each.number for each in oldest if each.number not in known][:at_once]
        for number in new or [next(iter(known))]:
            known.pop(number, None)
            segment = self.state.disk.segments[number]
            alone = self._alone_in(segment)
            known[number] = _fate(segment, alone, mercy=True).kept_bytes, _fate(segment, alone, mercy=False).kept_bytes

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
            self._lose(segment, out)

    def lost(self, event: SegmentLost, out: list[Command]) -> None:
        """A segment is gone without having been freed."""
        segment = self.state.disk.segments.get(event.segment)
        if segment is not None:
            self._lose(segment, out)

    def lose_all(self, out: list[Command]) -> None:
        """Every segment is gone; what was being freed with them."""
        for segment in list(self.state.disk.segments.values()):
            self._lose(segment, out)
        self.freeing.clear()
        self._kept_bytes.clear()

    def _lose(self, segment: Segment, out: list[Command]) -> None:
        for space, part, rows, _ in self.state.disk.live_in(segment):
            self.remover.lose_records(space, part, rows)
            if part in space.optional_parts and space.has_full:
                self.state.stats.disk_drops[DiskDrop.LOST] += len(rows)
            else:
                self._forget_cold(space, rows, out)
            self.remover.reorder(space, rows)  # what came back to memory meanwhile is only there now
        del self.state.disk.segments[segment.number]

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

    def _forget_cold(self, space: Namespace, rows: Rows, out: list[Command]) -> None:
        index = space.tree.index
        assert index is not None
        for row in rows.tolist():
            node = index.node_of(row)
            if node is not None and node.cold and node.state != DETACHED:
                self.state.stats.disk_drops[DiskDrop.LOST] += 1
                self.remover.forget_block(space, node, row)

    def _begin(self, fate: _Fate, out: list[Command]) -> None:
        disk, segment = self.state.disk, fate.segment
        # Before any node is split: places are those of now.
        keep = tuple(_records(segment.number, each) for each in _by_space(fate.kept))
        kept = {node: node.row_array()[places] for node, places in fate.kept}
        for node, places in fate.kept:
            assert node.space is not None
            hits = node.space.table.hits
            rows = node.row_array()[places]
            hits[rows] = hits[rows] >> 1
        for node, place in fate.tails:
            assert node.space is not None
            if place:
                node.space.tree.split(node, place)
            self.state.stats.disk_drops[DiskDrop.NOT_WANTED] += self.remover.drop_cold(node)
        for space, part, rows, _ in disk.live_in(segment):
            self._lose_hot(space, part, (rows, kept), out)
        segment.frozen = True
        self.freeing[segment.number] = keep
        out.append(FreeSegment(segment.number, keep))

    def _lose_hot(self, space: Namespace, part: int, found: tuple[Rows, dict[Node, Rows]], out: list[Command]) -> None:
        """Blocks in memory (and cleared ones that leases hold) are only in memory from now on, but for those kept.

        found: rows, and which rows are kept."""
        rows, kept = found
        index = space.tree.index
        assert index is not None
        numbers = index.numbers(rows)
        for number in np.unique(numbers).tolist():
            node = index.by_number[number]
            if node.cold and node.state != DETACHED:
                continue
            mine = rows[numbers == number]
            if node in kept:
                mine = mine[~np.isin(mine, kept[node])]
            alone = np.count_nonzero(space.table.parts[part].slots[mine] == NO_SLOT)
            self.state.stats.disk_drops[DiskDrop.NOT_WANTED] += int(alone)
            self.remover.lose_records(space, part, mine)
            if node.rank != NOT_QUEUED:
                space.policy.retick_leaf(node, space.tail_tick(node))

    def _alone_in(self, segment: Segment) -> _Alone:
        """What only this segment holds: which places of which nodes."""
        here: _Alone = {}
        for space, part, rows, _ in self.state.disk.live_in(segment):
            index = space.tree.index
            assert index is not None
            marked = np.zeros(space.table.high_water, np.bool_)
            marked[rows] = True
            for number in np.unique(index.numbers(rows)).tolist():
                node = index.by_number[number]
                if node.state == DETACHED:
                    continue
                mine = marked[node.row_array()]
                if not node.cold:  # a part that was not asked for when the others were loaded
                    mine &= space.table.parts[part].slots[node.row_array()] == NO_SLOT
                if mine.any():
                    here[node] = here.get(node, False) | mine
        return here


def _fate(segment: Segment, here: _Alone, *, mercy: bool) -> _Fate:
    """What would happen to what only the segment holds. mercy: what was hit is kept."""
    fate = _Fate(segment)
    gone: set[Node] = set()
    for node in sorted(here, key=lambda each: -each.start):
        if node.cold:
            cut = _cut(node, here[node], gone, mercy=mercy)
            if cut < node.count:
                fate.tails.append((node, cut))
            if not cut:
                gone.add(node)
            kept = np.flatnonzero(here[node][:cut])
        else:
            kept = np.flatnonzero(here[node] & _stays(node, mercy=mercy))
        if len(kept):
            fate.kept.append((node, kept))
            assert node.space is not None
            fate.kept_bytes += len(kept) * sum(part.size_bytes for part in node.space.spec.parts)
    return fate


def _stays(node: Node, *, mercy: bool) -> NDArray[np.bool_]:
    """bool[n]: blocks that are pinned, or, with mercy, were hit."""
    assert node.space is not None
    stays = np.zeros(node.count, np.bool_)
    stays[: node.pinned_depth() - node.start] = True
    if mercy:
        stays |= node.space.table.hits[node.row_array()] > 0
    return stays


def _cut(node: Node, here: NDArray[np.bool_], gone: set[Node], *, mercy: bool) -> int:
    """From which place on all blocks of a cold node may leave."""
    if node.held or any(child not in gone for child in (node.children or {}).values()):
        return node.count
    last = np.flatnonzero(~here | _stays(node, mercy=mercy))
    return int(last[-1]) + 1 if len(last) else 0


def _by_space(kept: Iterable[tuple[Node, NDArray[np.int64]]]) -> list[list[tuple[Node, NDArray[np.int64]]]]:
    spaces: dict[int, list[tuple[Node, NDArray[np.int64]]]] = {}
    for node, places in kept:
        assert node.space is not None
        spaces.setdefault(node.space.number, []).append((node, places))
    return list(spaces.values())


def _records(segment: int, kept: list[tuple[Node, NDArray[np.int64]]]) -> Records:
    """Everything of these blocks that lies in the segment."""
    space = kept[0][0].space
    assert space is not None
    rows = np.concatenate([node.row_array()[places] for node, places in kept]).astype(np.uint32)
    keys, parents = [], []
    for node, places in kept:
        before = space.parent_key(node) or bytes(KEY_BYTES)
        packed = np.frombuffer(before + node.edge, np.uint8).reshape(-1, KEY_BYTES)
        keys.append(packed[places + 1])
        parents.append(packed[places])
    depths = np.concatenate([node.start + places for node, places in kept]).astype(np.uint32)
    columns = space.table.parts
    mine = [np.flatnonzero(column.segments[rows] == segment) for column in columns]
    at = np.concatenate(mine)
    parts = np.repeat(np.arange(len(columns), dtype=np.uint16), [len(each) for each in mine])
    pages = np.concatenate([column.pages[rows[each]] for column, each in zip(columns, mine, strict=True)])
    return Records(
        space.number, parts, rows[at], np.zeros(len(at), np.uint32), np.full(len(at), segment, np.uint32), pages,
        np.concatenate(keys)[at].tobytes(), np.concatenate(parents)[at].tobytes(), depths[at],
    )  # fmt: skip
