"""How blocks leave: tails of leaves by eviction, subtrees by clearing, unfinished ones with their reservation.

Rules: a tail leaves before what is in front of it. Nothing pinned and nothing being filled gives up its slot: a cleared
subtree that leases still hold is detached (out of sight) and goes piece by piece as its pins go. Slots of a reservation
never come back through here. What is on disk leaves memory only (it is cold then) and stays in the tree; what is not
leaves for good, and what is on disk below it with it. Must not know: leases, sessions, time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from prefixcache.core.commands import Change
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, Rows, Slots, Tier
from prefixcache.core.policy.base import UNKNOWN_BIRTH
from prefixcache.core.radix import (
    DETACHED,
    FILLING,
    NOT_QUEUED,
    VISIBLE,
    WAITING,
    Node,
    Pin,
    hot_from,
    pin_path,
    subtree,
    unpin,
)
from prefixcache.core.reasons import DiskDrop
from prefixcache.core.reservations import Entry

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace
    from prefixcache.core.slabs import SlabMover
    from prefixcache.core.state import State


class Remover:
    """Takes blocks out and gives their slots back (through `mover`, which holds those that are being copied)."""

    def __init__(self, state: State, mover: SlabMover) -> None:
        self.state = state
        self.mover = mover
        self.shorten_pins: Callable[[Node], None] = lambda _: None  # told before a subtree goes

    def evict_tail(self, node: Node, count: int) -> None:
        """Takes the last `count` blocks of an unpinned stretch of a leaf out of memory; all in the same way
        (`Namespace.ways_out`)."""
        space = node.space
        assert space is not None
        if space.on_disk:
            way = int(space.ways_out(node.row_array()[-1:])[0])
            if way >= 2 or (way and node.children):  # a link without any part stays for what is below it
                self.state.stats.blocks_evicted += count
                self.state.stats.disk_drops[DiskDrop.UNWRITTEN] += count * (way == 2)
                self._demote_tail(space, node, count)
                return
            if not way:
                gone = sum(self.drop_cold(child) for child in list((node.children or {}).values()))
                self.state.stats.disk_drops[DiskDrop.UNWRITTEN] += count
                self.state.stats.disk_drops[DiskDrop.WITH_PARENT] += gone
        self._drop_tail(space, node, count)

    def _demote_tail(self, space: Namespace, node: Node, count: int) -> None:
        """The last blocks of a leaf become cold: a node of their own, joined with the cold path below."""
        space.policy.remove_leaf(node)
        if space.policy.remembers:
            space.policy.evicted(space, node, count)
            space.policy.forgotten(space, node.row_array()[-count:])
        upper = node
        if count < node.count:
            upper = space.tree.split(node, node.count - count)  # the tail keeps the node's identity
        self.cool(space, node)
        above = node.parent
        self.join_like(space, node)
        self.offer_leaf(above or upper)

    def lose_records(self, space: Namespace, part: int, rows: Rows) -> None:
        """One part of some rows is not on disk any more. Where there is no full group that may have been the last of a
        block, which is only a link then."""
        self.state.disk.lose(space, part, rows)
        self.state.publish_links(Change.REMOVED, space, rows)

    def reorder(self, space: Namespace, rows: Rows) -> None:
        """Some rows came to be on disk, or are not any more, or got a part: leaves whose tail they are may change from
        one order to the other."""
        index = space.tree.index
        if index is None:
            return
        for number in sorted(set(index.numbers(rows).tolist())):  # a twentieth of np.unique for some rows
            node = index.by_number.get(number)
            if node is not None and node.rank != NOT_QUEUED:
                space.policy.retick_leaf(node, space.tail_tick(node))

    def join_like(self, space: Namespace, node: Node) -> Node:
        """Keeps paths compressed: joins a node with its parent and with its only child where they are alike. Answers
        the node that has its blocks now."""
        parent = node.parent
        if parent is not None and parent.parent is not None and _alike(parent, node):
            space.tree.join(node)
        if node.children is not None and len(node.children) == 1:
            below = next(iter(node.children.values()))
            if _alike(node, below):
                if node.rank != NOT_QUEUED:
                    space.policy.remove_leaf(node)
                space.tree.join(below)
                return below
        return node

    def cool(self, space: Namespace, node: Node) -> None:
        """All blocks of a node give their slots back; what they must have is on disk."""
        rows = node.row_array()
        if space.copies:
            space.leave_gpus(rows)
        self.state.publish_move(node, Tier.DISK)
        for slots in space.table.take_slots(rows):
            self.release_slots(slots[slots != NO_SLOT] if space.optional_parts else slots)
        space.table.cold[rows] = True
        space.cold_blocks += node.count
        space.tree.set_cold(node, cold=True)

    def warm(self, space: Namespace, node: Node, place: int, count: int) -> Node:
        """Blocks [place, place + count) of a cold node are in memory from now on, as a node of their own: the caller
        puts their slots into the table at once, and calls `settle_warm`."""
        if place:
            space.tree.split(node, place)
        if count < node.count:
            node = space.tree.split(node, count)
        space.table.cold[node.row_array()] = False
        space.cold_blocks -= count
        space.tree.set_cold(node, cold=False)
        self.state.publish_move(node, Tier.HOST)
        return node

    def settle_warm(self, space: Namespace, node: Node) -> None:
        """The policy gets to know a node that is in memory again."""
        if space.policy.remembers:
            space.policy.stored(space, node, UNKNOWN_BIRTH)
        if node.parent is not None:
            space.policy.remove_leaf(hot_from(node.parent))
        self.offer_leaf(self.join_like(space, node))

    def drop_cold(self, node: Node) -> int:
        """Forgets a subtree that is on disk only and that nobody holds; answers how many blocks that were."""
        space = node.space
        assert space is not None
        assert not node.is_held
        gone = 0
        for below in reversed(list(subtree(node))):
            self.state.publish_blocks(Change.REMOVED, below)
            gone += below.count
            self.release(space, below.row_array())
            below.state = DETACHED
            if space.tree.index is not None:
                space.tree.index.drop(below)
            if space.foreign is not None:
                space.foreign.forget(below)
        space.tree.unlink(node)
        return gone

    def _drop_tail(self, space: Namespace, node: Node, count: int) -> None:
        """The last blocks of a leaf leave for good."""
        state = self.state
        state.publish_blocks(Change.REMOVED, node, node.count - count)
        whole = count == node.count
        parent = node.parent
        if whole:
            space.policy.remove_leaf(node)
        if space.policy.remembers:
            space.policy.evicted(space, node, count)
        self._cut(space, node, count)
        state.stats.blocks_evicted += count
        if not whole:
            space.policy.retick_leaf(node, space.tail_tick(node))
        elif parent is not None:
            self.offer_leaf(parent)

    def offer_leaf(self, node: Node) -> None:
        """Gives a node (or the one in memory above it) to its policy if it is a leaf that the policy does not hold."""
        node = hot_from(node)
        space = node.space
        if space is not None and node.rank == NOT_QUEUED and space.is_leaf(node):
            space.policy.add_leaf(node, space.tail_tick(node))

    def pin(self, node: Node, depth: int, holder: list[Pin]) -> None:
        """Pins a path; what is in memory above a pinned cold node may not leave either."""
        pin_path(node, depth, holder)
        if node.cold and node.space is not None:
            node.space.policy.remove_leaf(hot_from(node))

    def unpin_all(self, pins: list[Pin]) -> None:
        """Takes pins off and empties the list; what they alone protected may go now."""
        while pins:
            node = unpin(pins.pop())
            if node.state == DETACHED:
                self._collect(node)
            else:
                self.offer_leaf(node)

    def detach(self, node: Node) -> tuple[int, int]:
        """Puts a subtree out of sight. Answers (visible blocks that left, those of them that leases still hold)."""
        space = node.space
        above = node.parent
        assert space is not None
        assert above is not None
        self.shorten_pins(node)
        space.tree.unlink(node)
        if node.state != VISIBLE:
            self._drop(node)
            self.offer_leaf(above)
            return 0, 0
        limbo = Node(space, None, 0, b"", b"")
        limbo.state = DETACHED
        limbo.children = {node.edge[:KEY_BYTES]: node}
        limbo.held = int(node.is_held)
        node.parent = limbo
        space.limbo.add(limbo)
        if above.parent is not None:
            # Whoever holds something below the cut holds what is above it as well, until now through it.
            for pin in [pin for below in subtree(node) for pin in below.pins or ()]:
                self.pin(above, above.end, pin.holder)
        hidden = self._hide(space, node)
        gone = sum(below.count for below in hidden)
        for below in reversed(hidden):
            self._collect(below)
        if not limbo.children:
            space.limbo.discard(limbo)
        self.offer_leaf(above)
        return gone, sum(below.count for below in subtree(limbo))

    def forget_block(self, space: Namespace, node: Node, row: int) -> int:
        """The block of `row`, which is in `node`, and all below it leave. Answers visible blocks."""
        place = int(np.flatnonzero(node.row_array() == row)[0])
        if place:
            space.tree.split(node, place)
        self.state.publish_subtree(node)
        return self.detach(node)[0]

    def _hide(self, space: Namespace, node: Node) -> list[Node]:
        """Makes the visible nodes of an unlinked subtree detached (answers them, parents first); drops the rest."""
        hidden: list[Node] = []
        if space.copies:
            space.leave_gpus(node.row_array())
        for below in list(subtree(node)):
            if below.state == VISIBLE:
                space.policy.remove_leaf(below)
                below.state = DETACHED
                if space.foreign is not None:
                    space.foreign.forget(below)
                hidden.append(below)
            elif below.state != DETACHED:  # the top of an unfinished subtree; what is below it is detached with it
                space.tree.unlink(below)
                self._drop(below)
        return hidden

    def drop_unfinished(self, node: Node) -> None:
        """Takes a subtree that never became visible out of the tree; what others fill in it is orphaned."""
        above = node.parent
        assert above is not None
        assert node.space is not None
        node.space.tree.unlink(node)
        self._drop(node)
        self.offer_leaf(above)

    def release(self, space: Namespace, rows: Rows) -> None:
        """Gives rows and the slots they hold back."""
        if space.copies:
            space.leave_gpus(rows)
        if space.on_disk:
            self._forget_records(space, rows)
        if space.policy.remembers:
            space.policy.forgotten(space, rows)
        for slots in space.table.release(rows):
            self.release_slots(slots[slots != NO_SLOT] if space.optional_parts or space.on_disk else slots)

    def _forget_records(self, space: Namespace, rows: Rows) -> None:
        self.state.disk.forget(space, rows)
        space.cold_blocks -= int(np.count_nonzero(space.table.cold[rows]))
        if space.tree.index is not None:
            space.tree.index.forget(rows)

    def release_slots(self, slots: Slots) -> None:
        self.mover.release(slots)

    def _cut(self, space: Namespace, node: Node, count: int) -> None:
        self.release(space, space.tree.cut_tail(node, count))

    def _drop(self, node: Node) -> None:
        """Ends an unlinked subtree of nodes that are not visible."""
        space = node.space
        assert space is not None
        for below in list(subtree(node)):
            owner = below.owner
            if below.state == FILLING and owner is not None:
                first = owner.nodes.pop(below)
                entries = owner.status[first : first + below.count]
                entries[entries == Entry.OPEN] = Entry.ORPHANED
            below.owner = None
            if below.state == WAITING:
                self.release(space, below.row_array())
            else:
                space.table.release(below.row_array())  # nothing is in the table before it is settled
            if space.tree.index is not None:
                space.tree.index.forget(below.row_array())
                space.tree.index.drop(below)
            below.state = DETACHED
            if space.foreign is not None:
                space.foreign.forget(below)

    def _collect(self, node: Node) -> None:
        """Lets go of what no pin protects, from a detached node upwards."""
        space = node.space
        assert space is not None
        while node.parent is not None and not node.children:
            parent = node.parent
            loose = node.end - node.pinned_depth()
            if loose:
                self._cut(space, node, loose)
            if node.count:
                return
            node = parent
        if node.parent is None and not node.children:
            space.limbo.discard(node)


def _alike(parent: Node, child: Node) -> bool:
    """Whether a node and its only child may be one; blocks that are found by their keys alone never are."""
    if parent.space is None or parent.space.foreign is not None:
        return False
    alone = parent.children is not None and len(parent.children) == 1
    return alone and parent.cold is child.cold and parent.state == child.state == VISIBLE
