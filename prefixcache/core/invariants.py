"""What must hold after every event (design section 6), checked from scratch against all state.

Rules: reads only; recomputes everything it can instead of trusting counters; slow on purpose, so tests and simulators
call it and production does not. A violation raises `InvariantError` that names the rule and the thing.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from prefixcache.core.ids import KEY_BYTES, NO_SLOT, SLOT_GRANULE, Tier
from prefixcache.core.leases import Lease
from prefixcache.core.namespaces import Namespace
from prefixcache.core.planner import Planner
from prefixcache.core.policy.base import EvictionPolicy
from prefixcache.core.radix import DETACHED, FILLING, NOT_QUEUED, VISIBLE, WAITING, Node, Pin, subtree
from prefixcache.core.reservations import Entry, Reservation
from prefixcache.core.slots import SlabPool
from prefixcache.core.state import State
from prefixcache.core.table import UNVERIFIED


class InvariantError(AssertionError):
    """A rule of design section 6 does not hold."""


def check(planner: Planner) -> None:
    """Raises InvariantError if any rule is broken."""
    state = planner.state
    _check_sum(state)
    _check_owners(planner)
    for pool in state.pools.values():
        _check_pool(pool)
    for space in state.namespaces.values():
        _check_tree(space)
        _check_rows(space, state)
        _check_patches(space, state)
    _check_leaves(state)
    _check_pins(state)
    _check_ends(state)
    _check_bounds(planner)


def _must(condition: object, text: str) -> None:
    if not condition:
        raise InvariantError(text)


def _check_sum(state: State) -> None:
    """Rule 6."""
    ledger = state.stats.tokens
    _must(ledger.is_closed(), f"rule 6: the sum is open: {ledger.looked_up} {ledger.hit} {ledger.miss}")
    pending = sum(lease.planned_tokens for lease in state.leases.values())
    _must(ledger.pending == pending, f"rule 6: {ledger.pending} pending, leases say {pending}")
    _must(min(ledger.miss.values(), default=0) >= 0, f"rule 6: a negative miss {ledger.miss}")
    _must(min(ledger.hit) >= 0 and len(ledger.hit) == len(Tier), f"rule 6: hits {ledger.hit}")


def _check_owners(planner: Planner) -> None:
    """Rule 2: every slot in use has exactly one owner, every owner's slot is in use, in a slab of its stride."""
    state = planner.state
    owned: list[int] = []
    strides: dict[int, int] = {}
    for space in state.namespaces.values():
        rows = np.concatenate([node.row_array() for node in _all_nodes(space)] or [np.empty(0, np.uint32)])
        for part, column in enumerate(space.table.parts):
            slots = column.slots[rows]
            _own(owned, strides, slots[slots != NO_SLOT].tolist(), space.strides[part])
    for reservation in state.reservations.values():
        for part, granted in reservation.slots.items():
            mine = granted[(reservation.status != Entry.SETTLED) & (granted != NO_SLOT)]
            _own(owned, strides, mine.tolist(), reservation.space.strides[part])
    owned += planner.mover.held_slots().tolist()
    twice = [slot for slot, times in Counter(owned).items() if times > 1]
    _must(not twice, f"rule 2: slots with two owners: {twice[:8]}")
    live = {int(slot) for slab in state.host.slabs.values() for slot in state.host.live_slots(slab)}
    _must(live == set(owned), f"rule 2: leaked {sorted(live - set(owned))[:8]}, lost {sorted(set(owned) - live)[:8]}")
    for slot, stride in strides.items():
        slab = state.host.slabs[slot // state.host.slab_granules]
        _must(slab.stride * SLOT_GRANULE == stride, f"rule 2: slot {slot} lies in a slab of another class")


def _own(owned: list[int], strides: dict[int, int], slots: list[int], stride: int) -> None:
    owned += slots
    for slot in slots:
        strides[slot] = stride


def _check_pool(pool: SlabPool) -> None:
    """The allocator's counters against its slabs."""
    used = 0
    free: Counter[int] = Counter()
    for number, slab in pool.slabs.items():
        _must(slab.number == number and slab.first == number * pool.slab_granules, f"slab {number} is misplaced")
        _must(slab.free_count == int(slab.free.sum()), f"slab {number} miscounts its free slots")
        _must(slab.free_count < slab.count, f"slab {number} is empty and still in a class")
        _must(number not in pool.unused_numbers(), f"slab {number} is used and unused")
        used += (slab.count - slab.free_count) * slab.stride * SLOT_GRANULE
        if not slab.closed:
            free[slab.stride * SLOT_GRANULE] += slab.free_count
    _must(used == pool.used_bytes, f"pool says {pool.used_bytes} used, slabs say {used}")
    _must(used <= pool.ready_bytes <= pool.spec.size_bytes, "more used than ready")
    for stride, count in free.items():
        fresh = sum(pool.slab_capacity(number, stride) for number in pool.unused_numbers())
        _must(pool.free_slots(stride) == count + fresh, f"class {stride} miscounts its free slots")


def _all_nodes(space: Namespace) -> list[Node]:
    """Every node with blocks, in the tree and in limbo."""
    roots = [space.tree.root, *space.limbo]
    return [node for root in roots for node in subtree(root) if node.parent is not None]


def _check_tree(space: Namespace) -> None:
    """Rules 4 and 5: shape, states, "present implies parents present"."""
    for node in subtree(space.tree.root):
        if node.parent is not None:
            _check_node(space, node, node.parent)
        for first, child in (node.children or {}).items():
            _must(child.parent is node, "a child does not know its parent")
            _must(child.edge[:KEY_BYTES] == first, "a child hangs under a wrong key")
            _must(space.foreign is not None or child.start == node.end, "a child starts where its parent does not end")
        _must(node.children is None or node.children, "an empty dict of children")
    for limbo in space.limbo:
        _must(limbo.children, "an empty limbo is kept")
        for node in subtree(limbo):
            _must(node.state == DETACHED, "something in limbo that is not detached")
            pinned = any(below.pins for below in subtree(node))
            _must(pinned, "something in limbo that no pin protects")
    if space.foreign is not None:
        indexed = set(space.foreign.by_key.values())
        attached = {node for node in _all_nodes(space) if node.state != DETACHED}
        _must(indexed == attached, "foreign index and tree differ")


def _check_node(space: Namespace, node: Node, parent: Node) -> None:
    count, odd = divmod(len(node.edge), KEY_BYTES)
    _must(not odd and count == node.count > 0, "edge and rows differ in length")
    _must(node.space is space, "a node in a foreign tree")
    above = parent.state if parent.parent is not None else VISIBLE
    if node.state == VISIBLE:
        _must(above == VISIBLE, "rule 5: visible below something that is not")
        _must(node.owner is None, "a visible node is being filled")
    elif node.state == WAITING:
        _must(above != VISIBLE, "a settled node is not visible although its parent is")
        _must(node.owner is None, "a waiting node is being filled")
    else:
        _must(node.state == FILLING, f"state {node.state} in the tree")
        owner = node.owner
        _must(owner is not None and node in owner.nodes and not owner.expired, "a filling node without a reservation")
        _must(not node.pins, "a pin on what nobody can see")


def _check_rows(space: Namespace, state: State) -> None:
    """Rows have one node each; what the table says of them fits their state."""
    nodes = _all_nodes(space)
    rows = np.concatenate([node.row_array() for node in nodes] or [np.empty(0, np.uint32)])
    table = space.table
    _must(len(np.unique(rows)) == len(rows), "a row in two nodes")
    _must(len(rows) == table.used, f"{table.used} rows in use, {len(rows)} in the tree")
    _must(not np.isin(rows, table.free_rows()).any(), "a free row in the tree")
    unverified = 0
    for part, column in enumerate(table.parts):
        for node in nodes:
            stored = column.slots[node.row_array()] != NO_SLOT
            if node.state == FILLING:
                _must(not stored.any(), "rule 1: the table knows a slot that is being filled")
            elif space.full_mask >> part & 1:
                _must(stored.all(), "rule 5: a block without one of its full parts")
        here = rows[column.slots[rows] != NO_SLOT]
        generations = column.generations[here]
        _must((generations > 0).all() and (generations < state.generation).all(), "rule 1: a generation never drawn")
        unverified += int(np.count_nonzero(column.flags[rows] & UNVERIFIED))
    _must(unverified == table.unverified, "unverified parts are miscounted")


def _check_patches(space: Namespace, state: State) -> None:
    """What is marked as being patched is exactly what open reservations patch."""
    expected: dict[int, list[int]] = {part: [] for part in space.optional_parts}
    for reservation in state.reservations.values():
        if reservation.space is not space or reservation.expired:
            continue
        still_open = reservation.status[: reservation.fresh] == Entry.OPEN
        for part, slots in reservation.slots.items():
            if part in expected:
                granted = still_open & (slots[: reservation.fresh] != NO_SLOT)
                expected[part] += reservation.patch_rows[granted].tolist()
    for part, rows in expected.items():
        _must(len(rows) == len(set(rows)), f"rule 2: part {part} of a block is being filled twice")
        _must(set(rows) == space.patching[part], f"part {part} is marked as being filled and is not, or the reverse")


def _check_leaves(state: State) -> None:
    """Every visible leaf that may go is known to its policy, nothing else is."""
    known: Counter[EvictionPolicy] = Counter()
    for space in state.namespaces.values():
        for node in _all_nodes(space):
            if not space.is_leaf(node):
                _must(node.rank == NOT_QUEUED, "rule 5: a policy holds a node that is no leaf")
                continue
            if node.rank == NOT_QUEUED:
                _must(node.pinned_depth() == node.end, "an unpinned leaf that no policy knows")
                continue
            _must(node.tick == space.tail_tick(node), "a policy does not know when a tail was used")
            known[space.policy] += 1
    for policy in state.policies.values():
        _must(policy.leaf_count() == known[policy], "a policy holds leaves that are gone")


def _check_pins(state: State) -> None:
    """Rule 2: pins are those of leases and patches, on blocks that are there."""
    held: list[Pin] = [pin for lease in state.leases.values() for pin in lease.pins]
    held += [reservation.pin for reservation in state.reservations.values() if reservation.pin is not None]
    on_nodes = [pin for space in state.namespaces.values() for node in _all_nodes(space) for pin in node.pins or ()]
    _must(len(held) == len(on_nodes) and set(held) == set(on_nodes), "pins and their holders differ")
    for pin in held:
        _must(pin.node.start < pin.depth <= pin.node.end, "rule 2: a pin beyond its node")
        _must(pin.node.state in (VISIBLE, DETACHED), "a pin on what nobody can see")
    for lease in state.leases.values():
        for run in lease.reply.runs:
            used = all(state.pools[run.pool].is_used(int(slot)) for slot in run.slots)
            _must(used, "rule 2: a leased slot is free")


def _check_ends(state: State) -> None:
    """Rule 3: what has begun and not ended is known to its session and has a deadline."""
    leases = {key for session in state.sessions.values() for key in session.leases}
    _must(leases == set(state.leases), "sessions and leases differ")
    reservations = {key for session in state.sessions.values() for key in session.reservations}
    _must(reservations == set(state.reservations), "sessions and reservations differ")
    open_things: list[Lease | Reservation] = [*state.leases.values()]
    open_things += [each for each in state.reservations.values() if not each.expired]
    for thing in open_things:
        _must(not thing.ended, "something that ended is kept")
        _must(state.deadlines.next_due <= thing.deadline, "rule 3: a deadline nobody watches")
    for session in state.sessions.values():
        _must(not session.ended or not session.leases, "an ended session with leases")
        for reservation in session.reservations.values():
            _must(not session.ended or reservation.expired, "an ended session with open reservations")
            _must(session.can_map or not reservation.expired, "quarantine for somebody who cannot map")
    quarantined = sum(len(each.held_slots()) for each in state.reservations.values() if each.expired)
    _must(quarantined == state.stats.slots_quarantined, "quarantined slots are miscounted")
    for reservation in state.reservations.values():
        _check_entries(reservation)


def _check_entries(reservation: Reservation) -> None:
    covered = np.zeros(len(reservation.blocks), np.int64)
    for node, first in reservation.nodes.items():
        _must(node.owner is reservation and node.state == FILLING, "a reservation fills a node that is not its own")
        covered[first : first + node.count] += 1
    fresh = covered[reservation.fresh :]
    is_open = reservation.status[reservation.fresh :] == Entry.OPEN
    _must(((fresh == 1) == is_open).all() and (fresh <= 1).all(), "open blocks and filling nodes differ")
    _must((reservation.status == Entry.OPEN).any() or reservation.nodes == {}, "nodes without open blocks")
    _must(not reservation.expired or not is_open.any(), "rule 2: an expired reservation keeps keys")


def _check_bounds(planner: Planner) -> None:
    """Rule 5: everything has a bound."""
    state, limits = planner.state, planner.state.limits
    _must(len(state.sessions) <= limits.max_sessions, "too many sessions")
    _must(len(state.namespaces) <= limits.max_namespaces, "too many namespaces")
    _must(len(state.expired_leases) <= limits.recent_ends, "too many remembered leases")
    _must(len(state.recent_ends) <= limits.recent_ends, "too many remembered ends")
    _must(len(planner.checks.waiting) <= limits.max_parked, "too many waiting acquires")
    live = len(state.leases) + len(state.reservations)
    _must(len(state.deadlines) <= 3 * live + 2 * 64 + 8, "deadlines pile up")
    if not state.leases:
        _must(not planner.mover.retired, "retired slots wait for no lease")
