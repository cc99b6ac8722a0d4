"""One GPU pool as the core sees it: what it holds copies of, and the room in it.

Rules: copies only, so dropping one moves no byte. A block is here only while it is in sight in host memory and its
parent is here as well: what is here of a path is its front. A slot under a lease never changes hands: eviction passes
over what is pinned; where a leased copy must go at once (its block left, or was cleared) its slots wait for every lease
that is older than that. Must not know: what is worth a copy (promoting decides), sessions, how bytes move.

The copies of a namespace are a radix tree of their own over the same keys and rows: an eviction policy orders leaves of
a tree, and a block that is a leaf here (none of its children has a copy) is none in host memory. One tree with two
sets of leaves would have cost every lookup and every eviction of those who have no GPU.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

import numpy as np

from prefixcache.core.commands import Change
from prefixcache.core.ids import NO_SLOT, LeaseId, NamespaceId, Rows, Slots, Tier
from prefixcache.core.nodes import NodeIndex
from prefixcache.core.policy.base import UNKNOWN_BIRTH, EvictionPolicy
from prefixcache.core.radix import DETACHED, NOT_QUEUED, Node, Path, Pin, RadixTree, pin_path, subtree, unpin
from prefixcache.core.reasons import CopyDrop
from prefixcache.core.slots import SlabPool
from prefixcache.core.spec import PoolSpec
from prefixcache.core.table import PartColumn
from prefixcache.core.telling import news_of

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace
    from prefixcache.core.state import State

SLABS_TAKEN = 2  # blocks of another class are dropped for a promotion up to so many slabs' worth
MOST_WASTE = 0.5  # of what is evicted may go unread before promotions are held back
LET_IN = 8  # of so many promotions one, while most of them are wasted
_REMEMBERED = 8  # evictions


class Copies:
    """What one GPU pool holds of one namespace. moving: rows on their way into it; read: bool by row, whether a lease
    was told the copy that is here now."""

    __slots__ = ("blocks", "columns", "index", "moving", "read", "space", "tree")

    def __init__(self, space: Namespace) -> None:
        self.space = space
        self.tree = RadixTree(space)
        self.index = self.tree.index = NodeIndex()
        self.columns = tuple(PartColumn() for _ in space.strides)
        self.moving: set[int] = set()
        self.read = np.zeros(0, np.bool_)
        self.blocks = 0

    def held(self, rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """bool[n]: which rows have a copy here."""
        slots = self.columns[0].slots
        held = np.zeros(len(rows), np.bool_)
        known = rows < len(slots)
        held[known] = slots[rows[known]] != NO_SLOT
        return held

    def holds(self, row: int) -> bool:
        slots = self.columns[0].slots
        return row < len(slots) and int(slots[row]) != NO_SLOT

    def place(self, rows: Rows, slots: dict[int, Slots], generation: int) -> None:
        """These rows have copies from now on."""
        capacity = self.space.table.capacity
        for part, column in enumerate(self.columns):
            known = len(column.slots)
            if known < capacity:
                column.grow(capacity)
                column.slots[known:] = NO_SLOT
            column.slots[rows] = slots[part]
            column.generations[rows] = generation
        if len(self.read) < capacity:
            self.read = np.concatenate([self.read, np.zeros(capacity - len(self.read), np.bool_)])
        self.read[rows] = False
        self.blocks += len(rows)

    def take(self, rows: Rows) -> list[Slots]:
        """These rows have none any more; answers their slots, part by part."""
        held = [column.slots[rows] for column in self.columns]
        for column in self.columns:
            column.slots[rows] = NO_SLOT
        self.index.forget(rows)
        self.blocks -= len(rows)
        return held


class Use:
    """A lease that was told slots of this pool."""

    __slots__ = ("pins", "serial")

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.pins: list[Pin] = []


class GpuTier:
    """One pool. `reason`: why it is off, empty while it works. `drops`: blocks whose copy went, by reason. `waste`: the
    share of what was evicted lately that nobody had read here, 0 to 1."""

    def __init__(self, state: State, spec: PoolSpec) -> None:
        self.state = state
        self.pool = spec.pool
        self.reason = ""
        self.copies: dict[NamespaceId, Copies] = {}
        self.policies: dict[tuple[int, ...], EvictionPolicy] = {}
        self.leases: dict[LeaseId, Use] = {}
        self.retired: deque[tuple[int, Slots]] = deque()  # (serial, slots) wait for older leases
        self.moving_bytes = 0
        self.promoted = 0
        self.waste = 0.0
        self._held_back = 0
        self.drops: Counter[CopyDrop] = Counter()

    @property
    def slots(self) -> SlabPool:
        return self.state.pools[self.pool]

    @property
    def blocks(self) -> int:
        return sum(copies.blocks for copies in self.copies.values())

    def add_namespace(self, space: Namespace) -> Copies:
        copies = self.copies[space.number] = Copies(space)
        return copies

    def policy_of(self, space: Namespace) -> EvictionPolicy:
        """One policy for all namespaces whose blocks take the same slots, as in host memory."""
        signature = tuple(sorted(space.strides))
        policy = self.policies.get(signature)
        if policy is None:
            policy = self.policies[signature] = self.state.make_policy()
        return policy

    # -- what is here ------------------------------------------------------------------------------------------------

    def attach(self, copies: Copies, path: Path, keys: bytes, rows: Rows) -> None:
        """Copies of the blocks `keys` (in `rows`) behind `path` are here from now on; the slots are placed already."""
        space = copies.space
        policy = self.policy_of(space)
        node = copies.tree.graft(path, keys, rows.astype("<u4").tobytes())
        self._publish(Change.STORED, node, 0)
        if policy.remembers:
            policy.stored(space, node, UNKNOWN_BIRTH)
        above = node.parent
        if above is not None and above.parent is not None:
            policy.remove_leaf(above)
            if above.children is not None and len(above.children) == 1:
                copies.tree.join(node)
        self.offer_leaf(node)

    def offer_leaf(self, node: Node) -> None:
        space = node.space
        if space is not None and node.rank == NOT_QUEUED and space.is_leaf(node):
            self.policy_of(space).add_leaf(node, space.tail_tick(node))

    def leave(self, copies: Copies, rows: Rows) -> None:
        """These blocks are about to leave host memory, or sight: what is here of them, and below them, goes."""
        if not copies.blocks:
            return
        here = rows[copies.held(rows)]
        while len(here):
            self._drop_from(copies, int(here[0]), CopyDrop.WITH_HOST)
            here = here[copies.held(here)]

    def drop_all(self, reason: CopyDrop) -> None:
        for copies in self.copies.values():
            for node in list((copies.tree.root.children or {}).values()):
                self._drop_from(copies, int(node.row_array()[0]), reason)

    def forget(self, space: Namespace) -> None:
        """A namespace that holds nothing is no more."""
        del self.copies[space.number]
        if all(copies.space.strides != space.strides for copies in self.copies.values()):
            self.policies.pop(tuple(sorted(space.strides)), None)

    def end_lease(self, lease: LeaseId, tick: int) -> None:
        """Its pins go, and what waited for it."""
        use = self.leases.pop(lease, None)
        if use is None:
            return
        for pin in use.pins:
            node = pin.node
            if node.state != DETACHED and not node.held and pin.depth == node.end and node.space is not None:
                self.policy_of(node.space).touch_leaf(node, tick)
        self.unpin_all(use.pins)
        self.settle_retired()

    def unpin_all(self, pins: list[Pin]) -> None:
        while pins:
            node = unpin(pins.pop())
            if node.state != DETACHED:
                self.offer_leaf(node)

    def settle_retired(self) -> None:
        """Frees the slots of dropped copies that no living lease can know."""
        while self.retired:
            serial, slots = self.retired[0]
            if any(use.serial < serial for use in self.leases.values()):
                return
            self.retired.popleft()
            self.slots.release(slots)

    def known_slots(self) -> Slots:
        """Slots that somebody may have been told of: of every copy, and of those that left under a lease."""
        pieces = [slots for _, slots in self.retired]
        for copies in self.copies.values():
            pieces += [column.slots[column.slots != NO_SLOT] for column in copies.columns]
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint32)

    # -- room --------------------------------------------------------------------------------------------------------

    def allocate(self, space: Namespace, count: int) -> dict[int, Slots]:
        """Slots by part for up to `count` blocks, arrays of one length; drops copies by the policy to make room."""
        pool = self.slots
        got: dict[int, Slots] = {}
        for stride, each in Counter(space.strides).items():
            self._free_up(stride, min(count * each, pool.class_capacity(stride)))
            got |= {part: pool.allocate(stride, count) for part, size in enumerate(space.strides) if size == stride}
        least = min(len(slots) for slots in got.values())
        for slots in got.values():
            pool.release(slots[least:])
        return {part: got[part][:least] for part in range(len(space.strides))}

    def holds_back(self, space: Namespace, count: int) -> bool:
        """Whether copies of `count` more blocks are better left alone: the pool is full of what is hit as often, so
        they would push out others before these were read. Some are let in all the same, so that this can change."""
        if self.waste <= MOST_WASTE:
            return False
        needed = Counter(space.strides)
        if all(self.slots.free_slots(stride) >= each * count for stride, each in needed.items()):
            return False
        self._held_back += 1
        return self._held_back % LET_IN != 0

    def _free_up(self, stride: int, wanted: int) -> None:
        """Drops the oldest leaves of any class, those of others within a bound: dropped for nothing until a slab of
        theirs falls empty."""
        pool = self.slots
        other_bytes = SLABS_TAKEN * pool.spec.slab_bytes
        while (missing := wanted - pool.free_slots(stride)) > 0:
            found = self._oldest(stride, others=other_bytes > 0)
            if found is None:
                return
            signature, policy = found
            if stride in signature:
                self._evict(policy, -(-missing // signature.count(stride)))
            else:
                other_bytes -= sum(signature) * self._evict(policy, max(1, pool.spec.slab_bytes // sum(signature)))

    def _oldest(self, stride: int, *, others: bool) -> tuple[tuple[int, ...], EvictionPolicy] | None:
        best = None
        best_tick = 0
        for signature, policy in self.policies.items():
            victim = policy.victim() if others or stride in signature else None
            if victim is not None and (best is None or victim.tick < best_tick):
                best, best_tick = (signature, policy), victim.tick
        return best

    def _evict(self, policy: EvictionPolicy, most: int) -> int:
        """Drops up to `most` blocks off the tail of the policy's victim; parks it if it is pinned."""
        node = policy.victim()
        assert node is not None
        space = node.space
        assert space is not None
        loose = node.end - node.pinned_depth()
        if not loose:
            policy.remove_leaf(node)
            return 0
        count = policy.run_length(node, min(loose, most)) if min(loose, most) > 1 else 1
        copies = self.copies[space.number]
        above = node.parent
        self._publish(Change.REMOVED, node, node.count - count)
        if count == node.count:
            policy.remove_leaf(node)
        if policy.remembers:
            policy.evicted(space, node, count)
        rows = copies.tree.cut_tail(node, count)
        if policy.remembers:
            policy.forgotten(space, rows)
        unread = 1 - float(copies.read[rows].mean())
        self.waste += (unread - self.waste) / _REMEMBERED
        self.slots.release(np.concatenate(copies.take(rows)))
        self.drops[CopyDrop.EVICTED] += count
        if node.count:
            policy.retick_leaf(node, space.tail_tick(node))
        elif above is not None:
            node.state = DETACHED
            self.offer_leaf(above)
        return count

    def _drop_from(self, copies: Copies, row: int, reason: CopyDrop) -> None:
        """The copy of `row` and all below it go now."""
        node = copies.index.node_of(row)
        assert node is not None
        place = int(np.flatnonzero(node.row_array() == row)[0])
        if place:
            copies.tree.split(node, place)
        above = node.parent
        assert above is not None
        copies.tree.unlink(node)
        policy = self.policy_of(copies.space)
        if above.parent is not None:
            # Whoever holds something below the cut holds what is above it as well, until now through it.
            for pin in [pin for below in subtree(node) for pin in below.pins or ()]:
                pin_path(above, above.end, pin.holder)
        pieces: list[Slots] = []
        leased = False
        for below in list(subtree(node)):
            policy.remove_leaf(below)
            self._publish(Change.REMOVED, below, 0)
            rows = below.row_array()
            if policy.remembers:
                policy.forgotten(copies.space, rows)
            pieces += copies.take(rows)
            copies.index.drop(below)
            below.state = DETACHED
            leased |= below.pins is not None
            self.drops[reason] += below.count
        slots = np.concatenate(pieces)
        if leased:
            self.retired.append((self.state.next_serial(), slots))
            self.settle_retired()  # a pin may be a promotion's, which knows no slots of its parents
        else:
            self.slots.release(slots)
        self.offer_leaf(above)

    def _publish(self, change: Change, node: Node, first: int) -> None:
        """For those who watch events: the blocks of a node from its `first` on."""
        if self.state.config.publish:
            self.state.news.append(news_of(change, node, (first, node.count), Tier.GPU, self.pool))
