"""A load: blocks on their way back from disk, for one or several leases; and how much of a path a lease is to wait for.

Rules: its slots are its own until it placed them or gave them back. What it knows of a record is how its read ended.
Must not know: what is worth loading, what becomes of what came.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.commands import Records
from prefixcache.core.events import ReadEnd
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, Rows, Slots
from prefixcache.core.leases import Lease
from prefixcache.core.namespaces import Namespace
from prefixcache.core.radix import Pin
from prefixcache.core.reasons import Miss
from prefixcache.core.table import NO_SEGMENT

NOT_READ = 255
"""Stands for a `ReadEnd` until there is one."""

Mask = NDArray[np.bool_]
Found = tuple[Rows, NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint8]]
"""Rows, their numbers in their paths, their keys and those in front of them (u8[n, 32] each)."""


def found_in_path(rows: Rows, depths: NDArray[np.int64], keys: bytes) -> Found:
    """Some rows of one path, whose packed keys are `keys`."""
    packed = np.frombuffer(bytes(KEY_BYTES) + keys, np.uint8).reshape(-1, KEY_BYTES)
    return rows, depths, packed[depths + 1], packed[depths]


class Load:
    """One ReadRecords under way: rows in the order of their path, of each some parts.

    slots: per part u32[rows], NO_SLOT where that part is not read; ends: per part u8[rows]; left: u8[rows], parts
    still to come; front: rows before it are settled."""

    __slots__ = (
        "cancelled", "ends", "front", "generation", "kept", "left", "lost", "number", "owner", "pins", "records",
        "rows", "slots", "space", "waiters", "waits",
    )  # fmt: skip

    def __init__(self, number: int, space: Namespace, found: Found, slots: dict[int, Slots], generation: int) -> None:
        rows = found[0]
        self.number = number
        self.space = space
        self.rows = rows
        self.slots = slots
        self.generation = generation
        self.pins: list[Pin] = []
        self.waiters: list[Lease] = []
        self.ends = {part: np.full(len(rows), NOT_READ, np.uint8) for part in slots}
        chosen = np.stack([each != NO_SLOT for each in slots.values()], axis=1)
        self.owner, column = np.nonzero(chosen)  # block by block, part by part
        self.left: NDArray[np.uint8] = chosen.sum(axis=1, dtype=np.uint8)
        self.front = 0
        self.cancelled = False
        self.kept = False  # it goes on although no lease waits for it
        self.lost = False  # some record was not there, or not whole
        self.waits = False  # the row at `front` can only be settled after another load has
        self.records = self._records(np.fromiter(slots, np.uint16)[column], found)

    def _records(self, parts: NDArray[np.uint16], found: Found) -> Records:
        """What is to be read."""
        space, owner = self.space, self.owner
        slots, segments, pages = (np.empty(len(owner), np.uint32) for _ in range(3))
        for part, column in enumerate(space.table.parts):
            mine = np.flatnonzero(parts == part)
            if len(mine):
                rows = self.rows[owner[mine]]
                slots[mine] = self.slots[part][owner[mine]]
                segments[mine], pages[mine] = column.segments[rows], column.pages[rows]
        assert (segments != NO_SEGMENT).all()
        _, depths, keys, parents = (each[owner] for each in found)
        packed = keys.tobytes(), parents.tobytes(), depths.astype(np.uint32)
        return Records(space.number, parts, self.rows[owner], slots, segments, pages, *packed)

    def held_slots(self) -> Slots:
        """Slots that are still its own."""
        mine: Slots = np.concatenate([slots[self.front :] for slots in self.slots.values()])
        held: Slots = mine[mine != NO_SLOT]
        return held

    def names(self, which: slice) -> list[tuple[int, int]]:
        """(row, part) of everything it reads of some rows."""
        rows = self.rows[which]
        return [(row, part) for part, slots in self.slots.items() for row in rows[slots[which] != NO_SLOT].tolist()]

    @property
    def open_records(self) -> int:
        return int(self.left.sum())

    @property
    def size_bytes(self) -> int:
        sizes = [part.size_bytes for part in self.space.spec.parts]
        return sum(sizes[part] * int(np.count_nonzero(slots != NO_SLOT)) for part, slots in self.slots.items())

    def note(self, index: NDArray[np.uint32], ends: NDArray[np.uint8]) -> None:
        """How the reads of some records ended."""
        np.subtract.at(self.left, self.owner[index], 1)
        parts = self.records.parts[index]
        for part, known in self.ends.items():
            mine = parts == part
            known[self.owner[index[mine]]] = ends[mine]
        self.lost |= bool((ends == int(ReadEnd.LOST)).any())


class Wish:
    """What of a path is to be promised: `end` blocks, of which `cold` (bool[end - first]) are not in memory now; `stop`
    says why it is not the `top` blocks that are stored."""

    __slots__ = ("cold", "end", "eta_s", "loads", "stop", "top")

    def __init__(self, end: int) -> None:
        self.end = self.top = end
        self.cold: Mask | None = None
        self.stop: Miss | None = None
        self.eta_s = 0.0
        self.loads: list[Load] = []

    def cut(self, end: int, why: Miss) -> None:
        """It is to be less, if it is more."""
        if end < self.end:
            self.end, self.stop = end, why

    def give(self, lease: Lease) -> None:
        """The lease waits for these loads."""
        if self.cold is not None:
            lease.cold = self.cold
            lease.loads = self.loads
            for load in self.loads:
                load.waiters.append(lease)
