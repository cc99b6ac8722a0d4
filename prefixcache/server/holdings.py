"""What slots each lease and reservation has, for the calls that move bytes through the server.

Filled from the planner's answers and emptied by its orders, always inside the owner's lock, so it never knows a lease that
the planner has ended. It must not decide anything.
"""

from dataclasses import dataclass, field

import numpy as np

from prefixcache.core.commands import Acquired, Grant, Reserved
from prefixcache.core.ids import NO_SLOT
from prefixcache.server.layouts import Namespace


@dataclass(slots=True, eq=False)
class Lease:
    """A lease: what was acquired, by which session."""

    session: bytes
    namespace: Namespace
    acquired: Acquired


@dataclass(slots=True, eq=False)
class Reservation:
    """A reservation: where each (part, block) goes, and which byte ranges came through the server so far."""

    session: bytes
    namespace: Namespace
    blocks: list[int]
    slots: dict[tuple[int, int], int]
    pools: dict[int, int]
    generation: int
    expires_at: float
    written: dict[tuple[int, int], "Ranges"] = field(default_factory=dict)


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

    def leased(self, session: bytes, namespace: Namespace, acquired: Acquired) -> None:
        """A lease was granted."""
        self.leases[acquired.lease] = Lease(session, namespace, acquired)

    def reserved(self, session: bytes, namespace: Namespace, reserved: Reserved) -> None:
        """A reservation was granted (or granted again: a repeated call changes nothing)."""
        if reserved.reservation in self.reservations:
            return
        blocks = reserved.blocks.tolist()
        slots: dict[tuple[int, int], int] = {}
        for grant in reserved.grants:
            slots.update(_slots_of(grant, blocks))
        pools = {grant.part: grant.pool for grant in reserved.grants}
        self.reservations[reserved.reservation] = Reservation(
            session, namespace, blocks, slots, pools, reserved.generation, reserved.expires_at
        )

    def count_by_session(self) -> tuple[dict[bytes, int], dict[bytes, int]]:
        """(leases, reservations) of each session that has any."""
        leases: dict[bytes, int] = {}
        reservations: dict[bytes, int] = {}
        for lease in list(self.leases.values()):
            leases[lease.session] = leases.get(lease.session, 0) + 1
        for reservation in list(self.reservations.values()):
            reservations[reservation.session] = reservations.get(reservation.session, 0) + 1
        return leases, reservations


def _slots_of(grant: Grant, blocks: list[int]) -> dict[tuple[int, int], int]:
    granted = np.flatnonzero(grant.slots != NO_SLOT)
    return {(grant.part, blocks[place]): int(grant.slots[place]) for place in granted.tolist()}
