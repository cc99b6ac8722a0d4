"""Clear, and blocks whose bytes turned out wrong: subtrees that leave at once.

Rules: what leaves is out of sight before the answer; leased blocks keep their slots until their leases end.
Must not know: policies, deadlines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prefixcache.core.commands import Change, Cleared, Command, RevokeRecords
from prefixcache.core.events import ClearRequested, PartFailedVerification
from prefixcache.core.ids import KEY_BYTES
from prefixcache.core.namespaces import ForeignIndex, Namespace
from prefixcache.core.nodes import find_row, place_of
from prefixcache.core.radix import DETACHED, FILLING, Node, Path, subtree
from prefixcache.core.reasons import Kind, Refusal
from prefixcache.core.recovering import Recoverer, tombstones
from prefixcache.core.removal import Remover
from prefixcache.core.state import State
from prefixcache.core.table import NO_SEGMENT

if TYPE_CHECKING:
    from prefixcache.core.pinning import Pinning


class Clearing:
    """Handlers of ClearRequested and PartFailedVerification."""

    def __init__(self, state: State, remover: Remover) -> None:
        self.state = state
        self.remover = remover
        self.recoverer: Recoverer | None = None  # where there is a disk
        self.pinning: Pinning | None = None

    def clear(self, event: ClearRequested, out: list[Command]) -> None:
        state = self.state
        if text := _contradiction(event):
            state.refuse(out, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID, text)
            return
        if event.namespace is None:
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
                self._clear_foreign(space, space.foreign, event, out)
            else:
                self._clear_prefix(space, event, out)

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
        self._end_pins(space, None, out)
        if self.recoverer is not None:
            self.recoverer.cleared(space, None)
        for node in list((space.tree.root.children or {}).values()):
            counts = self.remover.detach(node)
            gone, held = gone + counts[0], held + counts[1]
        self.state.publish(Change.CLEARED, space, b"", b"", 0)
        return gone, held

    def _clear_foreign(self, space: Namespace, index: ForeignIndex, event: ClearRequested, out: list[Command]) -> None:
        keys = event.keys or b""
        found = [index.by_key.get(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]
        nodes = [node for node in found if node is not None]
        unknown = [keys[KEY_BYTES * at : KEY_BYTES * (at + 1)] for at, node in enumerate(found) if node is None]
        if event.own_tail:
            text = "keys of a foreign namespace are no chain; name the blocks that are to go"
            self.state.refuse(out, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID, text)
        elif event.gently and (texts := [text for node in nodes if (text := _in_use(node, node.start))]):
            self.state.refuse(out, Kind.FAILED_PRECONDITION, Refusal.IN_USE, texts[0])
        else:
            self._revoke_unknown(space, unknown, out)
            self._answer([self._remove(node, out) for node in nodes], out)

    def _clear_prefix(self, space: Namespace, event: ClearRequested, out: list[Command]) -> None:
        keys = event.keys or b""
        path = space.tree.walk(keys, FILLING)
        place = 0
        if event.own_tail:
            node = _own_tail(path)
        elif path.nodes and path.blocks * KEY_BYTES == len(keys):
            node = path.nodes[-1]
            place = path.blocks - 1 - node.start
        else:
            node = None
        if event.gently and (text := self._why_not(space, node, place, keys)):
            self.state.refuse(out, Kind.FAILED_PRECONDITION, Refusal.IN_USE, text)
            return
        if node is not None:
            if place:
                space.tree.split(node, place)
            self._end_pins(space, (node.edge[:KEY_BYTES], node.start), out)
            self._answer([self._remove(node, out)], out)
            return
        if not event.own_tail and keys:
            self._clear_unknown(space, keys, out)
        self._answer([(0, 0)], out)

    def _why_not(self, space: Namespace, node: Node | None, place: int, keys: bytes) -> str:
        """Who would lose something if all from `place` of a node on went (no node: what has `keys` as its prefix)."""
        first = keys[-KEY_BYTES:] if node is None else node.edge[place * KEY_BYTES : (place + 1) * KEY_BYTES]
        block = len(keys) // KEY_BYTES - 1 if node is None else node.start + place
        if any(pin.key(block) == first for pin in space.prefix_pins.values()):
            return "some of it is pinned; see `prefixcache pins`"
        return _in_use(node, block) if node is not None else ""

    def _clear_unknown(self, space: Namespace, keys: bytes, out: list[Command]) -> None:
        """A prefix that is not stored as far as anybody knows: it may be pinned, or still to be told by the disk."""
        self._end_pins(space, (keys[-KEY_BYTES:], len(keys) // KEY_BYTES - 1), out)
        self._revoke_unknown(space, [keys[-KEY_BYTES:]], out)

    def _revoke_unknown(self, space: Namespace, keys: list[bytes], out: list[Command]) -> None:
        """Blocks that are not known, and may still be told by the disk: they do not come back."""
        if keys and self.recoverer is not None and space.on_disk and not self.state.disk.recovered:
            self.recoverer.cleared(space, set(keys))
            out += tombstones(space.number, b"".join(keys))

    def _end_pins(self, space: Namespace, cut: tuple[bytes, int] | None, out: list[Command]) -> None:
        """`cut`: (key, its block) of the first block that goes; None: all go."""
        if space.prefix_pins and self.pinning is not None:
            self.pinning.cleared(space, cut, out)

    def _remove(self, node: Node, out: list[Command]) -> tuple[int, int]:
        space = node.space
        assert space is not None
        if node.state == DETACHED:
            return 0, 0  # it left with its parent a moment ago
        self.state.publish_subtree(node)
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


def _contradiction(event: ClearRequested) -> str:
    if event.namespace is None and event.keys is not None:
        return "keys need a namespace"
    if event.keys is None and (event.gently or event.own_tail):
        return "only a prefix can be evicted gently, or as far as it is nobody else's: name its keys"
    return ""


def _own_tail(path: Path) -> Node | None:
    """The top of what only this path goes through, None where others go through all of it."""
    if not path.nodes or path.nodes[-1].end != path.blocks or path.nodes[-1].children:
        return None
    node = path.nodes[-1]
    while (above := node.parent) is not None and above.parent is not None and len(above.children or {}) == 1:
        node = above
    return node


def _in_use(node: Node, first: int) -> str:
    """What holds a block from `first` on of a subtree; empty if nothing does."""
    for below in subtree(node):
        if below.owner is not None:
            return "some of it is being stored; try again when it is committed"
        if below.pinned_depth() > max(first, below.start):
            return "some of it is leased or being written to disk; try again, or see `prefixcache describe`"
    return ""
