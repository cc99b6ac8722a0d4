"""Reserve in a foreign namespace: opaque keys, parents given one by one or not at all.

Rules: a key without a parent stands alone; a key whose parent is not here is not stored, as nobody could use it. Keys
are in the index before room is made, so that no eviction takes a parent from under them.
Must not know: what makes a key.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from prefixcache.core.commands import Command
from prefixcache.core.events import ReserveRequested
from prefixcache.core.granting import Granting
from prefixcache.core.ids import KEY_BYTES, Slots
from prefixcache.core.namespaces import ForeignIndex, Namespace
from prefixcache.core.patching import Plan
from prefixcache.core.radix import FILLING, NOT_QUEUED, ROW_DTYPE, VISIBLE, Node
from prefixcache.core.reasons import Kind, Refusal, Skip
from prefixcache.core.room import RoomMaker
from prefixcache.core.state import Session, State

_NO_PARENT = bytes(KEY_BYTES)


class ForeignGranting:
    """Handler of ReserveRequested for foreign namespaces."""

    def __init__(self, state: State, granting: Granting, room: RoomMaker) -> None:
        self.state = state
        self.granting = granting
        self.room = room

    def reserve(self, event: ReserveRequested, now: float, out: list[Command]) -> None:
        admitted = self.granting.admit(event, out)
        if admitted is None:
            return
        session, space = admitted
        assert space.foreign is not None
        if event.parents is not None and len(event.parents) != len(event.keys):
            text = "parents must hold one key per key"
            self.state.refuse(out, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID, text, event.reservation)
            return
        plan = Plan()
        if self.state.draining:
            plan.skip(Skip.DRAINING, len(event.keys) // KEY_BYTES - event.from_block)
            self.granting.nothing(event, plan, now, out)
            return
        if event.part_mask & space.all_mask != space.all_mask:
            plan.skip(Skip.PARTS_MISSING, len(event.keys) // KEY_BYTES - event.from_block)
            self.granting.nothing(event, plan, now, out)
            return
        nodes, places = self._insert(event, space, space.foreign, plan)
        slots = self._allocate(space, nodes, places, plan, out)
        if not nodes:
            self.granting.nothing(event, plan, now, out)
            return
        self._begin(event, (session, space), (nodes, places, slots, plan.skipped), now, out)

    def _begin(
        self,
        event: ReserveRequested,
        owner: tuple[Session, Namespace],
        granted: tuple[list[Node], list[int], dict[int, Slots], Counter[Skip]],
        now: float,
        out: list[Command],
    ) -> None:
        nodes, places, slots, skipped = granted
        blocks = np.array(places, np.uint32)
        reservation = self.granting.begin(event, *owner, (blocks, slots, skipped, 0), now)
        for index, node in enumerate(nodes):
            node.owner = reservation
            reservation.nodes[node] = index
        self.granting.announce(reservation, out)

    def _insert(
        self, event: ReserveRequested, space: Namespace, index: ForeignIndex, plan: Plan
    ) -> tuple[list[Node], list[int]]:
        nodes: list[Node] = []
        places: list[int] = []
        for place in range(event.from_block, len(event.keys) // KEY_BYTES):
            at = place * KEY_BYTES
            key = event.keys[at : at + KEY_BYTES]
            known = index.by_key.get(key)
            if known is not None:
                plan.skip(Skip.ALREADY_STORED if known.state == VISIBLE else Skip.BEING_WRITTEN, 1)
                if known.state == VISIBLE and space.table.raise_priority(known.row_array(), event.priority):
                    self._reorder(space, known)
                continue
            above = event.parents[at : at + KEY_BYTES] if event.parents is not None else _NO_PARENT
            parent = index.by_key.get(above)
            if parent is None and above != _NO_PARENT:
                plan.skip(Skip.PARENT_MISSING, 1)
                continue
            rows = space.table.allocate(1)
            space.table.set_priority(rows, event.priority)
            node = index.add(parent, key, rows.astype(ROW_DTYPE).tobytes())
            node.state = FILLING
            if parent is not None:
                space.policy.remove_leaf(parent)
            nodes.append(node)
            places.append(place)
        return nodes, places

    def _reorder(self, space: Namespace, node: Node) -> None:
        if node.rank != NOT_QUEUED:
            space.policy.retick_leaf(node, space.tail_tick(node))

    def _allocate(
        self, space: Namespace, nodes: list[Node], places: list[int], plan: Plan, out: list[Command]
    ) -> dict[int, Slots]:
        """Slots for as many nodes as possible; the others leave again, last first (children before parents)."""
        if not nodes:
            return {}
        slots = self.room.allocate(space, list(range(len(space.strides))), len(nodes), out)
        granted = len(slots[0])
        plan.skip(Skip.POOL_FULL, len(nodes) - granted)
        while len(nodes) > granted:
            places.pop()
            self.granting.remover.drop_unfinished(nodes.pop())
        return slots
