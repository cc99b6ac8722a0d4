"""A reservation: slots being filled by one writer or several, and how far they got.

Rules: its slots belong to it and to nobody else from the grant until its settled blocks' slots move to the table or
every writer is known to be done. Its blocks are the entries `0..n-1`; first the patches (blocks that are visible and
get a part they lack), then the fresh ones (new nodes of the tree, in `nodes`). Must not know: the allocator, the
policies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.commands import Reserved
from prefixcache.core.events import Coverage, ReserveRequested
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, ReservationId, SessionId, Slots
from prefixcache.core.policy.base import UNKNOWN_BIRTH
from prefixcache.core.radix import Node, Pin

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace


class Entry:
    """State of one granted block. Plain ints: they are compared with whole columns."""

    OPEN: Final = 0
    SETTLED: Final = 1  # its slots are the table's now
    ORPHANED: Final = 2  # it can never become visible; its slots stay until the writer is done


class Reservation:
    """See the module's rules. `expired`: keys are free, slots are quarantined. `order`: which entry the reply's blocks
    are, where that is not their order (in a foreign namespace patches may stand between new blocks)."""

    __slots__ = (
        "birth", "blocks", "covered", "deadline", "ended", "expired", "fresh", "generation", "nodes", "order",
        "patch_rows", "pins", "quarantined", "reply", "reservation", "session", "shared", "slots", "space", "status",
        "writers",
    )  # fmt: skip

    def __init__(
        self, space: Namespace, session: SessionId, reply: Reserved, fresh: int, order: NDArray[np.int64] | None = None
    ) -> None:
        self.space = space
        self.session = session
        self.writers: set[SessionId] = {session}  # who may still write
        self.shared: ReserveRequested | None = None  # what was asked for, where several may fill it
        self.reservation: ReservationId = reply.reservation
        self.reply = reply
        self.order = order
        self.blocks = self._by_entry(reply.blocks)
        self.birth = UNKNOWN_BIRTH
        self.generation = reply.generation
        self.slots: dict[int, Slots] = {grant.part: self._by_entry(grant.slots) for grant in reply.grants}
        self.fresh = fresh
        self.nodes: dict[Node, int] = {}  # open nodes -> index of their first entry
        self.patch_rows: NDArray[np.uint32] = np.empty(0, np.uint32)
        self.pins: list[Pin] = []  # on the blocks it patches
        self.status: NDArray[np.uint8] = np.zeros(len(reply.blocks), np.uint8)
        self.covered: dict[int, NDArray[np.bool_]] | None = None  # part -> bool[entries, heads, layers]
        self.deadline = reply.expires_at
        self.expired = False
        self.quarantined = False
        self.ended = False

    def keys_at(self, block: int) -> tuple[bytes, bytes]:
        """(key in front of a patched block, its own key), found above the pinned node."""
        node = self.pins[0].node
        while node.start > block and node.parent is not None:
            node = node.parent
        at = (block - node.start) * KEY_BYTES
        before = node.edge[at - KEY_BYTES : at] if at else node.parent.edge[-KEY_BYTES:] if node.parent else b""
        return before, node.edge[at : at + KEY_BYTES]

    def held_slots(self) -> Slots:
        """Every slot that is still its own (not settled)."""
        mine = self.status != Entry.SETTLED
        pieces = [slots[mine & (slots != NO_SLOT)] for slots in self.slots.values()]
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint32)

    def open_blocks(self) -> int:
        return int(np.count_nonzero(self.status == Entry.OPEN))

    def cover(self, coverage: tuple[Coverage, ...] | None) -> None:
        """Notes what was filled. Out-of-range coverage must have been refused before (`coverage_error`)."""
        if coverage is None and self.covered is None:
            return
        covered = self._coverage()
        if coverage is None:
            for heads in covered.values():
                heads[:] = True
            return
        for piece in coverage:
            last_head = None if piece.head_count is None else piece.first_head + piece.head_count
            last_layer = None if piece.layer_count is None else piece.first_layer + piece.layer_count
            written = (slice(piece.first_head, last_head), slice(piece.first_layer, last_layer))
            covered[piece.part][self._entries(piece), *written] = True

    def ends_with(self, session: SessionId) -> bool:
        """Whether it is over once this session has said its last word: nobody else may write, nobody is to come."""
        return self.writers <= {session} and (self.shared is None or not self.open_blocks())

    def coverage_error(self, coverage: tuple[Coverage, ...] | None) -> str | None:
        """What is wrong with a coverage, or None."""
        if coverage is None:
            return None if self.shared is None else "of a shared reservation say which heads were written"
        return next((error for piece in coverage if (error := self._piece_error(piece)) is not None), None)

    def _piece_error(self, piece: Coverage) -> str | None:
        if piece.part not in self.slots:
            return f"part {piece.part} is not one of those granted"
        heads, layers = self._axes(piece.part)
        if not _within(piece.first_head, piece.head_count, heads):
            return f"heads {piece.first_head}+{piece.head_count} are not within the {heads} of part {piece.part}"
        if not _within(piece.first_layer, piece.layer_count, layers):
            return f"layers {piece.first_layer}+{piece.layer_count} are not within the {layers} of part {piece.part}"
        if piece.block_count <= 0 or piece.first_block < 0 or piece.first_block + piece.block_count > NO_SLOT:
            return "a coverage needs at least one block, all within u32"
        if len(self._entries(piece)) != piece.block_count:
            return f"blocks {piece.first_block}+{piece.block_count} were not all granted"
        return None

    def whole(self, *, all_covered: bool) -> NDArray[np.bool_]:
        """bool[n]: entries of which every granted part is covered."""
        whole = np.ones(len(self.blocks), np.bool_)
        if all_covered and self.covered is None:
            return whole
        for part, heads in self._coverage().items():
            whole &= heads.all(axis=(1, 2)) | (self.slots[part] == NO_SLOT)
        return whole

    def _entries(self, piece: Coverage) -> NDArray[np.int64]:
        """Which entries a coverage means."""
        wanted = (piece.first_block, piece.first_block + piece.block_count)
        low, high = np.searchsorted(self.reply.blocks, wanted).tolist()
        return np.arange(low, high) if self.order is None else self.order[low:high]

    def _by_entry(self, column: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """A column of the reply, in the order of the entries."""
        if self.order is None:
            return column
        entries = np.empty_like(column)
        entries[self.order] = column
        return entries

    def _coverage(self) -> dict[int, NDArray[np.bool_]]:
        if self.covered is None:
            self.covered = {part: np.zeros((len(self.blocks), *self._axes(part)), np.bool_) for part in self.slots}
        return self.covered

    def _axes(self, part: int) -> tuple[int, int]:
        """(heads, layers) that have to be covered."""
        spec = self.space.spec.parts[part]
        return spec.kv_heads, max(1, spec.layers)


def _within(first: int, count: int | None, total: int) -> bool:
    """Whether a range that is not empty lies within [0, total); None: to its end."""
    return 0 <= first < total and (count is None or 0 < count <= total - first)
