"""Who may write a reservation: the session that asked, or several that share it (the ranks of one engine).

Rules: those who share ask for the same under the same id, in any order, and get the same answer. Each writes heads that
no other writes, commits them, and says with its last commit, or an abort, that it writes no more. It is over when all
is written and all who joined have said so; what is given up by one, or misses its time, is given up for all. What came
of it is remembered for those who come too late.
Must not know: how slots are found, what a commit makes visible.
"""

from __future__ import annotations

from prefixcache.core.commands import Command, Refused
from prefixcache.core.events import ReserveRequested
from prefixcache.core.ids import ReservationId, SessionId
from prefixcache.core.namespaces import Namespace
from prefixcache.core.reasons import Kind, Refusal
from prefixcache.core.reservations import Reservation
from prefixcache.core.state import Outcome, Session, State


class Sharing:
    """The writers of reservations: how they come, and how each goes."""

    def __init__(self, state: State) -> None:
        self.state = state

    def known(self, event: ReserveRequested, session: Session, space: Namespace, out: list[Command]) -> bool:
        """Answers a Reserve under an id that is or was in use: a retry, a further writer, or a mistake."""
        state = self.state
        reservation = state.reservations.get(event.reservation)
        if reservation is None:
            return event.shared and self._came_too_late(event, out)
        alive = reservation.space is space and not reservation.expired
        if alive and event.session in reservation.writers:
            out.append(reservation.reply)
        elif alive and self._may_join(event, reservation):
            if self.has_room(session, event, out):
                reservation.writers.add(session.session)
                session.reservations[event.reservation] = reservation
                out.append(reservation.reply)
        elif reservation.shared is not None and event.shared and reservation.expired:
            self._refuse(shared_is_over(event.reservation), out)
        else:
            text = "this reservation id is in use for something else, or has expired"
            state.refuse(out, Kind.ALREADY_EXISTS, Refusal.RESERVATION_TAKEN, text, event.reservation)
        return True

    def has_room(self, session: Session, event: ReserveRequested, out: list[Command]) -> bool:
        """Whether the session may have one more reservation, else a refusal."""
        most = self.state.limits.max_reservations_per_session
        if len(session.reservations) < most:
            return True
        text = f"a session holds at most {most} reservations"
        self.state.refuse(out, Kind.RESOURCE_EXHAUSTED, Refusal.TOO_MANY, text, event.reservation)
        return False

    def last_word(self, reservation: Reservation, session_id: SessionId, outcome: Outcome) -> None:
        """The session writes there no more; a retry of what it said is told the same outcome."""
        state = self.state
        session = state.sessions[session_id]
        reservation.writers.discard(session_id)
        del session.reservations[reservation.reservation]
        if session.ended and not session.reservations:
            del state.sessions[session_id]
        state.remember_end(session_id, reservation.reservation, outcome)

    def _may_join(self, event: ReserveRequested, reservation: Reservation) -> bool:
        asked = reservation.shared
        if asked is None or not event.shared or event.session + event.reservation in self.state.recent_ends:
            return False
        wanted = (event.keys, event.from_block, event.part_mask)
        return wanted == (asked.keys, asked.from_block, asked.part_mask)

    def _came_too_late(self, event: ReserveRequested, out: list[Command]) -> bool:
        outcome = self.state.recent_ends.get(event.reservation)
        if outcome is None:
            return False
        if isinstance(outcome, Refused):
            self._refuse(outcome, out)
        else:
            out.append(outcome)
        return True

    def _refuse(self, refusal: Refused, out: list[Command]) -> None:
        self.state.stats.refused[refusal.reason] += 1
        out.append(refusal)


def shared_is_over(reservation: ReservationId) -> Refused:
    """What those are told who come to a shared reservation too late."""
    text = "the shared reservation is over: filled, given up by one of its writers, or out of time"
    return Refused(Kind.FAILED_PRECONDITION, Refusal.RESERVATION_EXPIRED, text, reservation)
