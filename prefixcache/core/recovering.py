"""What an earlier run left on disk, told a few segments at a time, newest first, while everything else goes on.

Rules: a block is in the tree once all its full parts (of a namespace without any: one) and everything in front of it
are known, not before; as the newest segments come first, nothing that is told later can revoke it. Further parts of it
may be told later. What was cleared since the start does not come back. What
lacks its front when all is told is dropped and counted. Must not know: files, tombstones.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from prefixcache.core.commands import Change, Command, RevokeRecords
from prefixcache.core.disk import UNKNOWN_ROOM
from prefixcache.core.events import DiskRecovered, RecoveryDone
from prefixcache.core.ids import KEY_BYTES, Rows
from prefixcache.core.namespaces import Namespace
from prefixcache.core.nodes import place_of
from prefixcache.core.radix import NOT_QUEUED, ROW_DTYPE, VISIBLE, Path, path_to
from prefixcache.core.reasons import DiskDrop
from prefixcache.core.removal import Remover
from prefixcache.core.state import State
from prefixcache.core.table import NO_SEGMENT
from prefixcache.core.told import Column, Run, Told, Where

_NO_PARENT = bytes(KEY_BYTES)
_NOWHERE: Rows = np.empty(0, np.uint32)
_TOMBSTONE_BYTES = 1024 * KEY_BYTES  # fits any segment


def tombstones(namespace: int, keys: bytes) -> list[RevokeRecords]:
    """As many as these keys need."""
    return [
        RevokeRecords(namespace, keys[first : first + _TOMBSTONE_BYTES])
        for first in range(0, len(keys), _TOMBSTONE_BYTES)
    ]


class Recoverer:
    """Handler of DiskRecovered and RecoveryDone."""

    def __init__(self, state: State, remover: Remover) -> None:
        self.state = state
        self.remover = remover
        self.spaces: dict[int, Told] = {}

    def begin_anew(self) -> None:
        """Another directory will be told."""
        self.spaces.clear()
        self.state.disk.recovered = False

    def found(self, event: DiskRecovered) -> None:
        """Records of some segments and one namespace."""
        for number in (*event.empty, *np.unique(event.segments).tolist()):
            self.state.disk.segment(number).put_bytes = UNKNOWN_ROOM
        space = self.state.namespaces.get(event.namespace)
        if space is None or not space.on_disk or self.state.disk.recovered or not event.keys:
            return
        told = self._told(space)
        if told.all_cleared:
            return
        told.take(event)
        for parent in told.fresh():
            above = told.run_of.get(parent)
            if parent == _NO_PARENT or (above is not None and above.rows is not None):
                self._attach(space, told, parent)

    def cleared(self, space: Namespace, keys: set[bytes] | None) -> None:
        """A namespace (None) or the blocks below some keys were cleared: they do not come back."""
        if self.state.disk.recovered or not space.on_disk:
            return
        told = self._told(space)
        if keys is None:
            told.clear_all()
        else:
            told.clear(keys)

    def finish(self, event: RecoveryDone, out: list[Command]) -> None:
        """Everything was told."""
        for number, told in self.spaces.items():
            left_over = told.left_over()
            self.state.stats.disk_drops[DiskDrop.ORPHANED] += len(left_over)
            # Nobody could name them in a clear any more, so they go for good.
            if event.complete:
                out += tombstones(number, b"".join(left_over))
        self.spaces.clear()
        self.state.disk.recovered = True
        if event.room_bytes is not None:  # else a full disk is noticed by a write that fails
            # A write that ended since it was asked for knows better.
            self.state.disk.room_bytes = min(self.state.disk.room_bytes, event.room_bytes)

    def _told(self, space: Namespace) -> Told:
        told = self.spaces.get(space.number)
        if told is None:
            told = self.spaces[space.number] = Told(space, partial(self._add_part, space))
        return told

    def _attach(self, space: Namespace, told: Told, parent: bytes) -> None:
        """Puts what waits for a block that is in the tree (or for nothing) there, and all that waits for that."""
        stack = told.waiting.pop(parent, [])
        while stack:
            chain = [stack.pop()]
            if space.foreign is None:  # there a node is one block
                while len(told.waiting.get(chain[-1].keys[-1], ())) == 1:
                    chain += told.waiting.pop(chain[-1].keys[-1])
            if self._graft(space, told, chain):
                if told.waiting:
                    keys = [key for run in chain for key in run.keys if key in told.waiting]
                    stack += [run for key in keys for run in told.waiting.pop(key)]
            else:
                # The front left meanwhile; what would hang from this stays behind and is counted at the end.
                for run in chain:
                    told.forget(run)
                    self.state.stats.disk_drops[DiskDrop.ORPHANED] += len(run.keys)

    def _graft(self, space: Namespace, told: Told, chain: list[Run]) -> bool:
        """False: what stood in front is not there any more."""
        run = chain[0] if len(chain) == 1 else Run.joined(chain)
        rows = self._bring(space, told, run)
        if rows is None:
            return False
        placed = np.full(len(run.keys), -1, np.int64)  # being written anew
        placed[: len(rows)] = rows
        at_run = 0
        for each in chain:
            each.rows = placed[at_run : at_run + len(each.keys)]
            at_run += len(each.keys)
        self.state.stats.blocks_recovered += len(run.keys)
        return True

    def _bring(self, space: Namespace, told: Told, run: Run) -> Rows | None:
        """Rows of its leading blocks, as far as they are in sight now; None where what stood in front is not there."""
        if space.foreign is not None and (known := space.foreign.by_key.get(run.keys[0])) is not None:
            # Found by its key, wherever it hangs by now.
            at = Path([known], known.end)
            return self._mark_known(space, at, 0, run) if known.state == VISIBLE else _NOWHERE
        path = self._front(space, told, run.parent)
        if path is None:
            return None
        if _next_key(space, path, run.keys[0]):
            return self._add_behind_known(space, path, run)
        return self._add(space, path, run)

    def _front(self, space: Namespace, told: Told, parent: bytes) -> Path | None:
        """The path down to a block that was attached (its last node is enough), if it is still there."""
        if parent == _NO_PARENT:
            return Path([], 0)
        run, index = told.run_of[parent], space.tree.index
        assert run.rows is not None
        assert index is not None
        row = int(run.rows[run.place_of(parent)])
        node = index.node_of(row) if row >= 0 else None
        if node is not None and node.state == VISIBLE:
            place = row - node.first_row if node.first_row >= 0 else place_of(node, row)
            if place >= 0 and node.edge[place * KEY_BYTES : (place + 1) * KEY_BYTES] == parent:
                return Path([node], node.start + place + 1)
        return self._front_by_keys(space, told, parent)

    def _front_by_keys(self, space: Namespace, told: Told, parent: bytes) -> Path | None:
        """The same where its row is another block's by now, or was none: it may have been stored again."""
        if space.foreign is not None:
            node = space.foreign.by_key.get(parent)
            return Path([node], node.end) if node is not None and node.state == VISIBLE else None
        keys = told.keys_down_to(parent)
        path = space.tree.walk(keys)
        return path if path.blocks * KEY_BYTES == len(keys) else None

    def _add_behind_known(self, space: Namespace, path: Path, run: Run) -> Rows:
        """Some of it was stored again before it was told, or is being stored."""
        if path.nodes:
            path = path_to(path.nodes[-1], path.blocks)
        front = b"".join([node.edge for node in path.nodes])[: path.blocks * KEY_BYTES]
        keys = front + b"".join(run.keys)
        found = space.tree.walk(keys)
        known = found.blocks - path.blocks
        rows = _NOWHERE
        if known > 0:
            rows = self._mark_known(space, found, path.blocks, run.cut(0, known, run.parent))
        if 0 <= known < len(run.keys) and space.tree.next_after(found, keys) is None:
            rows = np.concatenate((rows, self._add(space, found, run.cut(known, len(run.keys), run.parent))))
        return rows

    def _add_part(self, space: Namespace, key: bytes, row: int, part: int, where: Where) -> None:
        """One more part of a block that is in the tree, if it still is."""
        index = space.tree.index
        node = index.node_of(row) if index is not None and row >= 0 else None
        if node is None or part >= len(space.strides) or node.state != VISIBLE:
            return
        at = place_of(node, row) * KEY_BYTES
        rows = np.array([row], np.uint32)
        lacks = space.table.parts[part].segments[row] == NO_SEGMENT and (row, part) not in space.writing
        if at >= 0 and node.edge[at : at + KEY_BYTES] == key and lacks:
            self.state.disk.place(space, part, rows, *np.array([where], np.uint32).T)
            self.remover.reorder(space, rows)

    def _mark_known(self, space: Namespace, path: Path, first: int, run: Run) -> Rows:
        """Blocks that were stored again before they were told: their records will do."""
        end = first + len(run.keys)
        rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)[first:end].astype(np.uint32)
        self.state.publish_links(Change.STORED, space, rows)
        for part in range(len(space.strides)):
            lacks = space.table.parts[part].segments[rows] == NO_SEGMENT
            if space.writing:
                lacks &= np.array([(row, part) not in space.writing for row in rows.tolist()], np.bool_)
            self._place(space, part, rows[lacks], (run.segments[part][lacks], run.pages[part][lacks]))
        for node in path.nodes:
            if node.rank != NOT_QUEUED:
                space.policy.retick_leaf(node, space.tail_tick(node))
        return rows

    def _add(self, space: Namespace, path: Path, run: Run) -> Rows:
        rows = space.table.allocate(len(run.keys))
        node = space.tree.graft(path, b"".join(run.keys), rows.astype(ROW_DTYPE).tobytes(), cold=True)
        node.state = VISIBLE
        space.table.cold[rows] = True
        space.cold_blocks += len(rows)
        space.table.touched[rows] = 0
        for part in range(len(space.strides)):
            self._place(space, part, rows, (run.segments[part], run.pages[part]))
        self.state.appear(node)
        self.state.publish_blocks(Change.STORED, node)
        self.remover.join_like(space, node)
        return rows

    def _place(self, space: Namespace, part: int, rows: Rows, where: tuple[Column, Column]) -> None:
        """What was told of one part of these blocks."""
        segments, pages = where
        told = segments != NO_SEGMENT
        if not told.all():
            rows, segments, pages = rows[told], segments[told], pages[told]
        if len(rows):
            self.state.disk.place(space, part, rows, segments, pages)


def _next_key(space: Namespace, path: Path, key: bytes) -> bool:
    """Whether this is the block behind a path already, in whatever state."""
    last = path.nodes[-1] if path.nodes else space.tree.root
    if path.nodes and last.end != path.blocks:
        at = (path.blocks - last.start) * KEY_BYTES
        return last.edge[at : at + KEY_BYTES] == key
    return last.children is not None and key in last.children
