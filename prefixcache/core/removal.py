"""How blocks leave: tails of leaves by eviction, subtrees by clearing, unfinished ones with their reservation.

Rules: a tail leaves before what is in front of it. Nothing pinned and nothing being filled gives up its slot: a cleared
subtree that leases still hold is detached (out of sight) and goes piece by piece as its pins go. Slots of a reservation
never come back through here. Must not know: leases, sessions, time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixcache.core.commands import Change, Command
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, Rows, Slots
from prefixcache.core.radix import DETACHED, FILLING, NOT_QUEUED, VISIBLE, WAITING, Node, Pin, pin_path, subtree, unpin
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

    def evict_tail(self, node: Node, count: int, out: list[Command]) -> None:
        """Takes the last `count` blocks of an unpinned stretch of a leaf."""
        state = self.state
        space = node.space
        assert space is not None
        state.publish_blocks(Change.REMOVED, node, node.count - count, out)
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
        """Gives a node to its policy if it is a leaf that the policy does not hold."""
        space = node.space
        if space is not None and node.rank == NOT_QUEUED and space.is_leaf(node):
            space.policy.add_leaf(node, space.tail_tick(node))

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
        space.tree.unlink(node)
        if node.state != VISIBLE:
            self._drop(node)
            self.offer_leaf(above)
            return 0, 0
        limbo = Node(space, None, 0, b"", b"")
        limbo.state = DETACHED
        limbo.children = {node.edge[:KEY_BYTES]: node}
        node.parent = limbo
        space.limbo.add(limbo)
        if above.parent is not None and space.foreign is None:
            # Whoever holds something below the cut holds what is above it as well, until now through it.
            for pin in [pin for below in subtree(node) for pin in below.pins or ()]:
                pin_path(above, above.end, pin.holder)
        hidden = self._hide(space, node)
        gone = sum(below.count for below in hidden)
        for below in reversed(hidden):
            self._collect(below)
        if not limbo.children:
            space.limbo.discard(limbo)
        self.offer_leaf(above)
        return gone, sum(below.count for below in subtree(limbo))

    def _hide(self, space: Namespace, node: Node) -> list[Node]:
        """Makes the visible nodes of an unlinked subtree detached (answers them, parents first); drops the rest."""
        hidden: list[Node] = []
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
        if space.policy.remembers:
            space.policy.forgotten(space, rows)
        for slots in space.table.release(rows):
            self.release_slots(slots if not space.optional_parts else slots[slots != NO_SLOT])

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
