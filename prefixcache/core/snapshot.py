"""Warm restart: everything committed as plain data, and back again.

Rules: only visible blocks whose every part has a digest come back, and none is served before it is verified. A
snapshot that does not fit this pool, or makes no sense, leaves nothing behind. Slots keep their places, so the bytes
need not move; their generation is new.
Must not know: files, msgpack.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prefixcache.core.commands import Change, Command, SetGenerations, SnapshotLoaded, SnapshotTaken
from prefixcache.core.events import SnapshotRestored
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, GroupKind, NamespaceKind, Slots
from prefixcache.core.namespaces import Namespace
from prefixcache.core.policy.base import UNKNOWN_BIRTH
from prefixcache.core.radix import ROW_DTYPE, VISIBLE, Node, Path, subtree
from prefixcache.core.reasons import Kind, Refusal
from prefixcache.core.removal import Remover
from prefixcache.core.sessions import FINGERPRINT_BYTES, Sessions
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec, SpecError
from prefixcache.core.state import State
from prefixcache.core.table import DIGEST_BYTES, DIGEST_KNOWN, PartColumn

VERSION = 1


class SnapshotError(ValueError):
    """A snapshot that cannot be this pool's."""


class Snapshots:
    """Handlers of SnapshotRequested and SnapshotRestored."""

    def __init__(self, state: State, sessions: Sessions, remover: Remover) -> None:
        self.state = state
        self.sessions = sessions
        self.remover = remover

    def take(self, out: list[Command]) -> None:
        state = self.state
        if state.reservations:
            text = f"{len(state.reservations)} reservations are not ended; drain first"
            state.refuse(out, Kind.FAILED_PRECONDITION, Refusal.SNAPSHOT_NOT_CLEAN, text)
            return
        spaces = [_dump_space(space) for space in state.namespaces.values()]
        pool = {"size_bytes": state.host.spec.size_bytes, "slab_bytes": state.host.spec.slab_bytes}
        snapshot = {"version": VERSION, "generation": state.generation, "tick": state.tick, "pool": pool}
        out.append(SnapshotTaken({**snapshot, "namespaces": spaces}))

    def restore(self, event: SnapshotRestored, out: list[Command]) -> None:
        state = self.state
        if state.namespaces or state.sessions:
            text = "a snapshot can only be restored before anything else"
            state.refuse(out, Kind.FAILED_PRECONDITION, Refusal.SNAPSHOT_NOT_CLEAN, text)
            return
        try:
            blocks, orders = self._load(event.snapshot)
        except (SnapshotError, SpecError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            state.forget_all()
            text = f"the snapshot does not fit: {type(error).__name__}: {error}"
            state.refuse(out, Kind.DATA_LOSS, Refusal.SNAPSHOT_INVALID, text)
            return
        out.extend(orders)
        out.append(SnapshotLoaded(len(state.namespaces), blocks))

    def _load(self, snapshot: dict[str, Any]) -> tuple[int, list[Command]]:
        state = self.state
        spec = state.host.spec
        pool = snapshot["pool"]
        if snapshot["version"] != VERSION or pool != {"size_bytes": spec.size_bytes, "slab_bytes": spec.slab_bytes}:
            raise SnapshotError("another version, or a pool of another shape")
        state.generation = max(state.generation, int(snapshot["generation"]))
        state.tick = max(state.tick, int(snapshot["tick"]))
        generation = state.next_generation()
        blocks = 0
        orders: list[Command] = []
        for each in snapshot["namespaces"]:
            space = self._load_space(each)
            blocks += self._load_nodes(space, each["nodes"], generation, orders)
            leaves = [node for node in subtree(space.tree.root) if space.is_leaf(node)]
            for leaf in sorted(leaves, key=space.tail_tick):
                self.remover.offer_leaf(leaf)
        return blocks, orders

    def _load_space(self, each: dict[str, Any]) -> Namespace:
        groups = tuple(GroupSpec(GroupKind(kind), int(window)) for kind, window in each["groups"])
        parts = tuple(PartSpec(int(group), int(heads), int(size)) for group, heads, size in each["parts"])
        spec = NamespaceSpec(int(each["block_tokens"]), groups, parts, NamespaceKind(each["kind"]))
        spec.validate()
        fingerprint = each["fingerprint"]
        if len(fingerprint) != FINGERPRINT_BYTES or each["number"] in self.state.namespaces:
            raise SnapshotError("a namespace without a name of its own")
        if fingerprint in self.state.by_fingerprint:
            raise SnapshotError("one fingerprint twice")
        return self.sessions.add_namespace(int(each["number"]), bytes(fingerprint), spec)

    def _load_nodes(self, space: Namespace, nodes: list[Any], generation: int, orders: list[Command]) -> int:
        made: list[Node | None] = []
        blocks = 0
        for above, edge, touched, parts in nodes:
            parent = space.tree.root if above < 0 else made[above]
            cut = parent is None or (above >= 0 and parent.count * KEY_BYTES != len(nodes[above][1]))
            count = 0 if cut else _usable(space, edge, touched, parts)
            if not count or parent is None:
                made.append(None)  # what hangs from a block that did not come back does not come back either
                continue
            node = self._load_node(space, parent, edge[: count * KEY_BYTES])
            made.append(node)
            blocks += count
            rows = node.row_array()
            space.table.touched[rows] = np.minimum(np.frombuffer(touched, "<u8")[:count], self.state.tick)
            for part, (slots, digests, known) in enumerate(parts):
                self._load_part(space, part, (node, slots, digests, known), generation, orders)
            if space.policy.remembers:
                space.policy.stored(space, node, UNKNOWN_BIRTH)
            self.state.publish_blocks(Change.STORED, node)
        return blocks

    def _load_node(self, space: Namespace, parent: Node, edge: bytes) -> Node:
        first = edge[:KEY_BYTES]
        if first in (parent.children or {}):
            raise SnapshotError("one key twice under one parent")
        rows = space.table.allocate(len(edge) // KEY_BYTES).astype(ROW_DTYPE).tobytes()
        if space.foreign is not None:
            if len(edge) != KEY_BYTES or first in space.foreign.by_key:
                raise SnapshotError("one foreign key twice")
            return space.foreign.add(None if parent is space.tree.root else parent, bytes(edge), rows)
        path = Path([] if parent is space.tree.root else [parent], parent.end)
        return space.tree.graft(path, bytes(edge), rows)

    def _load_part(
        self, space: Namespace, part: int, loaded: tuple[Node, bytes, bytes, bytes], generation: int,
        orders: list[Command],
    ) -> None:  # fmt: skip
        node, packed_slots, packed_digests, packed_known = loaded
        rows = node.row_array()
        slots: Slots = np.frombuffer(packed_slots, "<u4")[: len(rows)].astype(np.uint32)
        known = np.frombuffer(packed_known, np.uint8)[: len(rows)] != 0
        here = known & (slots != NO_SLOT)
        rows, slots = rows[here], slots[here]
        if not len(rows):
            return
        if not self.state.host.occupy(space.strides[part], slots):
            raise SnapshotError("two blocks in one slot, or a slot outside the pool")
        space.table.place(part, rows, slots, generation)
        digests = np.frombuffer(packed_digests, np.uint8).reshape(-1, DIGEST_BYTES)[: len(here)][here]
        column = space.table.parts[part]
        column.digests[rows] = digests
        column.flags[rows] = DIGEST_KNOWN
        space.table.mark_unverified(part, rows)
        orders.append(SetGenerations(self.state.host_pool, slots, generation))


def _dump_space(space: Namespace) -> dict[str, Any]:
    spec = space.spec
    index: dict[Node, int] = {space.tree.root: -1}
    nodes: list[Any] = []
    for node in subtree(space.tree.root):
        if node.parent is None or node.state != VISIBLE:
            continue
        index[node] = len(nodes)
        rows = node.row_array()
        parts = [_dump_part(column, node) for column in space.table.parts]
        touched = space.table.touched[rows].astype("<u8").tobytes()
        nodes.append([index[node.parent], node.edge, touched, parts])
    return {
        "number": space.number,
        "fingerprint": space.fingerprint,
        "block_tokens": spec.block_tokens,
        "kind": spec.kind.value,
        "groups": [[group.kind.value, group.window_tokens] for group in spec.groups],
        "parts": [[part.group, part.kv_heads, part.size_bytes] for part in spec.parts],
        "nodes": nodes,
    }


def _dump_part(column: PartColumn, node: Node) -> list[bytes]:
    """[slots u32, digests 16 bytes each, whether the digest is known u8] of a node's blocks."""
    rows = node.row_array()
    known = (column.flags[rows] & DIGEST_KNOWN).astype(np.uint8)
    return [column.slots[rows].astype("<u4").tobytes(), column.digests[rows].tobytes(), known.tobytes()]


def _usable(space: Namespace, edge: bytes, touched: bytes, parts: list[Any]) -> int:
    """How many leading blocks of a dumped node have every full part with its digest."""
    count, odd = divmod(len(edge), KEY_BYTES)
    if odd or not count or len(touched) != 8 * count or len(parts) != len(space.strides):
        raise SnapshotError("a node whose columns differ in length")
    good = np.ones(count, np.bool_)
    for part, (slots, digests, known) in enumerate(parts):
        if len(slots) != 4 * count or len(digests) != DIGEST_BYTES * count or len(known) != count:
            raise SnapshotError("a part whose columns differ in length")
        if space.full_mask >> part & 1:
            good &= (np.frombuffer(slots, "<u4") != NO_SLOT) & (np.frombuffer(known, np.uint8) != 0)
    return count if good.all() else int(np.argmin(good))
