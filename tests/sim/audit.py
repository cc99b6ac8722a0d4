"""What the simulator checks beside the invariants: bytes in memory, and what an Acquire may answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from prefixcache.core.commands import Acquired
from prefixcache.core.events import AcquireRequested, SegmentFreed
from prefixcache.core.gpu import GpuTier
from prefixcache.core.ids import HOST_POOL, KEY_BYTES, NO_SLOT, GroupKind, NamespaceKind, Rows
from prefixcache.core.namespaces import Namespace
from prefixcache.core.radix import VISIBLE, subtree
from prefixcache.core.reasons import Miss
from prefixcache.core.spec import NamespaceSpec
from prefixcache.core.table import UNVERIFIED
from tests.sim.disk import FakeDisk
from tests.sim.fakes import HEADS, Memory, SimError
from tests.sim.workers import Prompt

CUT_SHORT = (Miss.DEADLINE, Miss.SLOWER_THAN_RECOMPUTE, Miss.POOL_FULL, Miss.TIER_OFF)


def has_full(spec: NamespaceSpec) -> bool:
    return any(group.kind is GroupKind.FULL for group in spec.groups)


def visible_nodes(space: Namespace) -> Iterator[tuple[Rows, list[bytes]]]:
    """Rows and keys of every visible node."""
    for node in subtree(space.tree.root):
        if node.state == VISIBLE and node.parent is not None:
            yield node.row_array(), [node.edge[at : at + KEY_BYTES] for at in range(0, len(node.edge), KEY_BYTES)]


def stored_keys(space: Namespace) -> set[bytes]:
    """Keys of visible blocks that have any part."""
    stored: set[bytes] = set()
    for rows, keys in visible_nodes(space):
        held = space.any_part(rows)
        stored.update(key for key, here in zip(keys, held.tolist(), strict=True) if here)
    return stored


def cold_keys(space: Namespace) -> set[bytes]:
    """Keys of stored blocks that the table says are on disk only."""
    found: set[bytes] = set()
    for rows, keys in visible_nodes(space):
        held = space.any_part(rows) & space.table.cold[rows] if space.on_disk else np.zeros(len(rows), np.bool_)
        found.update(key for key, here in zip(keys, held.tolist(), strict=True) if here)
    return found


def check_bytes(space: Namespace, memory: Memory) -> None:
    """Every stored, trusted part holds the bytes of its key, under the generation the table says."""
    for rows, keys in visible_nodes(space):
        for part, column in enumerate(space.table.parts):
            columns = (column.slots[rows].tolist(), column.generations[rows].tolist(), column.flags[rows].tolist())
            for slot, generation, flag, key in zip(*columns, keys, strict=True):
                if slot == NO_SLOT or flag & UNVERIFIED:
                    continue
                expected = ((space.number, key, part),) * HEADS
                if memory.read(slot) != expected:
                    raise SimError(f"slot {slot} holds {memory.read(slot)} instead of {expected}")
                if memory.generation(slot) != generation:
                    raise SimError(f"slot {slot}: the control page and the table differ")


def check_copies(tier: GpuTier, memory: Memory) -> Counter[tuple[int, bytes]]:
    """Every copy holds the bytes of its key, under the generation that the pool's control page says. Answers what is
    there: (namespace, key)."""
    found: Counter[tuple[int, bytes]] = Counter()
    for number, copies in tier.copies.items():
        for node in subtree(copies.tree.root):
            for place, row in enumerate(node.row_array().tolist()):
                key = node.edge[place * KEY_BYTES : (place + 1) * KEY_BYTES]
                found[number, key] += 1
                for part, column in enumerate(copies.columns):
                    slot = int(column.slots[row])
                    if memory.read(slot) != ((number, key, part),) * HEADS:
                        raise SimError(f"GPU slot {slot} holds {memory.read(slot)}")
                    if memory.generation(slot) != int(column.generations[row]):
                        raise SimError(f"GPU slot {slot}: the control page and the copies differ")
    return found


def check_planned(
    space: Namespace, visible: set[bytes], prompt: Prompt, event: AcquireRequested, reply: Acquired
) -> None:
    """Exactly what the published events and the table say is there, by the definition of what is restorable."""
    spec = space.spec
    start = event.from_block
    limit = prompt.blocks if event.max_blocks is None else event.max_blocks
    if spec.kind is NamespaceKind.FOREIGN:
        expected = min(sum(prompt.key(block) in visible for block in range(start, prompt.blocks)), limit)
    else:
        expected = longest_restorable(space, prompt, start, limit) - start
        if has_full(spec) and any(prompt.key(block) not in visible for block in range(start, start + expected)):
            raise SimError("the table holds blocks that were never announced")
    cut_short = space.on_disk and reply.stop in CUT_SHORT and reply.planned_blocks < expected
    if reply.ready_blocks < reply.planned_blocks and not event.deadline_s:
        raise SimError("a worker that would not wait was promised what is on disk")
    if reply.planned_blocks != expected and not cut_short:
        raise SimError(f"{reply.planned_blocks} blocks planned, {expected} are there")
    if spec.kind is NamespaceKind.FOREIGN:
        check_bitmap(space, prompt, reply)
    elif reply.planned_blocks:
        check_runs(spec, reply, start)


def check_bitmap(space: Namespace, prompt: Prompt, reply: Acquired) -> None:
    """What is promised is there; of what is told, all parts, and exactly what was in memory."""
    assert reply.present is not None
    promised = [reply.from_block + place for place in reply.present.nonzero()[0].tolist()]
    cold = {
        key: bool(space.on_disk and space.table.cold[row])
        for rows, keys in visible_nodes(space)
        for key, row in zip(keys, rows.tolist(), strict=True)
    }
    if len(promised) != reply.planned_blocks or any(prompt.key(place) not in cold for place in promised):
        raise SimError("a bitmap of other keys than are there")
    ready = {place for place in promised if not cold[prompt.key(place)]}
    for part in range(len(space.strides)):
        told = [run.first_block + index for run in reply.runs if run.part == part for index in range(len(run.slots))]
        if set(told) != ready or len(told) != len(ready) or len(ready) != reply.ready_blocks:
            raise SimError(f"part {part}: told {told}, in memory are {sorted(ready)}")


def longest_restorable(space: Namespace, prompt: Prompt, start: int, limit: int) -> int:
    """Design section 3, word for word: at that length every full group has all its blocks, every sliding group those of
    its window, every state group its boundary; what lies below `start` the worker has itself."""
    row_of = {key: row for rows, keys in visible_nodes(space) for key, row in zip(keys, rows.tolist(), strict=True)}
    rows = [row_of.get(prompt.key(block)) for block in range(prompt.blocks)]
    matched = rows.index(None) if None in rows else len(rows)
    for end in range(min(matched, start + limit), start, -1):
        if all(_has(space, part, rows[first:end]) for part, first in needed_parts(space.spec, start, end)):
            return end
    return start


def needed_parts(spec: NamespaceSpec, start: int, end: int) -> list[tuple[int, int]]:
    """(part, first block of it that a prefix of `end` blocks needs)."""
    windows = {GroupKind.FULL: end, GroupKind.SLIDING: 2, GroupKind.STATE: 1}
    return [(part, max(start, end - windows[spec.groups[each.group].kind])) for part, each in enumerate(spec.parts)]


def _has(space: Namespace, part: int, rows: list[int | None]) -> bool:
    column = space.table.parts[part]
    return all(
        row is not None and (int(column.slots[row]) != NO_SLOT or (space.on_disk and column.segments[row] != 0))
        for row in rows
    )


def check_records(space: Namespace, disk: FakeDisk) -> None:
    """Every record the table knows is there, and holds the bytes of its key."""
    for rows, keys in visible_nodes(space):
        for part, column in enumerate(space.table.parts):
            places = (column.segments[rows].tolist(), column.pages[rows].tolist())
            for segment, page, key in zip(*places, keys, strict=True):
                if not segment:
                    continue
                found = disk.segments.get(segment, {}).get(page)
                if found is None and any(
                    isinstance(job, SegmentFreed) and job.segment == segment for job in disk.told_late
                ):
                    continue
                name = (space.number, key, part)
                if found is None or found.name != name or found.content != (name,) * HEADS:
                    raise SimError(f"segment {segment}, page {page}: {found} instead of {name}")


def restorable_keys(disk: FakeDisk, number: int, spec: NamespaceSpec) -> set[bytes]:
    """Blocks of a namespace that a restart must bring back: on disk with all full parts (without a full group: with
    any), not revoked, and so all in front of them."""
    whole: dict[bytes, set[int]] = {}
    parents: dict[bytes, bytes] = {}
    for pages in disk.segments.values():
        for record in pages.values():
            if record.name[0] == number and not disk.revoked(record, *disk.ordered):
                whole.setdefault(record.name[1], set()).add(record.name[2])
                parents[record.name[1]] = record.parent
    must = {part for part, each in enumerate(spec.parts) if spec.groups[each.group].kind is GroupKind.FULL}
    found: set[bytes] = set()
    for key in whole:
        chain = [key]
        while chain[-1] in whole and must <= whole[chain[-1]]:
            chain.append(parents[chain[-1]])
        if chain[-1] == bytes(32):
            found.update(chain[:-1])
    return found


def check_runs(spec: NamespaceSpec, reply: Acquired, start: int) -> None:
    """Of what is ready: full groups whole, sliding and state groups exactly what the promised prefix needs; copies in
    one GPU pool in front."""
    end = start + reply.ready_blocks
    got: dict[int, tuple[int, int]] = {}
    for run in reply.runs:
        first, behind = got.get(run.part, (run.first_block, run.first_block))
        if run.first_block != behind or (run.pool != HOST_POOL and run.part in got):
            raise SimError(f"part {run.part}: runs that do not follow each other, GPU first")
        got[run.part] = (first, run.first_block + len(run.slots))
    for part, needed in needed_parts(spec, start, start + reply.planned_blocks):
        if got.get(part) != ((needed, end) if needed < end else None):
            raise SimError(f"part {part}: blocks {got.get(part)} instead of {(needed, end)}")
