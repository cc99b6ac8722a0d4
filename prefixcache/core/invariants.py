"""What must hold after every event (design section 6), checked from scratch against all state.

Rules: reads only; recomputes everything it can instead of trusting counters; slow on purpose, so tests and simulators
call it and production does not. A violation raises `InvariantError` that names the rule and the thing.
"""

from __future__ import annotations

from collections import Counter

from prefixcache.core import disk_invariants, gpu_invariants, pin_invariants
from prefixcache.core.disk_invariants import InvariantError as InvariantError
from prefixcache.core.disk_invariants import must as _must
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, SLOT_GRANULE, Tier
from prefixcache.core.leases import Lease
from prefixcache.core.namespaces import Namespace
from prefixcache.core.planner import Planner
from prefixcache.core.policy.base import EvictionPolicy
from prefixcache.core.radix import DETACHED, FILLING, NOT_QUEUED, VISIBLE, WAITING, Node, Pin, subtree
from prefixcache.core.reservations import Entry, Reservation
from prefixcache.core.slots import SlabPool
from prefixcache.core.state import State
from prefixcache.core.table import HIGH, NORMAL, UNVERIFIED


class _View:
    """One namespace read once: its nodes (tree and limbo) with their rows, and the table's columns as lists, because
    most of what is checked is small and a numpy call costs more than the loop."""

    def __init__(self, space: Namespace) -> None:
        self.space = space
        roots = [space.tree.root, *space.limbo]
        self.nodes = [node for root in roots for node in subtree(root) if node.parent is not None]
        self.node_rows = [memoryview(node.rows).cast("I").tolist() for node in self.nodes]
        self.rows = [row for rows in self.node_rows for row in rows]
        used = slice(0, space.table.high_water)
        self.slots = [column.slots[used].tolist() for column in space.table.parts]
        self.generations = [column.generations[used].tolist() for column in space.table.parts]
        self.flags = [column.flags[used].tolist() for column in space.table.parts]


def check(planner: Planner) -> None:
    """Raises InvariantError if any rule is broken."""
    state = planner.state
    views = [_View(space) for space in state.namespaces.values()]
    _check_sum(state)
    _check_owners(planner, views)
    for pool in state.pools.values():
        _check_pool(pool)
    for view in views:
        _check_tree(view)
        _check_rows(view, state)
        _check_patches(view.space, state)
    _check_leaves(state, views)
    _check_pins(planner, views)
    _check_promises(planner, views)
    _check_things(state)
    _check_sessions(state)
    for reservation in state.reservations.values():
        _check_entries(reservation)
    _check_bounds(planner)
    pin_invariants.check(planner)
    if planner.config.disk is not None:
        disk_invariants.check(planner)
    if planner.promoter is not None:
        gpu_invariants.check(planner, planner.promoter)


def _check_sum(state: State) -> None:
    """Rule 6."""
    for space in state.namespaces.values():
        leased = sum(lease.planned_tokens for lease in state.leases.values() if lease.space is space)
        _must(space.tokens.is_closed(), f"rule 6: the sum of namespace {space.number} is open")
        _must(space.tokens.pending == leased, f"rule 6: {space.tokens.pending} pending in namespace {space.number}")
    ledger = state.stats.tokens
    _must(ledger.is_closed(), f"rule 6: the sum is open: {ledger.looked_up} {ledger.hit} {ledger.miss}")
    pending = sum(lease.planned_tokens for lease in state.leases.values())
    _must(ledger.pending == pending, f"rule 6: {ledger.pending} pending, leases say {pending}")
    _must(min(ledger.miss.values(), default=0) >= 0, f"rule 6: a negative miss {ledger.miss}")
    _must(min(ledger.hit) >= 0 and len(ledger.hit) == len(Tier), f"rule 6: hits {ledger.hit}")


def _check_owners(planner: Planner, views: list[_View]) -> None:
    """Rule 2: every slot in use has exactly one owner, every owner's slot is in use, in a slab of its stride."""
    state = planner.state
    owned: list[int] = []
    strides: dict[int, int] = {}
    for view in views:
        for part, column in enumerate(view.slots):
            _own(owned, strides, [column[row] for row in view.rows], view.space.strides[part])
    for reservation in state.reservations.values():
        status = reservation.status.tolist()
        for part, granted in reservation.slots.items():
            mine = [slot for slot, at in zip(granted.tolist(), status, strict=True) if at != Entry.SETTLED]
            _own(owned, strides, mine, reservation.space.strides[part])
    owned += planner.mover.held_slots().tolist()
    owned += disk_invariants.loading_slots(planner)
    live = {slot for slab in state.host.slabs.values() for slot in state.host.live_slots(slab).tolist()}
    taken = set(owned)
    if len(taken) != len(owned):
        twice = [slot for slot, times in Counter(owned).items() if times > 1]
        _must(False, f"rule 2: slots with two owners: {twice[:8]}")
    _must(live == taken, f"rule 2: leaked {sorted(live - taken)[:8]}, lost {sorted(taken - live)[:8]}")
    for slot, stride in strides.items():
        slab = state.host.slabs[slot // state.host.slab_granules]
        _must(slab.stride * SLOT_GRANULE == stride, f"rule 2: slot {slot} lies in a slab of another class")


def _own(owned: list[int], strides: dict[int, int], slots: list[int], stride: int) -> None:
    for slot in slots:
        if slot != NO_SLOT:
            owned.append(slot)
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


def _check_tree(view: _View) -> None:
    """Rules 4 and 5: shape, states, "present implies parents present"."""
    space = view.space
    for node in subtree(space.tree.root):
        if node.parent is not None:
            _check_node(space, node, node.parent)
        _check_children(space, node)
    _check_limbo(view)
    if space.foreign is not None:
        indexed = set(space.foreign.by_key.values())
        attached = {node for node in view.nodes if node.state != DETACHED}
        _must(indexed == attached, "foreign index and tree differ")


def _check_children(space: Namespace, node: Node) -> None:
    children = node.children or {}
    for first, child in children.items():
        _must(child.parent is node, "a child does not know its parent")
        _must(child.edge[:KEY_BYTES] == first, "a child hangs under a wrong key")
        _must(child.start == node.end, "a child starts where its parent does not end")
    _must(node.children is None or children, "an empty dict of children")
    held = sum(child.is_held for child in children.values())
    _must(node.held == held, f"rule 5: {node.held} children are said to be held, {held} are")


def _check_limbo(view: _View) -> None:
    """What was cleared while it was leased."""
    for limbo in view.space.limbo:
        _must(limbo.children, "an empty limbo is kept")
        for node in subtree(limbo):
            _must(node.state == DETACHED, "something in limbo that is not detached")
            pinned = any(below.pins for below in subtree(node))
            _must(pinned, "something in limbo that no pin protects")


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
        _must(not node.pins and not node.cold, "a pin on what nobody can see")


def _check_rows(view: _View, state: State) -> None:
    """Rows have one node each; what the table says of them fits their state."""
    table = view.space.table
    rows = view.rows
    _must(len(set(rows)) == len(rows), "a row in two nodes")
    _must(len(rows) == table.used, f"{table.used} rows in use, {len(rows)} in the tree")
    _must(set(rows).isdisjoint(table.free_rows().tolist()), "a free row in the tree")
    for node, mine in zip(view.nodes, view.node_rows, strict=True):
        follow = bool(mine) and mine == list(range(mine[0], mine[0] + len(mine)))
        _must(node.first_row in (-1, mine[0] if follow else -1), "a node thinks that its rows follow each other")
    unverified = 0
    for part, column in enumerate(view.slots):
        for node, mine in zip(view.nodes, view.node_rows, strict=True):
            stored = [column[row] != NO_SLOT for row in mine]
            if node.state == FILLING:
                _must(not any(stored), "rule 1: the table knows a slot that is being filled")
            elif node.cold:
                _must(not any(stored), "rule 2: a block that left memory has a slot")
            elif view.space.full_mask >> part & 1:
                _must(all(stored), "rule 5: a block without one of its full parts")
        generations, flags = view.generations[part], view.flags[part]
        drawn = all(0 < generations[row] < state.generation for row in rows if column[row] != NO_SLOT)
        _must(drawn, "rule 1: a generation never drawn")
        unverified += sum(flags[row] & UNVERIFIED != 0 for row in rows)
    _must(unverified == table.unverified, "unverified parts are miscounted")


def _check_patches(space: Namespace, state: State) -> None:
    """What is marked as being patched is exactly what open reservations patch."""
    if not space.patching:
        return
    expected: dict[int, list[int]] = {part: [] for part in space.patching}
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


def _check_leaves(state: State, views: list[_View]) -> None:
    """Every visible leaf that may go is known to its policy, nothing else is."""
    known: Counter[EvictionPolicy] = Counter()
    for view in views:
        space = view.space
        for node in view.nodes:
            if not space.is_leaf(node):
                _must(node.rank == NOT_QUEUED, "rule 5: a policy holds a node that is no leaf")
                continue
            if node.rank == NOT_QUEUED:
                _must(node.pinned_depth() == node.end, "an unpinned leaf that no policy knows")
                continue
            _must(node.tick == space.tail_tick(node), "a policy does not know when a tail was used")
            _check_band(space, node)
            known[space.policy] += 1
    for policy in state.policies.values():
        _must(policy.leaf_count() == known[policy], "a policy holds leaves that are gone")


def _check_band(space: Namespace, node: Node) -> None:
    """A leaf waits among those of its tail's priority, or has faded by one."""
    own = int(space.table.priority[node.row_array()[-1]]) if space.table.prioritised else NORMAL
    _must(node.band == own or (node.band, own) == (NORMAL, HIGH), f"a leaf of priority {own} waits among {node.band}")


def _check_pins(planner: Planner, views: list[_View]) -> None:
    """Rule 2: pins are those of leases, patches, reads, writes and pinned prefixes, on blocks that are there."""
    state = planner.state
    held: list[Pin] = [pin for lease in state.leases.values() for pin in lease.pins]
    held += [pin for reservation in state.reservations.values() for pin in reservation.pins]
    held += disk_invariants.pins(planner)
    held += gpu_invariants.host_pins(planner)
    held += pin_invariants.tree_pins(planner)
    on_nodes = [pin for view in views for node in view.nodes for pin in node.pins or ()]
    _must(len(held) == len(on_nodes) and set(held) == set(on_nodes), "pins and their holders differ")
    for pin in held:
        _must(pin.node.start < pin.depth <= pin.node.end, "rule 2: a pin beyond its node")
        _must(pin.node.state in (VISIBLE, DETACHED), "a pin on what nobody can see")


def _check_promises(planner: Planner, views: list[_View]) -> None:
    """Rule 2: what a lease was told is still so: the table's, or an old slot that waits for just such leases."""
    kept = set(planner.mover.held_slots().tolist())
    told = {view.space.number: [dict(zip(*pair, strict=True)) for pair in _places(view)] for view in views}
    for lease in planner.state.leases.values():
        for run in lease.runs:
            if run.pool != planner.state.host_pool:
                continue  # gpu_invariants
            places = told[lease.space.number][run.part]
            for slot, generation in zip(run.slots.tolist(), run.generations.tolist(), strict=True):
                _must(slot in kept or places.get(slot) == generation, "rule 2: a leased slot has changed hands")
    for move in planner.mover.moves.values():
        places = told[move.space.number][move.part]
        for slot, generation in zip(move.sources.tolist(), move.old_generations.tolist(), strict=True):
            _must(slot in kept or places.get(slot) == generation, "rule 2: a slot being copied has changed hands")


def _places(view: _View) -> list[tuple[list[int], list[int]]]:
    """Per part: (slots, generations) of every row in use."""
    return [
        ([slots[row] for row in view.rows], [generations[row] for row in view.rows])
        for slots, generations in zip(view.slots, view.generations, strict=True)
    ]


def _check_things(state: State) -> None:
    """Rule 3: what has begun and not ended has a deadline that is watched."""
    open_things: list[Lease | Reservation] = [*state.leases.values()]
    open_things += [each for each in state.reservations.values() if not each.expired]
    for thing in open_things:
        _must(not thing.ended, "something that ended is kept")
        _must(state.deadlines.next_due <= thing.deadline, "rule 3: a deadline nobody watches")
    quarantined = sum(len(each.held_slots()) for each in state.reservations.values() if each.quarantined)
    _must(quarantined == state.stats.slots_quarantined, "quarantined slots are miscounted")


def _check_sessions(state: State) -> None:
    """What has not ended is known to its session, and a session that ended has only quarantine left."""
    leases = {key for session in state.sessions.values() for key in session.leases}
    _must(leases == set(state.leases), "sessions and leases differ")
    written = {(key, session.session) for session in state.sessions.values() for key in session.reservations}
    writers = {(key, writer) for key, each in state.reservations.items() for writer in each.writers}
    _must(written == writers, "sessions and reservations differ")
    for session in state.sessions.values():
        _must(not session.ended or not session.leases, "an ended session with leases")
        for reservation in session.reservations.values():
            _must(not session.ended or reservation.expired, "an ended session with open reservations")
            _must(session.can_map or not reservation.expired, "quarantine for somebody who cannot map")


def _check_entries(reservation: Reservation) -> None:
    """Rule 2: every open block that is new is in exactly one node this reservation fills."""
    filled: list[int] = []
    for node, first in reservation.nodes.items():
        _must(node.owner is reservation and node.state == FILLING, "a reservation fills a node that is not its own")
        filled += range(first, first + node.count)
    _must(reservation.quarantined == reservation.expired, "slots that expired are not in quarantine, or the reverse")
    _must(reservation.shared is not None or len(reservation.writers) == 1, "rule 2: other than one writer")
    _must(bool(reservation.writers or not reservation.expired), "rule 3: a quarantine that nobody ends")
    status = reservation.status.tolist()
    still_open = [place for place in range(reservation.fresh, len(status)) if status[place] == Entry.OPEN]
    _must(sorted(filled) == still_open, "open blocks and filling nodes differ")
    _must(not reservation.expired or not still_open, "rule 2: an expired reservation keeps keys")


def _check_bounds(planner: Planner) -> None:
    """Rule 5: everything has a bound."""
    state, limits = planner.state, planner.state.limits
    _must(len(state.sessions) <= limits.max_sessions, "too many sessions")
    _must(len(state.namespaces) <= limits.max_namespaces, "too many namespaces")
    _must(len(state.expired_leases) <= limits.recent_ends, "too many remembered leases")
    _must(len(state.recent_ends) <= limits.recent_ends, "too many remembered ends")
    _must(len(planner.checks.waiting) <= limits.max_parked, "too many waiting acquires")
    live = len(state.leases) + len(state.reservations) + len(state.prefix_pins)
    _must(len(state.deadlines) <= 3 * live + 2 * 64 + 8, "deadlines pile up")
    if not state.leases and not state.disk.writing and not state.promoting:
        _must(not planner.mover.retired, "retired slots wait for no lease")
