"""What an earlier run left on disk, told segment by segment, newest first, while everything else goes on.

Rules: a block is in the tree once all its full parts (of a namespace without any: one) and everything in front of it
are known, not before; as the newest segments come first, nothing that is told later can revoke it. Further parts of it
may be told later. What was cleared since the start does not come back. What
lacks its front when all is told is dropped and counted. Must not know: files, tombstones.
"""

from __future__ import annotations

import numpy as np

from prefixcache.core.commands import Change, Command, RevokeRecords
from prefixcache.core.events import DiskRecovered, RecoveryDone
from prefixcache.core.ids import KEY_BYTES, Rows
from prefixcache.core.namespaces import Namespace
from prefixcache.core.nodes import place_of
from prefixcache.core.radix import ROW_DTYPE, VISIBLE, Path
from prefixcache.core.reasons import DiskDrop
from prefixcache.core.removal import Remover
from prefixcache.core.state import State
from prefixcache.core.table import NO_SEGMENT

_NO_PARENT = bytes(KEY_BYTES)
_TOMBSTONE_BYTES = 1024 * KEY_BYTES  # fits any segment


def tombstones(namespace: int, keys: bytes) -> list[RevokeRecords]:
    """As many as these keys need."""
    return [
        RevokeRecords(namespace, keys[first : first + _TOMBSTONE_BYTES])
        for first in range(0, len(keys), _TOMBSTONE_BYTES)
    ]


class _Found:
    """One block that was told: its parent, and (segment, page) of each part, None for what was not told yet.
    left: parts without which it is nothing."""

    __slots__ = ("left", "parent", "places")

    def __init__(self, parent: bytes, space: Namespace) -> None:
        self.parent = parent
        self.places: list[tuple[int, int] | None] = [None] * len(space.strides)
        self.left = len(space.full_parts) or 1


class _Space:
    """What was told of one namespace. `attached`: (parent, row) of blocks that are in the tree by now."""

    def __init__(self) -> None:
        self.found: dict[bytes, _Found] = {}
        self.children: dict[bytes, dict[bytes, None]] = {}  # by parent, in the order in which they were told
        self.attached: dict[bytes, tuple[bytes, int]] = {}
        self.cleared: set[bytes] = set()
        self.all_cleared = False


class Recoverer:
    """Handler of DiskRecovered and RecoveryDone."""

    def __init__(self, state: State, remover: Remover) -> None:
        self.state = state
        self.remover = remover
        self.spaces: dict[int, _Space] = {}

    def found(self, event: DiskRecovered, out: list[Command]) -> None:
        """Records of one segment and namespace."""
        self.state.disk.segment(event.segment)
        space = self.state.namespaces.get(event.namespace)
        if space is None or not space.on_disk or self.state.disk.recovered:
            return
        told = self.spaces.setdefault(event.namespace, _Space())
        if told.all_cleared:
            return
        whole = self._note(space, told, event)
        for key in whole:
            block = told.found.get(key)
            if block is not None and (block.parent == _NO_PARENT or block.parent in told.attached):
                self._attach(space, told, key, out)

    def cleared(self, space: Namespace, keys: set[bytes] | None) -> None:
        """A namespace (None) or the blocks below some keys were cleared: they do not come back."""
        if self.state.disk.recovered or not space.on_disk:
            return
        told = self.spaces.setdefault(space.number, _Space())
        if keys is None:
            told.all_cleared = True
            told.found.clear()
            told.children.clear()
        else:
            told.cleared |= keys
            for key in keys:
                told.found.pop(key, None)

    def finish(self, event: RecoveryDone, out: list[Command]) -> None:
        """Everything was told."""
        for number, told in self.spaces.items():
            self.state.stats.disk_drops[DiskDrop.ORPHANED] += len(told.found)
            # Nobody could name them in a clear any more, so they go for good.
            if event.complete:
                out += tombstones(number, b"".join(told.found))
        self.spaces.clear()
        self.state.disk.recovered = True

    def _note(self, space: Namespace, told: _Space, event: DiskRecovered) -> list[bytes]:
        """Keeps what was told; answers the keys of blocks that are whole now."""
        whole = []
        count = len(space.strides)
        pages, parts = event.pages.tolist(), event.parts.tolist()
        for place in range(len(pages)):
            at = place * KEY_BYTES
            key = event.keys[at : at + KEY_BYTES]
            if key in told.cleared:
                continue
            part, where = parts[place], (event.segment, pages[place])
            if key in told.attached:
                self._add_part(space, key, told.attached[key][1], part, where)
                continue
            block = told.found.get(key)
            if block is None:
                parent = event.parents[at : at + KEY_BYTES]
                block = told.found[key] = _Found(parent, space)
                told.children.setdefault(parent, {})[key] = None
            if part < count and block.places[part] is None:
                block.places[part] = where
                block.left -= part in space.full_parts or not space.has_full
                if not block.left:
                    whole.append(key)
        return whole

    def _attach(self, space: Namespace, told: _Space, key: bytes, out: list[Command]) -> None:
        """Puts a block whose front is in the tree there, and all that waited for it, run by run."""
        stack = [key]
        while stack:
            run = [stack.pop()]
            while True:
                ready = [child for child in told.children.pop(run[-1], ()) if self._is_whole(told, child)]
                if len(ready) != 1 or space.foreign is not None:  # there a node is one block
                    break
                run.append(ready[0])
            graft = self._graft if space.foreign is None else self._graft_key
            if graft(space, told, run, out):
                stack += ready
            else:
                # The front left meanwhile; what would hang from this stays behind and is counted at the end.
                for gone in run:
                    told.found.pop(gone, None)
                self.state.stats.disk_drops[DiskDrop.ORPHANED] += len(run)

    def _is_whole(self, told: _Space, key: bytes) -> bool:
        block = told.found.get(key)
        return block is not None and not block.left

    def _graft(self, space: Namespace, told: _Space, run: list[bytes], out: list[Command]) -> bool:
        chain = []
        above = told.found[run[0]].parent
        while above != _NO_PARENT:
            chain.append(above)
            above = told.attached[above][0]
        chain.reverse()
        keys = b"".join([*chain, *run])
        path = space.tree.walk(keys)
        if path.blocks < len(chain):
            return False
        blocks = [told.found.pop(key) for key in run]
        known = path.blocks - len(chain)
        rows = []
        if known:
            rows += self._mark_known(space, path, len(chain), blocks[:known])
        if known < len(run) and space.tree.next_after(path, keys) is None:
            rows += self._add(space, path, b"".join(run[known:]), blocks[known:])
        rows += [-1] * (len(run) - len(rows))  # being written anew
        for key, block, row in zip(run, blocks, rows, strict=True):
            told.attached[key] = block.parent, row
        self.state.stats.blocks_recovered += len(run)
        return True

    def _graft_key(self, space: Namespace, told: _Space, run: list[bytes], out: list[Command]) -> bool:
        """In a foreign namespace: one block, found by its key, wherever it hangs by now."""
        assert space.foreign is not None
        key = run[0]
        known, parent = space.foreign.by_key.get(key), None
        block = told.found[key]
        if known is None and block.parent != _NO_PARENT:
            parent = space.foreign.by_key.get(block.parent)
            if parent is None or parent.state != VISIBLE:
                return False
        del told.found[key]
        row = -1  # being written anew
        if known is None:
            path = Path([parent], parent.end) if parent is not None else Path([], 0)
            [row] = self._add(space, path, key, [block])
        elif known.state == VISIBLE:
            [row] = self._mark_known(space, Path([known], known.end), 0, [block])
        told.attached[key] = block.parent, row
        self.state.stats.blocks_recovered += 1
        return True

    def _add_part(self, space: Namespace, key: bytes, row: int, part: int, where: tuple[int, int]) -> None:
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

    def _mark_known(self, space: Namespace, path: Path, first: int, blocks: list[_Found]) -> list[int]:
        """Blocks that were stored again before they were told: their records will do."""
        rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)[first : first + len(blocks)].astype(np.uint32)
        self.state.publish_links(Change.STORED, space, rows)
        for part in range(len(space.strides)):
            lacks = space.table.parts[part].segments[rows] == NO_SEGMENT
            lacks &= np.array([(row, part) not in space.writing for row in rows.tolist()], np.bool_)
            self._place(space, part, rows[lacks], [block for block, yes in zip(blocks, lacks, strict=True) if yes])
        for node in path.nodes:
            if node.rank >= 0 or node.rank < -1:
                space.policy.retick_leaf(node, space.tail_tick(node))
        return [int(row) for row in rows]

    def _add(self, space: Namespace, path: Path, edge: bytes, blocks: list[_Found]) -> list[int]:
        rows = space.table.allocate(len(blocks))
        node = space.tree.graft(path, edge, rows.astype(ROW_DTYPE).tobytes(), cold=True)
        node.state = VISIBLE
        space.table.cold[rows] = True
        space.cold_blocks += len(blocks)
        space.table.touched[rows] = 0
        for part in range(len(space.strides)):
            self._place(space, part, rows, blocks)
        self.state.appear(node)
        self.state.publish_blocks(Change.STORED, node)
        self.remover.join_like(space, node)
        return [int(row) for row in rows]

    def _place(self, space: Namespace, part: int, rows: Rows, blocks: list[_Found]) -> None:
        """What was told of one part of these blocks."""
        told = [block.places[part] is not None for block in blocks]
        if any(told):
            places = np.array([block.places[part] for block in blocks if block.places[part]], np.uint32).reshape(-1, 2)
            mine = rows if all(told) else rows[told]
            self.state.disk.place(space, part, mine, places[:, 0], places[:, 1])
