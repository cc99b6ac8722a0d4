"""The core's index as the planner drives it: radix tree, block table and eviction order of one namespace.

What belongs here: the few calls that `index` and `match` time, each doing what the planner does for it and nothing of
sessions, leases and replies. It must not measure.
"""

from __future__ import annotations

from typing import Final

from prefixcache.cli.bench.workload import ROOT
from prefixcache.core.ids import KEY_BYTES, GroupKind, Slots
from prefixcache.core.namespaces import Namespace
from prefixcache.core.radix import Path
from prefixcache.core.removal import Remover
from prefixcache.core.slabs import SlabMover
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec, PlannerConfig, PoolSpec
from prefixcache.core.state import State
from prefixcache.identity import block_keys

# Nothing is stored; sizes only decide how many slots a slab has: 16 tokens of a model with 4 KiB a token.
PART_BYTES: Final = 64 << 10
SLAB_BYTES: Final = 64 << 20


class Index:
    """One namespace whose blocks have one part each, in a pool that is never full."""

    def __init__(self, max_blocks: int, block_tokens: int) -> None:
        spec = NamespaceSpec(block_tokens, (GroupSpec(GroupKind.FULL),), (PartSpec(0, 1, PART_BYTES),))
        size_bytes = -(-max_blocks * PART_BYTES // SLAB_BYTES) * SLAB_BYTES
        self.state = State(PlannerConfig(pools=(PoolSpec(size_bytes, SLAB_BYTES),)))
        self.space = Namespace(1, ROOT, spec, self.state.policy_for((PART_BYTES,)))
        self.remover = Remover(self.state, SlabMover(self.state))

    @property
    def blocks(self) -> int:
        """Blocks it holds."""
        return self.space.table.used

    def match(self, keys: bytes) -> int:
        """Blocks of the longest cached prefix."""
        return self.space.tree.walk(keys).blocks

    def hash_match(self, packed_tokens: bytes) -> int:
        """The same from token ids, little-endian u32."""
        return self.match(block_keys(ROOT, packed_tokens, self.space.block_tokens))

    def slots(self, keys: bytes) -> Slots:
        """Slots for the blocks of a prompt that are new. Filling them comes before a block becomes visible, so this is
        no part of `insert`."""
        fresh = len(keys) // KEY_BYTES - self.match(keys)
        slots = self.state.host.allocate(PART_BYTES, fresh)
        assert len(slots) == fresh, "the pool is too small for this workload"
        return slots

    def insert(self, keys: bytes, slots: Slots) -> None:
        """Make every block of a prompt visible; `slots` from `slots(keys)`, at least one."""
        space, state = self.space, self.state
        path = space.tree.walk(keys)
        rows = space.table.allocate(len(slots))
        space.table.place(0, rows, slots, state.next_generation())
        state.tick += 1
        space.table.touched[rows] = state.tick
        self._uncover(path)
        node = space.tree.graft(path, keys[path.blocks * KEY_BYTES :], rows.tobytes())
        space.policy.add_leaf(node, state.tick)

    def evict(self) -> None:
        """Drop one block: the tail of the least recently used leaf."""
        node = self.space.policy.victim()
        assert node is not None
        self.remover.evict_tail(node, 1)

    def _uncover(self, path: Path) -> None:
        """A node that gets a child is no leaf any more."""
        if path.nodes and path.nodes[-1].end == path.blocks:
            self.space.policy.remove_leaf(path.nodes[-1])
