"""What the simulator checks beside the invariants: bytes in memory, and what an Acquire may answer."""

from __future__ import annotations

from collections.abc import Iterator

from prefixcache.core.commands import Acquired
from prefixcache.core.events import AcquireRequested
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, GroupKind, NamespaceKind, Rows
from prefixcache.core.namespaces import Namespace
from prefixcache.core.radix import VISIBLE, subtree
from prefixcache.core.spec import NamespaceSpec
from prefixcache.core.table import UNVERIFIED
from tests.sim.fakes import HEADS, Memory, SimError
from tests.sim.workers import Prompt


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
        stored.update(key for key, here in zip(keys, space.any_part(rows).tolist(), strict=True) if here)
    return stored


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


def check_planned(
    spec: NamespaceSpec, visible: set[bytes], prompt: Prompt, event: AcquireRequested, reply: Acquired
) -> None:
    """Exactly what the published events say is there, where every block has all its parts."""
    present = [prompt.key(block) in visible for block in range(prompt.blocks)]
    limit = prompt.blocks if event.max_blocks is None else event.max_blocks
    if spec.kind is NamespaceKind.FOREIGN:
        expected = min(sum(present[event.from_block :]), limit)
    else:
        leading = present.index(False) if False in present else len(present)
        expected = max(0, min(leading - event.from_block, limit))
    if all(group.kind is GroupKind.FULL for group in spec.groups):
        if reply.planned_blocks != expected:
            raise SimError(f"{reply.planned_blocks} blocks planned, {expected} are there")
    elif has_full(spec) and reply.planned_blocks > expected:
        raise SimError(f"{reply.planned_blocks} blocks planned, only {expected} are there")
    end = event.from_block + reply.planned_blocks
    if reply.planned_blocks and spec.kind is NamespaceKind.TOKENS:
        check_runs(spec, reply, event.from_block, end)


def check_runs(spec: NamespaceSpec, reply: Acquired, start: int, end: int) -> None:
    """Full groups whole, sliding and state groups exactly what the prefix needs."""
    got = {run.part: (run.first_block, run.first_block + len(run.slots)) for run in reply.runs}
    windows = {GroupKind.FULL: end, GroupKind.SLIDING: 2, GroupKind.STATE: 1}
    for part, each in enumerate(spec.parts):
        needed = max(start, end - windows[spec.groups[each.group].kind])
        if got.get(part) != (needed, end):
            raise SimError(f"part {part}: blocks {got.get(part)} instead of {(needed, end)}")
