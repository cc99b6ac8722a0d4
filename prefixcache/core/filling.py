"""Commit, Abort and the end of reservations: what is whole becomes visible, the rest gives its slots back.

Rules: a block is settled (its slots move to the table) when every granted part is covered by all its heads; it is
visible when its parent is. Mapped slots come back only by the last word of everybody who may write them, or the end of
their processes: when the time is over, a session is gone or one of several writers gives up, the keys are free and the
slots are quarantined. A reservation ends once.
Must not know: how slots were found (granting does).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.commands import (
    Aborted,
    Change,
    Command,
    Committed,
    DrainFinished,
    Refused,
    ReservationEnded,
)
from prefixcache.core.events import AbortRequested, CommitRequested
from prefixcache.core.ids import NO_SLOT, SessionId
from prefixcache.core.nodes import run_in
from prefixcache.core.radix import DETACHED, VISIBLE, WAITING, Node
from prefixcache.core.reasons import Kind, Refusal, Skip
from prefixcache.core.removal import Remover
from prefixcache.core.reservations import Entry, Reservation
from prefixcache.core.sharing import Sharing, shared_is_over
from prefixcache.core.slabs import ask_checksum
from prefixcache.core.state import State


class Filling:
    """Handlers of the reservation events behind Reserve."""

    def __init__(self, state: State, remover: Remover) -> None:
        self.state = state
        self.remover = remover
        self.sharing = Sharing(state)

    def commit(self, event: CommitRequested, out: list[Command]) -> None:
        reservation = self._own(event, Committed, out)
        if reservation is None:
            return
        if reservation.expired:
            self._commit_expired(event, reservation, out)
            return
        error = reservation.coverage_error(event.coverage)
        if error is not None:
            self._refuse(Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID, error, reservation, out)
            return
        reservation.cover(event.coverage)
        whole = reservation.whole(all_covered=event.coverage is None)
        if not event.more and reservation.shared is None:
            left = int(np.count_nonzero((reservation.status == Entry.OPEN) & ~whole))
            if left:
                text = f"{left} granted blocks are not filled; commit them first, or abort"
                self._refuse(Kind.FAILED_PRECONDITION, Refusal.RESERVATION_INCOMPLETE, text, reservation, out)
                return
            whole[:] = True  # of the orphaned ones, too, the writer is done
        stored, dropped = self._settle(reservation, whole, out)
        self.state.stats.blocks_stored += stored
        self.state.stats.blocks_skipped.update(dropped)
        over = not event.more and reservation.ends_with(event.session)
        reply = Committed(event.reservation, stored, dict(dropped), reservation.open_blocks(), over)
        out.append(reply)
        if not event.more:
            self.sharing.last_word(reservation, event.session, reply)
        if over:
            self._finish(reservation, out)

    def abort(self, event: AbortRequested, out: list[Command]) -> None:
        if event.shared and self._never_came(event, out):
            return
        reservation = self._own(event, Aborted, out)
        if reservation is None:
            return
        last = reservation.writers == {event.session}
        reply = Aborted(event.reservation, len(reservation.held_slots()) if last else 0)
        out.append(reply)
        self.sharing.last_word(reservation, event.session, reply)
        if not last and not reservation.expired:
            self._close(reservation, Skip.CALLED_OFF, out)
        elif last:
            if not reservation.expired:
                self._withdraw(reservation, Skip.CALLED_OFF)
            self._finish(reservation, out)

    def run_out(self, reservation: Reservation, out: list[Command], *, expired: bool) -> None:
        """Its time is over, or the session of a writer is."""
        self.state.stats.reservations_expired += expired
        self._close(reservation, Skip.RAN_OUT if expired else Skip.WRITER_GONE, out)

    def writer_gone(self, reservation: Reservation, session: SessionId, out: list[Command]) -> None:
        """This writer's process is gone (the reservation has run out before)."""
        self.sharing.last_word(reservation, session, self._expired(reservation))
        if not reservation.writers:
            self._finish(reservation, out)

    def _never_came(self, event: AbortRequested, out: list[Command]) -> bool:
        """One of several writers gives up before it asked: whoever asks later is told."""
        state = self.state
        reservation = state.reservations.get(event.reservation)
        if reservation is not None and (reservation.shared is None or event.session in reservation.writers):
            return False
        if not state.good_id(event.reservation, out) or state.live_session(event.session, out) is None:
            return True
        out.append(Aborted(event.reservation, 0))
        if reservation is None:
            state.remember_end(b"", event.reservation, shared_is_over(event.reservation))
        elif not reservation.expired:
            self._close(reservation, Skip.CALLED_OFF, out)
        return True

    def _close(self, reservation: Reservation, why: Skip, out: list[Command]) -> None:
        """Nothing more of it becomes visible: keys free, slots quarantined while somebody may still write them."""
        state = self.state
        self._withdraw(reservation, why)
        reservation.expired = True
        reservation.ended = True
        state.deadlines.note_ended()
        for session in sorted(reservation.writers):
            if not state.sessions[session].can_map:
                self.sharing.last_word(reservation, session, self._expired(reservation))
        held = len(reservation.held_slots()) if reservation.writers else 0
        out.append(ReservationEnded(reservation.reservation, reservation.session, held))
        if held:
            reservation.quarantined = True
            state.stats.slots_quarantined += held
        else:
            for session in sorted(reservation.writers):
                self.sharing.last_word(reservation, session, self._expired(reservation))
            self._finish(reservation, out)

    def _commit_expired(self, event: CommitRequested, reservation: Reservation, out: list[Command]) -> None:
        refusal = self._expired(reservation)
        self.state.stats.refused[refusal.reason] += 1
        out.append(refusal)
        if event.more:  # it may still be writing
            return
        self.sharing.last_word(reservation, event.session, refusal)
        if not reservation.writers:
            self._finish(reservation, out)

    def _settle(
        self, reservation: Reservation, whole: NDArray[np.bool_], out: list[Command]
    ) -> tuple[int, Counter[Skip]]:
        """Moves what is whole into the table. Answers how many blocks, and what was dropped why."""
        dropped: Counter[Skip] = Counter()
        stored = self._settle_patches(reservation, whole, out)
        for node, first in sorted(reservation.nodes.items(), key=lambda item: item[1]):
            stored += self._settle_node(reservation, node, whole[first : first + node.count], out)
        orphans = whole & (reservation.status == Entry.ORPHANED)
        if orphans.any():
            dropped[Skip.ORPHANED] += int(np.count_nonzero(orphans))
            self._give_back(reservation, orphans)
        return stored, dropped

    def _settle_patches(self, reservation: Reservation, whole: NDArray[np.bool_], out: list[Command]) -> int:
        fresh = reservation.fresh
        if not fresh:
            return 0
        ready = whole[:fresh] & (reservation.status[:fresh] == Entry.OPEN)
        if not ready.any():
            return 0
        space = reservation.space
        entries = np.flatnonzero(ready)
        self._unmark_patches(reservation, entries)
        gone = self._left(reservation, entries)
        reservation.status[entries[gone]] = Entry.ORPHANED
        entries = entries[~gone]
        if not len(entries):
            return 0
        self._publish_patched(reservation, entries)
        warmed = self._warm(reservation, entries)
        for part, slots in reservation.slots.items():
            here = entries[slots[entries] != NO_SLOT]
            if len(here) and space.on_disk:
                here = self._not_there(reservation, part, here)
            if len(here):
                rows = reservation.patch_rows[here]
                space.table.place(part, rows, slots[here], reservation.generation)
                self._ask_checksum(reservation, part, rows, out)
        reservation.status[entries] = Entry.SETTLED
        for node in warmed:
            self.remover.settle_warm(space, node)
        if space.on_disk:
            self.remover.reorder(space, reservation.patch_rows[entries])
        return len(entries)

    @staticmethod
    def _left(reservation: Reservation, entries: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool[n]: patched blocks that were cleared meanwhile; of a path then all count as cleared."""
        detached = any(pin.node.state == DETACHED for pin in reservation.pins)
        gone = np.full(len(entries), detached, np.bool_)
        index = reservation.space.tree.index
        if detached and reservation.space.foreign is not None and index is not None:
            nodes = [index.node_of(row) for row in reservation.patch_rows[entries].tolist()]
            gone[:] = [node is None or node.state == DETACHED for node in nodes]
        return gone

    def _warm(self, reservation: Reservation, entries: NDArray[np.int64]) -> list[Node]:
        """Patched blocks that are on disk only are in memory from now on; the nodes they are."""
        space = reservation.space
        rows = reservation.patch_rows[entries]
        if not space.cold_blocks or not (cold := space.table.cold[rows]).any():
            return []
        index = space.tree.index
        assert index is not None
        warmed = []
        left = rows[cold]
        while len(left):
            node = index.node_of(int(left[0]))
            assert node is not None  # pinned
            place, count = run_in(node, left)
            warmed.append(self.remover.warm(space, node, place, count))
            left = left[count:]
        return warmed

    def _not_there(self, reservation: Reservation, part: int, here: NDArray[np.int64]) -> NDArray[np.int64]:
        """Entries without this part; the others got it meanwhile from disk or from another worker, and their slots go
        back."""
        column = reservation.space.table.parts[part]
        there = column.slots[reservation.patch_rows[here]] != NO_SLOT
        if there.any():
            self.remover.release_slots(reservation.slots[part][here[there]])
        missing: NDArray[np.int64] = here[~there]
        return missing

    def _publish_patched(self, reservation: Reservation, entries: NDArray[np.int64]) -> None:
        """A link gets its first part: only now is anything stored under its key."""
        space = reservation.space
        if not self.state.config.publish or space.has_full:
            return
        bare = entries[~space.any_part(reservation.patch_rows[entries])]
        for entry in bare.tolist():
            block = int(reservation.blocks[entry])
            before, key = reservation.keys_at(block)
            self.state.publish(Change.STORED, space, key, before, block)

    def _unmark_patches(self, reservation: Reservation, entries: NDArray[np.int64]) -> None:
        """Others may fill these parts of these blocks again."""
        for part, busy in reservation.space.patching.items():
            if part in reservation.slots:
                granted = entries[reservation.slots[part][entries] != NO_SLOT]
                busy.difference_update(reservation.patch_rows[granted].tolist())

    def _settle_node(self, reservation: Reservation, node: Node, whole: NDArray[np.bool_], out: list[Command]) -> int:
        """Settles the leading whole blocks of one open node."""
        count = len(whole) if whole.all() else int(np.argmin(whole))
        if not count:
            return 0
        space = reservation.space
        first = reservation.nodes[node]
        if count < node.count:
            node = space.tree.split(node, count)
        del reservation.nodes[node]
        rows = node.row_array()
        for part, slots in reservation.slots.items():
            mine = slots[first : first + count]
            if part in space.optional_parts:
                here = mine != NO_SLOT
                space.table.place(part, rows[here], mine[here], reservation.generation)
            else:
                space.table.place(part, rows, mine, reservation.generation)
            self._ask_checksum(reservation, part, rows, out)
        space.table.touched[rows] = self.state.tick
        reservation.status[first : first + count] = Entry.SETTLED
        node.owner = None
        node.state = WAITING
        if space.policy.remembers:
            space.policy.stored(space, node, reservation.birth)
        self._reveal(node)
        return count

    def _reveal(self, node: Node) -> None:
        """Makes a settled node visible if its parent is, and what waited for it."""
        if node.parent is None or node.parent.state != VISIBLE:
            return
        stack = [node]
        while stack:
            top = stack.pop()
            top.state = VISIBLE
            self.state.appear(top)
            self.state.publish_blocks(Change.STORED, top)
            self._join(top)
            if top.children:
                stack.extend(child for child in top.children.values() if child.state == WAITING)
            else:
                self.remover.offer_leaf(top)

    def _join(self, node: Node) -> None:
        """Keeps paths compressed: an only child continues its parent's edge."""
        parent, space = node.parent, node.space
        if parent is None or parent.parent is None or space is None or space.foreign is not None:
            return
        if parent.children is not None and len(parent.children) == 1 and not parent.cold:
            space.tree.join(node)

    def _withdraw(self, reservation: Reservation, why: Skip) -> None:
        """Frees its keys: what is not settled leaves the tree."""
        self.state.stats.blocks_skipped[why] += reservation.open_blocks()
        while reservation.nodes:
            node = min(reservation.nodes, key=reservation.nodes.__getitem__)
            self.remover.drop_unfinished(node)
        unfinished = np.flatnonzero(reservation.status[: reservation.fresh] == Entry.OPEN)
        self._unmark_patches(reservation, unfinished)
        reservation.status[unfinished] = Entry.ORPHANED
        self.remover.unpin_all(reservation.pins)

    def _finish(self, reservation: Reservation, out: list[Command]) -> None:
        """The end: every slot it still holds comes back. Keys must be free before, and last words said."""
        state = self.state
        assert not reservation.nodes
        assert not reservation.writers
        if reservation.quarantined:
            state.stats.slots_quarantined -= len(reservation.held_slots())
        if not reservation.expired:
            reservation.ended = True
            state.deadlines.note_ended()
        self._give_back(reservation, reservation.status != Entry.SETTLED)
        self.remover.unpin_all(reservation.pins)
        del state.reservations[reservation.reservation]
        if reservation.shared is not None:
            state.remember_end(b"", reservation.reservation, shared_is_over(reservation.reservation))
        self.tell_drained(out)

    def tell_drained(self, out: list[Command]) -> None:
        """Once, when nothing is being filled any more."""
        state = self.state
        if state.draining and not state.drain_told and not state.reservations:
            state.drain_told = True
            out.append(DrainFinished())

    def _give_back(self, reservation: Reservation, entries: NDArray[np.bool_]) -> None:
        pieces = [slots[entries] for slots in reservation.slots.values()]
        slots = np.concatenate(pieces)
        reservation.status[entries] = Entry.SETTLED
        self.remover.release_slots(slots[slots != NO_SLOT])

    def _ask_checksum(self, reservation: Reservation, part: int, rows: NDArray[np.uint32], out: list[Command]) -> None:
        if not self.state.config.checksum:
            return
        space = reservation.space
        stored = rows[space.table.parts[part].slots[rows] != NO_SLOT]
        out.append(ask_checksum(space, part, stored, self.state.host_pool))

    def _expired(self, reservation: Reservation) -> Refused:
        text = "the reservation ran out before it was committed; its blocks were dropped"
        return Refused(Kind.FAILED_PRECONDITION, Refusal.RESERVATION_EXPIRED, text, reservation.reservation)

    def _own(
        self, event: CommitRequested | AbortRequested, answer: type[Committed | Aborted], out: list[Command]
    ) -> Reservation | None:
        """The reservation if this session may end it; else a refusal, or the answer that a retry missed."""
        state = self.state
        reservation = state.reservations.get(event.reservation)
        if reservation is not None and event.session in reservation.writers:
            return reservation
        outcome = state.recent_ends.get(event.session + event.reservation)
        if isinstance(outcome, (answer, Refused)):
            out.append(outcome)
        elif reservation is not None:
            text = "the reservation belongs to another session"
            state.refuse(out, Kind.PERMISSION_DENIED, Refusal.FOREIGN_SESSION, text, event.reservation)
        else:
            text = "no such reservation; it ended or never was"
            state.refuse(out, Kind.NOT_FOUND, Refusal.RESERVATION_UNKNOWN, text, event.reservation)
        return None

    def _refuse(self, kind: Kind, reason: Refusal, text: str, reservation: Reservation, out: list[Command]) -> None:
        self.state.refuse(out, kind, reason, text, reservation.reservation)
