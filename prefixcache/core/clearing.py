"""Clear, and blocks whose bytes turned out wrong: subtrees that leave at once.

Rules: what leaves is out of sight before the answer; leased blocks keep their slots until their leases end.
Must not know: policies, deadlines.
"""

from __future__ import annotations

import numpy as np

from prefixcache.core.commands import Change, Cleared, Command, RevokeRecords
from prefixcache.core.events import ClearRequested, PartFailedVerification
from prefixcache.core.ids import KEY_BYTES
from prefixcache.core.namespaces import Namespace
from prefixcache.core.nodes import find_row, place_of
from prefixcache.core.radix import DETACHED, FILLING, Node, subtree
from prefixcache.core.reasons import Kind, Refusal
from prefixcache.core.recovering import Recoverer, tombstones
from prefixcache.core.removal import Remover
from prefixcache.core.state import State
from prefixcache.core.table import NO_SEGMENT


class Clearing:
    """Handlers of ClearRequested and PartFailedVerification."""

    def __init__(self, state: State, remover: Remover) -> None:
        self.state = state
        self.remover = remover
        self.recoverer: Recoverer | None = None  # where there is a disk

    def clear(self, event: ClearRequested, out: list[Command]) -> None:
        state = self.state
        if event.namespace is None:
            if event.keys is not None:
                text = "keys need a namespace"
                state.refuse(out, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID, text)
                return
            counts = [self._clear_all(space, out) for space in state.namespaces.values()]
            if self.recoverer is not None:
                out.append(RevokeRecords(None, None))
            self._answer(counts, out)
            return
        space = state.known_namespace(event.namespace, out)
        if space is None:
            return
        if event.keys is None:
            counts = [self._clear_all(space, out)]
            if space.on_disk:
                out.append(RevokeRecords(space.number, None))
            self._answer(counts, out)
        elif state.good_keys(event.keys, 0, out):
            if space.foreign is not None:
                nodes = [space.foreign.by_key.get(event.keys[at : at + KEY_BYTES]) for at in _starts(event.keys)]
                counts = [self._remove(node, out) for node in nodes if node is not None]
                self._answer(counts, out)
            else:
                self._answer([self._clear_prefix(space, event.keys, out)], out)

    def part_failed(self, event: PartFailedVerification, out: list[Command]) -> None:
        """The block with this part, and all that follows it, leave."""
        state = self.state
        space = state.known_namespace(event.namespace, out)
        if space is None:
            return
        node = None
        if 0 <= event.part < len(space.strides) and 0 <= event.row < space.table.high_water:
            column = space.table.parts[event.part]
            if int(column.generations[event.row]) == event.generation and event.generation > 0:
                node = find_row(space, event.row)
        if node is None:
            text = "that part is not stored any more"
            state.refuse(out, Kind.FAILED_PRECONDITION, Refusal.STALE, text)
            return
        state.stats.parts_failed_verification += 1
        self._answer([self.remove_from(space, node, event.row, out)], out)

    def remove_from(self, space: Namespace, node: Node, row: int, out: list[Command]) -> tuple[int, int]:
        """Removes the block of `row`, which is in `node`, and all below it."""
        place = place_of(node, row)
        if place:
            space.tree.split(node, place)
        return self._remove(node, out)

    def _clear_all(self, space: Namespace, out: list[Command]) -> tuple[int, int]:
        gone = held = 0
        if self.recoverer is not None:
            self.recoverer.cleared(space, None)
        for node in list((space.tree.root.children or {}).values()):
            counts = self.remover.detach(node)
            gone, held = gone + counts[0], held + counts[1]
        if self.state.config.publish:
            out.append(self.state.publish(Change.CLEARED, space, b"", b"", 0))
        return gone, held

    def _clear_prefix(self, space: Namespace, keys: bytes, out: list[Command]) -> tuple[int, int]:
        path = space.tree.walk(keys, FILLING)
        if not path.nodes or path.blocks * KEY_BYTES != len(keys):
            if self.recoverer is not None and keys and space.on_disk and not self.state.disk.recovered:
                self.recoverer.cleared(space, {keys[-KEY_BYTES:]})
                out.append(RevokeRecords(space.number, keys[-KEY_BYTES:]))
            return 0, 0
        node = path.nodes[-1]
        place = path.blocks - 1 - node.start
        if place:
            space.tree.split(node, place)
        return self._remove(node, out)

    def _remove(self, node: Node, out: list[Command]) -> tuple[int, int]:
        space = node.space
        assert space is not None
        if node.state == DETACHED:
            return 0, 0  # it left with its parent a moment ago
        if self.state.config.publish:
            first_key = node.edge[:KEY_BYTES]
            out.append(self.state.publish(Change.CLEARED, space, first_key, space.parent_key(node), node.start))
        if space.on_disk:
            self._revoke(space, node, out)
        return self.remover.detach(node)

    def _revoke(self, space: Namespace, node: Node, out: list[Command]) -> None:
        """A tombstone for all that is, or is about to be, on disk of a subtree; or may be, until all is read that was
        there at the start."""
        may_be = not self.state.disk.recovered
        keys = []
        for below in subtree(node):
            rows = below.row_array()
            on_disk = np.full(len(rows), may_be, np.bool_)
            for column in space.table.parts:
                on_disk |= column.segments[rows] != NO_SEGMENT
            if space.writing:
                under_way = {row for row, _ in space.writing}
                on_disk |= np.array([row in under_way for row in rows.tolist()], np.bool_)
            keys.append(np.frombuffer(below.edge, np.uint8).reshape(-1, KEY_BYTES)[on_disk].tobytes())
        if self.recoverer is not None:
            self.recoverer.cleared(space, {node.edge[:KEY_BYTES]})
        packed = b"".join(keys)
        out += tombstones(space.number, packed)

    def _answer(self, counts: list[tuple[int, int]], out: list[Command]) -> None:
        gone = sum(count[0] for count in counts)
        self.state.stats.blocks_cleared += gone
        out.append(Cleared(gone, sum(count[1] for count in counts)))


def _starts(keys: bytes) -> range:
    return range(0, len(keys), KEY_BYTES)
