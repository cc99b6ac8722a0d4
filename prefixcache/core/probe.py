"""The index by itself, for `prefixcache bench index`: match, insert and evict on the planner's own objects.

Rules: the same tree, table, allocator, policy and evictor as in the planner, without sessions, leases and
reservations, so that a figure taken here is the index's and nothing else's.
"""

from __future__ import annotations

import numpy as np

from prefixcache.core.commands import Command
from prefixcache.core.eviction import Evictor
from prefixcache.core.ids import KEY_BYTES, SLOT_GRANULE, GroupKind, Slots
from prefixcache.core.namespaces import Namespace
from prefixcache.core.radix import ROW_DTYPE
from prefixcache.core.removal import Remover
from prefixcache.core.slabs import SlabMover
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec, PlannerConfig, PoolSpec
from prefixcache.core.state import State

_SLAB_BYTES = 64 << 20


class IndexProbe:
    """An index of up to `capacity_blocks` blocks of one 4 KiB part. Holds no bytes. Not thread-safe."""

    def __init__(self, capacity_blocks: int, block_tokens: int = 64) -> None:
        size = -(-capacity_blocks * SLOT_GRANULE // _SLAB_BYTES) * _SLAB_BYTES
        self._state = State(PlannerConfig((PoolSpec(size, _SLAB_BYTES),)))
        mover = SlabMover(self._state)
        self._evictor = Evictor(self._state, Remover(self._state, mover))
        spec = NamespaceSpec(block_tokens, (GroupSpec(GroupKind.FULL),), (PartSpec(0, 1, SLOT_GRANULE),))
        policy = self._state.policy_for((SLOT_GRANULE,))
        self._space = Namespace(0, bytes(32), spec, policy)
        self._out: list[Command] = []

    @property
    def blocks(self) -> int:
        """How many blocks are stored."""
        return self._space.table.used

    def match(self, keys: bytes) -> int:
        """Longest stored prefix of packed keys, in blocks; counts as a use of it."""
        state, space = self._state, self._space
        state.tick += 1
        path = space.tree.walk(keys)
        nodes = path.nodes
        if nodes:
            rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)
            space.table.touched[rows] = state.tick
            last = nodes[-1]
            if last.children is None and last.end == path.blocks:
                space.policy.touch_leaf(last, state.tick)
        return path.blocks

    def slots(self, keys: bytes) -> Slots:
        """Where the longest stored prefix is: u32, one per block."""
        path = self._space.tree.walk(keys)
        rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)
        return self._space.table.parts[0].slots[rows]

    def insert(self, keys: bytes) -> int:
        """Stores what is missing of packed keys; answers how many blocks that was (fewer when the pool is full)."""
        state, space = self._state, self._space
        state.tick += 1
        path = space.tree.walk(keys)
        missing = len(keys) // KEY_BYTES - path.blocks
        slots = state.host.allocate(SLOT_GRANULE, missing)
        if not len(slots):
            return 0
        rows = space.table.allocate(len(slots))
        edge = keys[path.blocks * KEY_BYTES : (path.blocks + len(slots)) * KEY_BYTES]
        node = space.tree.graft(path, edge, rows.astype(ROW_DTYPE).tobytes())
        if node.parent is not None:
            space.policy.remove_leaf(node.parent)
        space.table.place(0, rows, slots, state.next_generation())
        space.table.touched[rows] = state.tick
        space.policy.add_leaf(node, state.tick)
        return len(slots)

    def evict(self, blocks: int = 1) -> int:
        """Evicts the least recently used leaf blocks; answers how many went."""
        gone = 0
        while gone < blocks:
            count = self._evictor.evict_from(self._space.policy, blocks - gone, self._out)
            if not count and self._space.policy.victim() is None:
                break
            gone += count
        return gone
