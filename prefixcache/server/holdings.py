"""What slots each lease and reservation has, for the calls that move bytes through the server.

Filled from the planner's answers and emptied by its orders, always inside the owner's lock, so it never knows a
lease that the planner has ended. It must not decide anything.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from prefixcache.core.commands import Acquired, Arrived, Reserved
from prefixcache.core.ids import NO_SLOT
from prefixcache.core.reasons import Miss
from prefixcache.server.layouts import Namespace
from prefixcache.server.sessions import Session


class Lease:
    """A lease: what was acquired, by which session. `tail`: the last key asked for, which names the whole prompt.

    ready_end: blocks from block 0 that can be read by now, in `runs` (of opaque keys how many, wherever they stand);
    `stop`: why the rest will not come; `done`: nothing more will be told. Whoever wants to know adds a call to
    `listeners`, quick and without exceptions."""

    __slots__ = ("acquired", "done", "listeners", "namespace", "ready_end", "runs", "session", "stop", "tail")

    def __init__(self, session: bytes, namespace: Namespace, acquired: Acquired, tail: bytes) -> None:
        self.session = session
        self.namespace = namespace
        self.acquired = acquired
        self.tail = tail
        self.runs = acquired.runs
        self.ready_end = acquired.from_block + acquired.ready_blocks
        self.stop: Miss | None = None
        self.done = acquired.ready_blocks == acquired.planned_blocks
        self.listeners: list[Callable[[], None]] = []

    @property
    def places_end(self) -> int:
        """Behind the last block that can be read by now."""
        present = self.acquired.present
        return self.ready_end if present is None else self.acquired.from_block + len(present)

    def arrived(self, news: Arrived) -> None:
        """More of it can be read, or nothing more will come."""
        self.runs += news.runs
        self.ready_end = self.acquired.from_block + news.ready_blocks
        self.stop, self.done = news.stop, news.done
        self._tell()

    def ended(self, why: Miss) -> None:
        """It is over, whoever still waits."""
        if not self.done:
            self.stop, self.done = why, True
            self._tell()

    def _tell(self) -> None:
        for listener in list(self.listeners):
            listener()


class Reservation:
    """A reservation: where each (part, block) goes, and which byte ranges came through the server so far.

    writers: sessions that may still write it, by id; shared: others may join them."""

    __slots__ = ("_reserved", "_slots", "namespace", "shared", "writers", "written")

    def __init__(self, namespace: Namespace, reserved: Reserved, *, shared: bool) -> None:
        self.shared = shared
        self.writers: dict[bytes, Session] = {}
        self.namespace = namespace
        self.written: dict[tuple[int, int], Ranges] = {}
        self._reserved = reserved
        self._slots: dict[tuple[int, int], tuple[int, int]] | None = None

    @property
    def blocks(self) -> npt.NDArray[np.uint32]:
        """Granted blocks, u32[n], ascending."""
        return self._reserved.blocks

    @property
    def slots(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(pool, slot) by (part, block); made when first asked for, as workers that map the pools never need it."""
        if self._slots is None:
            blocks = self._reserved.blocks.tolist()
            self._slots = {}
            for grant in self._reserved.grants:
                granted = np.flatnonzero(grant.slots != NO_SLOT).tolist()
                self._slots |= {(grant.part, blocks[at]): (grant.pool, int(grant.slots[at])) for at in granted}
        return self._slots

    def wrote(self, part: int, block: int, start: int, end: int) -> None:
        """Bytes [start, end) of that part came."""
        self.written.setdefault((part, block), Ranges()).add(start, end)

    def is_written(self, part: int, block: int, start: int, end: int) -> bool:
        """Whether all bytes [start, end) of that part came."""
        ranges = self.written.get((part, block))
        return ranges is not None and ranges.covers(start, end)


class Ranges:
    """A set of byte ranges, joined where they touch. Few ranges are ever in it: writers go front to back."""

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> None:
        """Add [start, end)."""
        joined = []
        for low, high in self._ranges:
            if high < start or low > end:
                joined.append((low, high))
            else:
                start, end = min(start, low), max(end, high)
        joined.append((start, end))
        self._ranges = sorted(joined)

    def covers(self, start: int, end: int) -> bool:
        """Whether all of [start, end) is in it."""
        return any(low <= start and end <= high for low, high in self._ranges)


class Holdings:
    """Leases and reservations by id."""

    def __init__(self) -> None:
        self.leases: dict[bytes, Lease] = {}
        self.reservations: dict[bytes, Reservation] = {}
        self._quarantined: dict[bytes, Reservation] = {}

    def leased(self, session: bytes, namespace: Namespace, acquired: Acquired, tail: bytes) -> Lease:
        """A lease was granted; the lease as it was granted first, which a repeated call does not change."""
        lease = self.leases.get(acquired.lease)
        if lease is None:
            lease = self.leases[acquired.lease] = Lease(session, namespace, acquired, tail)
        return lease

    def reserved(
        self, session: Session, namespace: Namespace, reserved: Reserved, *, shared: bool = False
    ) -> None:  # fmt: skip
        """A reservation was granted, to a further session or again (a repeated call changes nothing)."""
        known = self.reservations.get(reserved.reservation)
        if known is None:
            known = self.reservations[reserved.reservation] = Reservation(namespace, reserved, shared=shared)
        known.writers[session.id] = session

    def ran_out(self, reservation: bytes, held_slots: int) -> None:
        """A reservation's time or session is over; `held_slots` of it wait for the last words of its writers."""
        ended = self.reservations.pop(reservation, None)
        if ended is not None and held_slots:
            ended.writers = {key: session for key, session in ended.writers.items() if session.can_map}
            self._quarantined[reservation] = ended

    def aborting_session(self, reservation: bytes, session: Session) -> bytes:
        """In whose name `session` may abort: another session's of its process, where only a last word is missing.

        A worker that lost its connection has no other way to say that it writes there no more.
        """
        held = self._quarantined.get(reservation)
        if held is not None and session.process and session.id not in held.writers:
            for writer, its in held.writers.items():
                if its.process == session.process:
                    return writer
        return session.id

    def aborted(self, reservation: bytes, session: bytes) -> None:
        """This session gave it up, so it is over for all; other writers may still have to say so."""
        self.reservations.pop(reservation, None)
        self.last_word(reservation, session)

    def last_word(self, reservation: bytes, session: bytes) -> None:
        """This session writes there no more."""
        for held in (self.reservations, self._quarantined):
            if (found := held.get(reservation)) is not None:
                found.writers.pop(session, None)
        quarantined = self._quarantined.get(reservation)
        if quarantined is not None and not quarantined.writers:
            del self._quarantined[reservation]

    def ended(self, reservation: bytes) -> None:
        """A reservation has ended for good."""
        self.reservations.pop(reservation, None)
        self._quarantined.pop(reservation, None)

    def process_exited(self, session: bytes) -> None:
        """Nothing of this session waits any more."""
        for reservation in [key for key, each in self._quarantined.items() if session in each.writers]:
            self.last_word(reservation, session)

    def count_by_session(self) -> tuple[dict[bytes, int], dict[bytes, int]]:
        """(leases, reservations) of each session that has any."""
        leases: dict[bytes, int] = {}
        reservations: dict[bytes, int] = {}
        for lease in list(self.leases.values()):
            leases[lease.session] = leases.get(lease.session, 0) + 1
        for reservation in list(self.reservations.values()):
            for writer in list(reservation.writers):
                reservations[writer] = reservations.get(writer, 0) + 1
        return leases, reservations
