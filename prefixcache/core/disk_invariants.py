"""What must hold of the disk tier after every event, checked from scratch; called by `invariants.check`.

Rules: as there: reads only, slow on purpose, never in production. Must not know: what other rules there are.
"""

from __future__ import annotations

from collections import Counter

from prefixcache.core.demoting import Demoter
from prefixcache.core.ids import NO_SLOT
from prefixcache.core.loading import Loader
from prefixcache.core.namespaces import Namespace
from prefixcache.core.planner import Planner
from prefixcache.core.policy.tiered import TieredLeaves
from prefixcache.core.radix import DETACHED, NOT_QUEUED, VISIBLE, Node, Pin, subtree
from prefixcache.core.table import NO_SEGMENT


class InvariantError(AssertionError):
    """A rule of design section 6 does not hold."""


def must(condition: object, text: str) -> None:
    if not condition:
        raise InvariantError(text)


def check(planner: Planner) -> None:
    """Raises InvariantError if any rule about the disk is broken."""
    live: Counter[int] = Counter()
    clean: Counter[TieredLeaves] = Counter()
    for space in planner.state.namespaces.values():
        if space.on_disk:
            _check_space(space, live, clean)
        else:
            must(not space.cold_blocks, "a namespace that is not on disk has cold blocks")
    for segment in planner.state.disk.segments.values():
        must(segment.live_bytes == live[segment.number], f"segment {segment.number} is miscounted")
        must(segment.reads >= 0, "more reads ended than began")
        must(segment.frozen == (planner.freer is not None and segment.number in planner.freer.frozen), "frozen")
    must(planner.chores is None or planner.chores.is_told or not planner.chores.is_due, "work is due and not told of")
    must(planner.state.disk.numbers == sorted(planner.state.disk.segments), "segments are out of order")
    must(set(live) <= set(planner.state.disk.segments), "a record in a segment nobody knows")
    for policy, blocks in clean.items():
        must(policy.clean_blocks == blocks, f"{policy.clean_blocks} blocks are said to be clean, {blocks} are")
    if planner.demoter is not None and planner.loader is not None:
        _check_writes(planner, planner.demoter)
        _check_loads(planner, planner.loader)


def loading_slots(planner: Planner) -> list[int]:
    """Slots that belong to reads."""
    loads = planner.loader.loads.values() if planner.loader is not None else ()
    return [slot for load in loads for slot in load.held_slots().tolist()]


def pins(planner: Planner) -> list[Pin]:
    """Pins of reads and writes."""
    loads = planner.loader.loads.values() if planner.loader is not None else ()
    jobs = planner.demoter.jobs.values() if planner.demoter is not None else ()
    return [pin for holder in (*loads, *jobs) for pin in holder.pins]


def _check_space(space: Namespace, live: Counter[int], clean: Counter[TieredLeaves]) -> None:
    index = space.tree.index
    assert index is not None
    nodes = [n for root in (space.tree.root, *space.limbo) for n in subtree(root) if n.parent is not None]
    must({node.number for node in nodes} == set(index.by_number), "the index of nodes holds others than the tree")
    cold = 0
    for node in nodes:
        must(index.by_number[node.number] is node, "a number names another node")
        rows = node.row_array()
        must((index.numbers(rows) == node.number).all(), "a row is said to be in another node")
        for part, column in enumerate(space.table.parts):
            segments = column.segments[rows]
            if node.cold and node.state != DETACHED and part in space.full_parts:
                must((segments != NO_SEGMENT).all(), "rule 5: a block is in no tier")
            for number in segments[segments != NO_SEGMENT].tolist():
                live[number] += space.spec.parts[part].size_bytes
        must((space.table.cold[rows] == node.cold).all(), "a row is said to be in memory, or not to be")
        if node.cold:
            must(node.state in (VISIBLE, DETACHED), "a cold node that is being filled")
            cold += node.count
        if node.rank != NOT_QUEUED:
            _check_leaf(space, node, clean)
    must(cold == space.cold_blocks, f"{space.cold_blocks} blocks are said to be cold, {cold} are")


def _check_leaf(space: Namespace, node: Node, clean: Counter[TieredLeaves]) -> None:
    policy = space.policy
    assert isinstance(policy, TieredLeaves)
    is_clean = bool(space.table.is_clean(node.row_array()[-1:])[0])
    must(bool(node.clean) == is_clean, "a leaf is in the wrong order of the two")
    clean[policy] += node.clean


def _check_writes(planner: Planner, demoter: Demoter) -> None:
    """Rule 3: what is being written is pinned, once, and counted."""
    must(demoter.writing_bytes == sum(job.size_bytes for job in demoter.jobs.values()), "writes are miscounted")
    must(set(planner.state.disk.writing) == set(demoter.jobs), "writes and their serials differ")
    for job in demoter.jobs.values():
        must(job.left > 0, "a write that ended is kept")
        for part, column in enumerate(job.space.table.parts):
            slots = column.slots[job.records.rows[job.records.parts == part]]
            must((slots != NO_SLOT).all(), "rule 2: a slot that is being written was given back")


def _check_loads(planner: Planner, loader: Loader) -> None:
    """Rules 2 and 3: what is being read has slots of its own, and leases wait only for what is under way."""
    parts: Counter[tuple[int, int, int]] = Counter()
    for load in loader.loads.values():
        must(load.open_records > 0 or load.waits, "a read that ended is kept")
        for row, part in load.names(slice(load.front, None)):
            parts[load.space.number, row, part] += 1
            must(load.space.loading.get((row, part)) is load, "what is being read is not known to be")
        waiters = [not lease.ended and load in lease.loads for lease in load.waiters]
        must(all(waiters), "an ended lease waits for a read")
    known = sum(len(space.loading) for space in planner.state.namespaces.values())
    must(known == len(parts) and max(parts.values(), default=1) == 1, "reads are miscounted")
    _check_waiting(planner, loader)


def _check_waiting(planner: Planner, loader: Loader) -> None:
    """Rule 3: no lease waits for nothing."""
    for lease in planner.state.leases.values():
        planned_end = lease.reply.from_block + lease.reply.planned_blocks
        if lease.ready_end < planned_end and lease.stop is None and lease.cold is not None:
            must(lease.loads, "rule 3: a lease waits for nothing")
        must(all(load.number in loader.loads for load in lease.loads), "rule 3: a lease waits for what has ended")
