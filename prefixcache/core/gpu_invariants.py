"""What must hold of the GPU tier after every event, checked from scratch; called by `invariants.check`.

Rules: as there: reads only, slow on purpose, never in production. Must not know: what other rules there are.
"""

from __future__ import annotations

from collections import Counter

from prefixcache.core.disk_invariants import must
from prefixcache.core.gpu import Copies, GpuTier
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, SLOT_GRANULE
from prefixcache.core.planner import Planner
from prefixcache.core.policy.base import EvictionPolicy
from prefixcache.core.promoting import Promoter
from prefixcache.core.radix import DETACHED, NOT_QUEUED, VISIBLE, Node, Pin, subtree


def check(planner: Planner, promoter: Promoter) -> None:
    """Raises InvariantError if any rule about the GPU tier is broken."""
    state = planner.state
    for tier in state.gpus.values():
        _check_owners(tier, promoter)
        known: Counter[EvictionPolicy] = Counter()
        for copies in tier.copies.values():
            must(state.namespaces.get(copies.space.number) is copies.space, "copies of a namespace that is no more")
            _check_copies(tier, copies, known)
            _check_moving(tier, copies, promoter)
        for policy in tier.policies.values():
            must(policy.leaf_count() == known[policy], "a policy of a GPU pool holds leaves that are gone")
        moving = sum(job.size_bytes for job in promoter.jobs.values() if job.tier is tier)
        must(tier.moving_bytes == moving, "bytes on their way to a GPU pool are miscounted")
        must(not tier.reason or not tier.blocks, "a GPU pool that is off holds something")
        _check_pins(tier, promoter)
        _check_leases(planner, tier)
    must(set(state.promoting) == set(promoter.jobs), "promotions and their serials differ")
    must(not state.news, "an event about copies was not told")


def host_pins(planner: Planner) -> list[Pin]:
    """Pins of what is being copied."""
    jobs = planner.promoter.jobs.values() if planner.promoter is not None else ()
    return [pin for job in jobs for pin in job.pins]


def _nodes(copies: Copies) -> list[Node]:
    return [node for node in subtree(copies.tree.root) if node.parent is not None]


def _check_owners(tier: GpuTier, promoter: Promoter) -> None:
    """Rule 2: every slot in use has one owner: a copy, a promotion, or leases older than its drop."""
    owned = tier.known_slots().tolist()
    owned += [slot for job in promoter.jobs.values() if job.tier is tier for slot in job.held_slots().tolist()]
    live = {slot for slab in tier.slots.slabs.values() for slot in tier.slots.live_slots(slab).tolist()}
    must(len(set(owned)) == len(owned), "rule 2: a GPU slot with two owners")
    must(live == set(owned), f"rule 2: GPU slots leaked or lost: {sorted(live ^ set(owned))[:8]}")
    for copies in tier.copies.values():
        for stride, column in zip(copies.space.strides, copies.columns, strict=True):
            for slot in column.slots[column.slots != NO_SLOT].tolist():
                slab = tier.slots.slabs[slot // tier.slots.slab_granules]
                must(slab.stride * SLOT_GRANULE == stride, "rule 2: a GPU slot lies in a slab of another class")


def _check_copies(tier: GpuTier, copies: Copies, known: Counter[EvictionPolicy]) -> None:
    """What is here of a path is its front, the same rows as in host memory, in sight there."""
    space = copies.space
    nodes = _nodes(copies)
    rows = [row for node in nodes for row in node.row_array().tolist()]
    must(len(rows) == copies.blocks == len(set(rows)), "blocks in a GPU pool are miscounted")
    must({node.number for node in nodes} == set(copies.index.by_number), "the index of copies holds others")
    for column in copies.columns:
        here = {int(row) for row in (column.slots != NO_SLOT).nonzero()[0]}
        must(here == set(rows), "a copy without one of its parts, or parts without a copy")
    for node in nodes:
        must(node.state == VISIBLE and not node.cold, "a copy that is out of sight")
        must(copies.index.by_number[node.number] is node, "a number names another node of copies")
        must((copies.index.numbers(node.row_array()) == node.number).all(), "a copy is said to be in another node")
        _check_host(copies, node)
        if space.is_leaf(node) and node.rank != NOT_QUEUED:
            known[tier.policy_of(space)] += 1
        elif space.is_leaf(node):
            must(node.pinned_depth() == node.end, "an unpinned leaf of copies that no policy knows")
        else:
            must(node.rank == NOT_QUEUED, "a policy holds a node of copies that is no leaf")


def _check_host(copies: Copies, node: Node) -> None:
    keys = b""
    above: Node | None = node
    while above is not None:
        keys = above.edge + keys
        above = above.parent
    path = copies.space.tree.walk(keys)
    must(path.blocks * KEY_BYTES == len(keys), "a copy of a block that is not in host memory")
    rows = path.packed_rows()[4 * node.start : 4 * node.end]
    must(rows == node.rows, "a copy of another block")
    slots = copies.space.table.parts[0].slots
    must((slots[node.row_array()] != NO_SLOT).all(), "a copy of a block that is on disk only")


def _check_moving(tier: GpuTier, copies: Copies, promoter: Promoter) -> None:
    moving = [row for job in promoter.jobs.values() if job.copies is copies for row in job.rows.tolist()]
    must(len(moving) == len(set(moving)) and set(moving) == copies.moving, "rows on their way up are miscounted")


def _check_pins(tier: GpuTier, promoter: Promoter) -> None:
    """Pins are those of leases and promotions; what is in sight of them is in the tree."""
    held = [pin for use in tier.leases.values() for pin in use.pins]
    held += [pin for job in promoter.jobs.values() if job.tier is tier for pin in job.near_pins]
    there = [pin for copies in tier.copies.values() for node in _nodes(copies) for pin in node.pins or ()]
    must({pin for pin in held if pin.node.state != DETACHED} == set(there), "pins on copies and their holders differ")
    for pin in there:
        must(pin.node.start < pin.depth <= pin.node.end, "rule 2: a pin beyond its node of copies")


def _check_leases(planner: Planner, tier: GpuTier) -> None:
    """Rule 2: what a lease was told is still so, or waits for just such leases; nothing else is known to be used."""
    must(set(tier.leases) <= set(planner.state.leases), "a lease that ended uses copies")
    must(tier.leases or not tier.retired, "retired GPU slots wait for no lease")
    kept = {slot for _, slots in tier.retired for slot in slots.tolist()}
    for lease in planner.state.leases.values():
        for run in lease.runs:
            if run.pool != tier.pool:
                continue
            must(lease.lease in tier.leases, "a lease was told copies and does not hold them")
            column = tier.copies[lease.space.number].columns[run.part]
            places = dict(zip(column.slots.tolist(), column.generations.tolist(), strict=True))
            for slot, generation in zip(run.slots.tolist(), run.generations.tolist(), strict=True):
                must(slot in kept or places.get(slot) == generation, "rule 2: a leased GPU slot has changed hands")
