"""Reserve: slots for what is missing and being written by nobody else.

Rules: never waits. Room is made synchronously, so what can be granted is granted now, the rest gets its reason. The
prefix the new blocks hang from is pinned before anything is evicted. New blocks are in the tree (FILLING) from the
grant on; that is what keeps two reservations off one key and a parent in place while its children are written.
Must not know: what is filled when (filling does).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.commands import Command, Grant, Reserved, SetGenerations
from prefixcache.core.events import ReserveRequested
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, Slots
from prefixcache.core.namespaces import Namespace
from prefixcache.core.patching import Plan, plan_patches
from prefixcache.core.policy.base import UNKNOWN_BIRTH, Birth
from prefixcache.core.radix import (
    FILLING,
    NOT_QUEUED,
    ROW_BYTES,
    ROW_DTYPE,
    VISIBLE,
    WAITING,
    Node,
    Path,
    Pin,
    hot_from,
)
from prefixcache.core.reasons import Kind, Refusal, Skip
from prefixcache.core.removal import Remover
from prefixcache.core.reservations import Reservation
from prefixcache.core.room import RoomMaker
from prefixcache.core.sharing import Sharing
from prefixcache.core.state import Session, State
from prefixcache.core.table import HIGH


class Granting:
    """Handler of ReserveRequested for chained keys (foreign ones: foreign.py)."""

    def __init__(self, state: State, remover: Remover, room: RoomMaker) -> None:
        self.state = state
        self.remover = remover
        self.room = room
        self.sharing = Sharing(state)

    def reserve(self, event: ReserveRequested, now: float, out: list[Command]) -> None:
        admitted = self.admit(event, out)
        if admitted is None:
            return
        session, space = admitted
        key_blocks = len(event.keys) // KEY_BYTES
        if self.state.draining:
            plan = Plan()
            plan.skip(Skip.DRAINING, key_blocks - event.from_block)
            self.nothing(event, plan, now, out)
            return
        path = space.tree.walk(event.keys, FILLING)
        visible = space.visible_blocks(path.nodes, path.blocks)
        hold = self._use_prefix(space, path, visible, event.priority)
        plan = self._plan(event, space, path, visible)
        grants, patches, fresh = self._allocate(space, plan, out)
        if patches + fresh == 0:
            self.remover.unpin_all(hold)
            self.nothing(event, plan, now, out)
            return
        blocks = np.concatenate(
            (plan.patch_blocks[:patches], np.arange(plan.fresh_from, plan.fresh_from + fresh, dtype=np.uint32))
        )
        reservation = self.begin(event, session, space, (blocks, grants, plan.skipped, patches), now)
        if space.on_disk:  # what left memory may have split the path's last node behind the pin
            path = space.tree.walk(event.keys, FILLING)
        if fresh:
            node = self._graft(reservation, path, event.keys, fresh)
            space.table.set_priority(node.row_array(), event.priority)
            reservation.birth = plan.birth
        if patches:
            for pin in hold:
                pin.holder = reservation.pins
            reservation.pins += hold
            reservation.patch_rows = plan.patch_rows[:patches]
            for part in set(reservation.slots) & set(space.patching):
                chosen = plan.patch_rows[:patches][reservation.slots[part][:patches] != NO_SLOT]
                space.patching[part].update(chosen.tolist())
        else:
            self.remover.unpin_all(hold)
        self.announce(reservation, out)

    def admit(self, event: ReserveRequested, out: list[Command]) -> tuple[Session, Namespace] | None:
        """Checks everything that can be wrong with a Reserve; answers retries."""
        state = self.state
        if not state.good_id(event.reservation, out):
            return None
        session = state.live_session(event.session, out, event.reservation)
        space = state.known_namespace(event.namespace, out, event.reservation) if session is not None else None
        if session is None or space is None or self.sharing.known(event, session, space, out):
            return None
        if not state.good_keys(event.keys, event.from_block, out, event.reservation):
            return None
        if event.part_mask & space.all_mask == 0:
            text = "part_mask names no part of this namespace"
            state.refuse(out, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID, text, event.reservation)
        elif event.shared and space.foreign is not None:
            text = "opaque keys are stored by one session"
            state.refuse(out, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID, text, event.reservation)
        elif self.sharing.has_room(session, event, out):
            return session, space
        return None

    def nothing(self, event: ReserveRequested, plan: Plan, now: float, out: list[Command]) -> None:
        """Answers that no block was granted; there is no reservation then."""
        self.state.stats.blocks_skipped.update(plan.skipped)
        reply = Reserved(event.reservation, np.empty(0, np.uint32), (), 0, dict(plan.skipped), now)
        if event.shared:
            self.state.remember_end(b"", event.reservation, reply)
        out.append(reply)

    def begin(
        self,
        event: ReserveRequested,
        session: Session,
        space: Namespace,
        granted: tuple[NDArray[np.uint32], dict[int, Slots], Counter[Skip], int],
        now: float,
    ) -> Reservation:
        """Makes the reservation. granted: block numbers, slots by part, skipped blocks, how many are patches."""
        state = self.state
        blocks, slots, skipped, patches = granted
        state.stats.blocks_skipped.update(skipped)
        grants = tuple(Grant(part, state.host_pool, each) for part, each in slots.items())
        expires_at = now + state.clipped_ttl(event.ttl_s)
        generation = state.next_generation()
        order = None
        if patches and (np.diff(blocks.astype(np.int64)) < 0).any():  # it is told in the order of the keys
            order = np.argsort(blocks)
            blocks, grants = blocks[order], tuple(Grant(each.part, each.pool, each.slots[order]) for each in grants)
        reply = Reserved(event.reservation, blocks, grants, generation, dict(skipped), expires_at)
        reservation = Reservation(space, event.session, reply, patches, order)
        reservation.shared = event if event.shared else None
        state.reservations[event.reservation] = reservation
        session.reservations[event.reservation] = reservation
        state.recent_ends.pop(event.session + event.reservation, None)
        state.deadlines.add(reservation)
        state.disk.granted_bytes += sum(len(each) * space.strides[part] for part, each in slots.items())
        return reservation

    def announce(self, reservation: Reservation, out: list[Command]) -> None:
        """The generations go into the control page before the grant leaves."""
        slots = reservation.held_slots()
        out.append(SetGenerations(self.state.host_pool, slots, reservation.generation))
        out.append(reservation.reply)

    def _use_prefix(self, space: Namespace, path: Path, visible: int, priority: int) -> list[Pin]:
        """Pins and touches the visible part of the path, which gets the priority if that is higher than its own."""
        hold: list[Pin] = []
        if not visible:
            return hold
        nodes = [node for node in path.nodes if node.start < visible]
        seen = Path(nodes, visible)
        rows = np.frombuffer(seen.packed_rows(), ROW_DTYPE)
        space.table.touched[rows] = self.state.tick
        last = nodes[-1]
        hot = hot_from(last)
        if space.table.raise_priority(rows, priority) and hot.rank != NOT_QUEUED:
            space.policy.retick_leaf(hot, space.tail_tick(hot))
        elif not hot.held and hot.end <= visible:
            space.policy.touch_leaf(hot, self.state.tick)
        self.remover.pin(last, visible, hold)
        return hold

    def _plan(self, event: ReserveRequested, space: Namespace, path: Path, visible: int) -> Plan:
        plan = Plan(event.priority)
        key_blocks = len(event.keys) // KEY_BYTES
        mask = event.part_mask & space.all_mask
        if visible > event.from_block:
            plan_patches(event, space, path, visible, plan)
        plan.skip(Skip.BEING_WRITTEN, path.blocks - max(visible, event.from_block))
        plan.fresh_from = max(path.blocks, event.from_block)
        missing = key_blocks - plan.fresh_from
        if missing <= 0:
            return plan
        if path.blocks < event.from_block and space.has_full:
            plan.skip(Skip.PARENT_MISSING, missing)
        elif mask & space.full_mask != space.full_mask:
            plan.skip(Skip.PARTS_MISSING, missing)
        elif not space.has_full and self._too_many_links(space, key_blocks - path.blocks):
            plan.skip(Skip.QUOTA, missing)
        else:
            plan.fresh_want = missing
            if space.policy.remembers:
                plan.fresh_keys = event.keys[plan.fresh_from * KEY_BYTES :]
                plan.birth = _birth(path, event.keys)
            plan.fresh_parts = [part for part in range(len(space.strides)) if mask >> part & 1]
        return plan

    def _too_many_links(self, space: Namespace, more: int) -> bool:
        """Rows that need no slot have a bound; those with a record on disk have the disk's."""
        most = self.state.limits.max_bare_blocks
        used = space.table.used + more
        return used > most and (not space.on_disk or used - space.table.recorded_count > most)

    def _allocate(self, space: Namespace, plan: Plan, out: list[Command]) -> tuple[dict[int, Slots], int, int]:
        """Slots for patches and fresh blocks: (slots by part over both, patches granted, fresh blocks granted)."""
        patch_slots = self._allocate_patches(space, plan, out)
        patches = len(next(iter(patch_slots.values()))) if patch_slots else 0
        plan.skip(Skip.POOL_FULL, len(plan.patch_blocks) - patches)
        fresh_slots: dict[int, Slots] = {}
        if plan.fresh_want:
            fresh_slots = self._allocate_fresh(space, plan, out)
        fresh = len(next(iter(fresh_slots.values()))) if fresh_slots else 0
        plan.skip(Skip.POOL_FULL, plan.fresh_want - fresh - plan.skipped[Skip.NOT_WORTH_IT])
        slots = {}
        for part in sorted({*patch_slots, *(fresh_slots if fresh else ())}):
            head = patch_slots.get(part, np.full(patches, NO_SLOT, np.uint32))
            tail = fresh_slots.get(part, np.full(fresh, NO_SLOT, np.uint32)) if fresh else head[:0]
            slots[part] = np.concatenate((head, tail))
        return slots, patches, fresh

    def _allocate_fresh(self, space: Namespace, plan: Plan, out: list[Command]) -> dict[int, Slots]:
        """Slots for what the pool can hold of the fresh blocks, and what the policy finds worth it."""
        policy = space.policy
        if not policy.remembers:
            return self.room.allocate(space, plan.fresh_parts, plan.fresh_want, out)
        bids = policy.expected(space, plan.fresh_keys, plan.birth)
        if plan.priority == HIGH:
            bids = None  # at any price
        slots = self.room.allocate(space, plan.fresh_parts, plan.fresh_want, out, bids)
        refused = plan.fresh_keys[len(next(iter(slots.values()))) * KEY_BYTES :]
        if bids is not None:
            plan.skip(Skip.NOT_WORTH_IT, bids.given_up)
        if refused:
            policy.refused(space, refused, plan.birth)
        return slots

    def _allocate_patches(self, space: Namespace, plan: Plan, out: list[Command]) -> dict[int, Slots]:
        """Slots by part for as many of the leading patches as have all they want."""
        alike: dict[bytes, list[int]] = {}
        for part, wanted in plan.patch_parts.items():
            alike.setdefault(wanted.tobytes(), []).append(part)
        got: dict[int, Slots] = {}
        most = len(plan.patch_blocks)
        for parts in alike.values():
            places = np.flatnonzero(plan.patch_parts[parts[0]])
            got.update(self.room.allocate(space, parts, len(places), out))
            if len(got[parts[0]]) < len(places):
                most = min(most, int(places[len(got[parts[0]])]))
        slots: dict[int, Slots] = {}
        for part, granted in got.items():
            places = np.flatnonzero(plan.patch_parts[part][:most])
            self.remover.release_slots(granted[len(places) :])
            if len(places):
                slots[part] = np.full(most, NO_SLOT, np.uint32)
                slots[part][places] = granted[: len(places)]
        return slots

    def _graft(self, reservation: Reservation, path: Path, keys: bytes, fresh: int) -> Node:
        """Puts the granted blocks (and bare links up to them) into the tree."""
        space = reservation.space
        first = len(reservation.blocks) - fresh
        start = int(reservation.blocks[first])
        if path.blocks < start:
            path = self._graft_bare(space, path, keys, start)
        edge = keys[start * KEY_BYTES : (start + fresh) * KEY_BYTES]
        node = self._graft_node(space, path, edge)
        node.state = FILLING
        node.owner = reservation
        reservation.nodes[node] = first
        return node

    def _graft_bare(self, space: Namespace, path: Path, keys: bytes, end: int) -> Path:
        node = self._graft_node(space, path, keys[path.blocks * KEY_BYTES : end * KEY_BYTES])
        parent = node.parent
        assert parent is not None
        node.state = VISIBLE if parent.state == VISIBLE else WAITING
        if node.state == VISIBLE:
            self.state.appear(node)
        space.table.touched[node.row_array()] = self.state.tick
        if space.policy.remembers:
            space.policy.stored(space, node, UNKNOWN_BIRTH)
        return Path([*path.nodes, node], end)

    def _graft_node(self, space: Namespace, path: Path, edge: bytes) -> Node:
        rows = space.table.allocate(len(edge) // KEY_BYTES)
        node = space.tree.graft(path, edge, rows.astype(ROW_DTYPE).tobytes())
        parent = node.parent
        if parent is not None:
            space.policy.remove_leaf(hot_from(parent))
        return node


def _birth(path: Path, keys: bytes) -> Birth:
    """How the blocks of `keys` behind `path` came."""
    hit_row = int.from_bytes(path.packed_rows()[-ROW_BYTES:], "little") if path.blocks > 1 else -1
    return Birth(len(keys) // KEY_BYTES - path.blocks, hit_row, keys[-KEY_BYTES:])
