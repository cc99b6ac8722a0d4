"""One namespace: its spec, index, table and what a prefix needs to be restorable.

Rules: where a namespace has a full group, a block is in the tree exactly while all its full parts are stored (or being
filled); blocks without any part ("bare") exist only in namespaces without a full group, as links to later blocks.
Must not know: sessions, leases, slots' allocation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.ids import KEY_BYTES, NO_SLOT, GroupKind, NamespaceId, NamespaceKind, Rows
from prefixcache.core.ledger import TokenLedger
from prefixcache.core.nodes import NodeIndex
from prefixcache.core.policy.base import EvictionPolicy
from prefixcache.core.radix import VISIBLE, Node, Path, RadixTree
from prefixcache.core.spec import GroupSpec, NamespaceSpec
from prefixcache.core.table import NO_SEGMENT, BlockTable

if TYPE_CHECKING:
    from prefixcache.core.gpu import Copies, GpuTier
    from prefixcache.core.loads import Load
    from prefixcache.core.pins import PrefixPin

_NO_GAP = -(1 << 40)  # in front of every window


class ForeignIndex(RadixTree):
    """Opaque keys: every node is one block, found by its key alone; parents only matter for what may leave. A block's
    number in its path is how many are in front of it, as far as its parents were told."""

    def __init__(self, space: Namespace | None = None) -> None:
        super().__init__(space)
        self.by_key: dict[bytes, Node] = {}

    def add(self, parent: Node | None, key: bytes, row: bytes, *, cold: bool = False) -> Node:
        """A new block below another one, or alone."""
        return self.graft(Path([parent], parent.end) if parent is not None else Path([], 0), key, row, cold=cold)

    def graft(self, path: Path, edge: bytes, rows: bytes, *, cold: bool = False) -> Node:
        """See RadixTree: of one block."""
        node = self.by_key[edge] = super().graft(path, edge, rows, cold=cold)
        return node

    def present(self, keys: bytes) -> list[Node | None]:
        """The visible node of each key."""
        found = [self.by_key.get(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]
        return [node if node is not None and node.state == VISIBLE else None for node in found]

    def unlink(self, node: Node) -> None:
        super().unlink(node)
        self.forget(node)

    def forget(self, node: Node) -> None:
        """Makes the key free for another node."""
        if self.by_key.get(node.edge) is node:
            del self.by_key[node.edge]


class Namespace:
    """Everything kept for one fingerprint. `tokens`: its part of the closed sum, kept by whoever keeps the whole."""

    def __init__(
        self,
        number: NamespaceId,
        fingerprint: bytes,
        spec: NamespaceSpec,
        policy: EvictionPolicy,
        tokens: TokenLedger | None = None,
    ) -> None:
        self.number = number
        self.tokens = TokenLedger() if tokens is None else tokens
        self.fingerprint = fingerprint
        self.spec = spec
        self.policy = policy
        self.block_tokens = spec.block_tokens
        self.strides = tuple(part.stride_bytes for part in spec.parts)
        self.block_bytes = sum(part.size_bytes for part in spec.parts)
        self.table = BlockTable(len(spec.parts))
        self.foreign = ForeignIndex(self) if spec.kind is NamespaceKind.FOREIGN else None
        self.tree: RadixTree = self.foreign or RadixTree(self)
        self.all_mask = (1 << len(spec.parts)) - 1
        self.full_mask = _full_mask(spec)
        self.optional_parts = tuple(p for p in range(len(spec.parts)) if not self.full_mask >> p & 1)
        self.full_parts = tuple(p for p in range(len(spec.parts)) if self.full_mask >> p & 1)
        self.windows = tuple(_window_blocks(group, spec.block_tokens) for group in spec.groups)
        # Rows of visible blocks that reservations are filling a part of, per part that may be missing from memory.
        self.patching: dict[int, set[int]] = {part: set() for part in self.optional_parts}
        self.limbo: set[Node] = set()  # roots over cleared subtrees that leases still hold
        self.prefix_pins: dict[bytes, PrefixPin] = {}  # by last key, which names the whole prefix
        self.pinned_keys: Counter[bytes] = Counter()  # how many pins each key is in, stored or not
        self.wanted: dict[bytes, list[PrefixPin]] = {}  # by the key of the next block that they wait for
        self.on_disk = False
        self.cold_blocks = 0  # visible or leased blocks that are on disk only
        self.writing: set[tuple[int, int]] = set()  # (row, part) on their way to disk
        self.loading: dict[tuple[int, int], Load] = {}  # (row, part) on their way back
        self.copies: tuple[tuple[GpuTier, Copies], ...] = ()  # in GPU pools

    def use_disk(self) -> None:
        """Its blocks may be on disk from now on."""
        self.on_disk = True
        self.tree.index = NodeIndex()
        self.table.use_disk()
        self.table.count_hits()
        self.patching = {part: set() for part in range(len(self.strides))}

    def use_gpus(self, tiers: Iterable[GpuTier]) -> None:
        """Its blocks may have copies in these pools from now on. Only where every group is full."""
        self.copies = tuple((tier, tier.add_namespace(self)) for tier in tiers)
        self.table.count_hits()

    def leave_gpus(self, rows: Rows) -> None:
        """These blocks are about to leave host memory, or sight."""
        for tier, copies in self.copies:
            tier.leave(copies, rows)

    @property
    def may_lack_slots(self) -> bool:
        """Whether something of what is stored may be on disk only."""
        return self.cold_blocks > 0 or (self.on_disk and bool(self.optional_parts))

    @property
    def is_plain(self) -> bool:
        """Whether every block has every part; only such blocks have copies on GPUs."""
        return self.foreign is None and not self.optional_parts

    @property
    def has_full(self) -> bool:
        return bool(self.full_mask)

    def restorable(self, rows: Rows, from_block: int, end: int) -> int:
        """The longest n <= end such that a prefix of n blocks can be restored by somebody who has the blocks below
        `from_block`. rows: of the matched path from block 0, at least `end` of them."""
        if not self.optional_parts or end <= from_block:
            return end
        good = np.ones(end - from_block, np.bool_)
        places = np.arange(from_block, end)
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            # Blocks the caller has itself count as present, so only gaps from from_block on matter.
            gaps = np.where(self.group_present(group, rows[from_block:end]), _NO_GAP, places)
            last_gap = np.maximum.accumulate(gaps)
            good &= last_gap <= places - window
        found = np.flatnonzero(good)
        return from_block + int(found[-1]) + 1 if len(found) else from_block

    def learn_layers(self, spec: NamespaceSpec) -> bool:
        """Takes the layers of an otherwise equal spec where they are not known yet; False if it has other ones."""
        told, known = (tuple(part.layers for part in each.parts) for each in (spec, self.spec))
        if not any(known):
            self.spec = spec
        return told == known or not any(told) or not any(known)

    def group_present(self, group: int, rows: Rows) -> NDArray[np.bool_]:
        """bool[n]: which rows have every part of a group, in memory or on disk."""
        present = np.ones(len(rows), np.bool_)
        for index, part in enumerate(self.spec.parts):
            if part.group == group:
                present &= self._stored(index, rows)
        return present

    def any_part(self, rows: Rows) -> NDArray[np.bool_]:
        """bool[n]: which rows have any part at all, in memory or on disk."""
        stored = np.zeros(len(rows), np.bool_)
        for part in range(len(self.strides)):
            stored |= self._stored(part, rows)
        return stored

    def lacks(self, part: int, rows: Rows) -> NDArray[np.bool_]:
        """bool[n]: which rows have this part neither in memory nor on disk."""
        return ~self._stored(part, rows)

    def _stored(self, part: int, rows: Rows) -> NDArray[np.bool_]:
        column = self.table.parts[part]
        stored: NDArray[np.bool_] = column.slots[rows] != NO_SLOT
        if self.on_disk:
            stored |= column.segments[rows] != NO_SEGMENT
        return stored

    def may_cool(self, rows: Rows) -> NDArray[np.bool_]:
        """bool[n]: which rows stay in the tree when they leave memory: every full part of them is on disk, or, where
        there is no full group, any part."""
        if not self.has_full:
            return self.table.is_recorded(rows)
        kept = np.ones(len(rows), np.bool_)
        for part in self.full_parts:
            kept &= self.table.parts[part].segments[rows] != NO_SEGMENT
        return kept

    def ways_out(self, rows: Rows) -> NDArray[np.uint8]:
        """u8[n]: rows that can leave memory together have the same number; 3 for those that lose nothing."""
        ways: NDArray[np.uint8] = self.table.is_clean(rows) + np.uint8(2) * self.may_cool(rows)
        return ways

    def needed_from(self, part: int, from_block: int, end: int) -> int:
        """First block of a prefix of `end` blocks whose `part` has to be read."""
        window = self.windows[self.spec.parts[part].group]
        return from_block if window is None else max(from_block, end - window)

    def tail_tick(self, node: Node) -> int:
        """When the tail of a (not empty) node was last used."""
        return int(self.table.touched[int.from_bytes(node.rows[-4:], "little")])

    def parent_key(self, node: Node) -> bytes:
        """The key in front of `node` (empty at the root)."""
        parent = node.parent
        return parent.edge[-KEY_BYTES:] if parent is not None else b""

    def is_leaf(self, node: Node) -> bool:
        """Whether a policy may order this node: nothing below it is in memory or held."""
        return not node.held and node.state == VISIBLE and not node.cold and node.parent is not None

    def visible_blocks(self, nodes: list[Node], blocks: int) -> int:
        """How many leading blocks of a walked path are visible."""
        for node in nodes:
            if node.state != VISIBLE:
                return min(blocks, node.start)
        return blocks


def _window_blocks(group: GroupSpec, block_tokens: int) -> int | None:
    """How many of the last blocks a group needs; None: all of them."""
    if group.kind is GroupKind.FULL:
        return None
    if group.kind is GroupKind.STATE:
        return 1
    return -(-(group.window_tokens - 1) // block_tokens)


def _full_mask(spec: NamespaceSpec) -> int:
    return sum(1 << index for index, part in enumerate(spec.parts) if spec.groups[part.group].kind is GroupKind.FULL)
