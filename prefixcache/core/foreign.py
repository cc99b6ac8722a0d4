"""Reserve in a foreign namespace: opaque keys, parents given one by one or not at all.

Rules: a key without a parent stands alone; a key whose parent is not here is not stored, as nobody could use it. Keys
are in the index, and what is there already is pinned, before room is made, so that no eviction takes them away. What is
on disk only is taken again, as for chained keys (patching). Must not know: what makes a key.
"""

from __future__ import annotations

import numpy as np

from prefixcache.core.commands import Command
from prefixcache.core.events import ReserveRequested
from prefixcache.core.granting import Granting
from prefixcache.core.ids import KEY_BYTES, Slots
from prefixcache.core.namespaces import ForeignIndex, Namespace
from prefixcache.core.patching import Plan, filled_by_others
from prefixcache.core.radix import FILLING, NOT_QUEUED, ROW_DTYPE, VISIBLE, Node, Pin, hot_from
from prefixcache.core.reasons import Kind, Refusal, Skip
from prefixcache.core.removal import Remover
from prefixcache.core.room import RoomMaker
from prefixcache.core.state import Session, State

_NO_PARENT = bytes(KEY_BYTES)


class _Picked:
    """What may be granted of the keys: blocks on disk only (`again`, pinned), and new ones; with their places. whole:
    all parts will be written, else nothing is granted."""

    __slots__ = ("again", "fresh", "others", "pins", "whole")

    def __init__(self, others: set[int], *, whole: bool) -> None:
        self.whole = whole
        self.again: list[tuple[int, Node]] = []
        self.pins: list[Pin] = []
        self.fresh: list[tuple[int, Node]] = []
        self.others = others  # rows that somebody else fills

    @property
    def blocks(self) -> int:
        return len(self.again) + len(self.fresh)


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
        picked = self._pick(event, space, space.foreign, plan)
        slots = self._allocate(space, picked, plan, out)
        if not picked.blocks:
            self.granting.nothing(event, plan, now, out)
            return
        self._begin(event, (session, space), (picked, slots, plan), now, out)

    def _begin(
        self,
        event: ReserveRequested,
        owner: tuple[Session, Namespace],
        granted: tuple[_Picked, dict[int, Slots], Plan],
        now: float,
        out: list[Command],
    ) -> None:
        picked, slots, plan = granted
        space = owner[1]
        patches = len(picked.again)
        blocks = np.array([place for place, _ in (*picked.again, *picked.fresh)], np.uint32)
        reservation = self.granting.begin(event, *owner, (blocks, slots, plan.skipped, patches), now)
        for index, (_, node) in enumerate(picked.fresh, patches):
            node.owner = reservation
            reservation.nodes[node] = index
        if patches:
            reservation.patch_rows = np.array([node.first_row for _, node in picked.again], np.uint32)
            reservation.pins = picked.pins
            for busy in space.patching.values():
                busy.update(reservation.patch_rows.tolist())
        self.granting.announce(reservation, out)

    def _pick(self, event: ReserveRequested, space: Namespace, index: ForeignIndex, plan: Plan) -> _Picked:
        whole = event.part_mask & space.all_mask == space.all_mask
        picked = _Picked(filled_by_others(space, 0) if space.cold_blocks else set(), whole=whole)
        for place in range(event.from_block, len(event.keys) // KEY_BYTES):
            at = place * KEY_BYTES
            key = event.keys[at : at + KEY_BYTES]
            known = index.by_key.get(key)
            if known is not None:
                self._pick_again(event, space, (place, known), picked, plan)
                continue
            if not picked.whole:
                plan.skip(Skip.PARTS_MISSING, 1)
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
                space.policy.remove_leaf(hot_from(parent))
            picked.fresh.append((place, node))
        return picked

    def _pick_again(
        self, event: ReserveRequested, space: Namespace, known: tuple[int, Node], picked: _Picked, plan: Plan
    ) -> None:
        """A key that is there: granted again if it is on disk only and nobody else brings it."""
        node = known[1]
        if node.state != VISIBLE:
            plan.skip(Skip.BEING_WRITTEN, 1)
            return
        if space.table.raise_priority(node.row_array(), event.priority) and node.rank != NOT_QUEUED:
            space.policy.retick_leaf(node, space.tail_tick(node))
        if not node.cold:
            plan.skip(Skip.ALREADY_STORED, 1)
        elif not picked.whole:
            plan.skip(Skip.PARTS_MISSING, 1)
        elif node.first_row in picked.others:
            plan.skip(Skip.BEING_WRITTEN, 1)
        else:
            picked.others.add(node.first_row)  # the same key may be asked for twice
            picked.again.append(known)
            self.granting.remover.pin(node, node.end, picked.pins)

    def _allocate(self, space: Namespace, picked: _Picked, plan: Plan, out: list[Command]) -> dict[int, Slots]:
        """Slots for as many blocks as possible, first for those that are there already; the others leave again, last
        first (children before parents)."""
        if not picked.blocks:
            return {}
        slots = self.room.allocate(space, list(range(len(space.strides))), picked.blocks, out)
        granted = len(slots[0])
        plan.skip(Skip.POOL_FULL, picked.blocks - granted)
        remover: Remover = self.granting.remover
        while picked.blocks > granted:
            if picked.fresh:
                remover.drop_unfinished(picked.fresh.pop()[1])
            else:
                picked.again.pop()
                remover.unpin_all([picked.pins.pop()])
        return slots
