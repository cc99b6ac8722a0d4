"""Rebuilds what is on disk after a restart: a few segments at a time, newest first, from footers where they are good.

Newest first makes an answer final at once: a tombstone lies behind everything it revokes, so no segment that is still
unread can revoke a record that was told. Of two records of one name the newer is told, the other counted. Whether a
block can be served (is its whole chain known) is for the caller to say; `orphans` helps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache_offload.disk.footers import Footer, Footers, read_piece
from prefixcache_offload.disk.records import (
    ENTRY,
    KEY_BYTES,
    PAGE,
    Bytes,
    Entries,
    Kind,
    Mask,
    digest,
    good_headers,
    headers_over,
    known,
    pages_of,
)
from prefixcache_offload.disk.scan import scan
from prefixcache_offload.disk.seen import Seen
from prefixcache_offload.disk.segments import Segment, Stage
from prefixcache_offload.disk.shared import Shared
from prefixcache_offload.disk.tail import seal_file
from prefixcache_offload.disk.tombstones import Tombstone

_SCAN_PATIENCE = 12.0
"""A whole segment may take so many times as long as a read before it counts as hanging."""

_AT_ONCE = 8
"""Segments that are judged together, where so many have been read."""
Owners = npt.NDArray[np.int64]

# Comparing an array with an enum member costs more than the comparison.
_BLOCK, _TOMBSTONE = int(Kind.BLOCK), int(Kind.TOMBSTONE)


class Recovered(NamedTuple):
    """entries: ENTRY[n] of the blocks of some segments, newest first. left: segments still unread."""

    segments: list[int]
    entries: Entries
    left: int


@dataclass
class RecoveryCounters:
    """What a restart found."""

    segments: int = 0
    records: int = 0
    scanned: int = 0
    """Segments without a good footer."""
    torn: int = 0
    holes: int = 0
    revoked: int = 0
    superseded: int = 0
    unknown_codec: int = 0
    """Records in a form that this version cannot read; they stay until their segment's room is needed."""
    unreadable: int = 0
    """Segments that could not be read now; they stay, take room, and can be freed."""
    emptied: int = 0
    """Segments in which nothing was left; their files are gone."""


class Recovery:
    """One pass over the segments of earlier runs. Run it on one thread; reads, writes and freeing go on beside it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._seen = Seen()
        self._sealed = False
        """Whether the segment now in hand has a good footer."""
        self.counters = RecoveryCounters()

    def __iter__(self) -> Iterator[Recovered]:
        shared = self._shared
        with shared.lock:
            found = [s.number for s in shared.table.by_number.values() if s.stage is Stage.FOUND]
        found.sort()
        with Footers(shared) as footers:
            while found or footers.waiting:
                while found and not footers.enough:
                    footers.ask(found.pop())
                if not footers.waiting:
                    continue
                with footers.next(_AT_ONCE) as taken:
                    yield from self._told(taken, len(found) + footers.waiting)

    def _told(self, taken: list[Footer], behind: int) -> Iterator[Recovered]:
        """Some held segments, with so many unread behind them."""
        left = len(taken) + behind
        for some in _without_waiting(taken):
            entries = self._judged([(footer.segment, self._read(footer)) for footer in some])
            left -= len(some)
            yield Recovered([footer.segment.number for footer in some], entries, left)

    def _read(self, footer: Footer) -> Entries | None:
        """What is in a held segment, newest sequence first; None if that cannot be read now."""
        segment = footer.segment
        self.counters.segments += 1
        self._sealed = False
        entries: Entries | None = None
        try:
            entries = self._entries(footer)
            self._learn_tombstones(segment, entries)
        except OSError:
            self.counters.unreadable += 1
            entries = None
        with self._shared.lock:
            if segment.stage is Stage.FOUND:
                segment.stage = Stage.SEALED if self._sealed and entries is not None else Stage.UNSEALED
            if entries is None or not len(entries):
                return entries
            sequences = entries["sequence"]
            segment.first_sequence = int(sequences.min())
        if (sequences[1:] > sequences[:-1]).all():
            return entries[::-1]
        return entries[np.argsort(sequences, kind="stable")[::-1]]

    def _judged(self, read: list[tuple[Segment, Entries | None]]) -> Entries:
        """The live blocks of some held segments, newest first: together, as each step costs as much for all of them as
        for one. What an older one clears lies before all that is in a newer one, so its tombstones do no harm there."""
        pieces = [entries if entries is not None else np.zeros(0, ENTRY) for _, entries in read]
        every = np.concatenate(pieces)
        owner = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        every, owner = _only(every, owner, every["kind"] == _BLOCK)
        self.counters.records += len(every)
        readable = known(every)
        self.counters.unknown_codec += int((~readable).sum())
        every, owner = _only(every, owner, readable)
        with self._shared.lock:
            revoked = self._shared.tombstones.revoked(every)
            every, owner = _only(every, owner, ~revoked)
            new = self._seen.add_new(every)
            every, owner = _only(every, owner, new)
            cuts = np.searchsorted(owner, np.arange(1, len(pieces)))
            left = np.split(every, cuts)
            for (segment, _), mine in zip(read, left, strict=True):
                segment.note(mine)
        self.counters.revoked += int(revoked.sum())
        self.counters.superseded += int((~new).sum())
        for segment, entries in read:
            if entries is not None and not len(entries):
                self._remove(segment)
        return every

    def _entries(self, footer: Footer) -> Entries:
        """From the footer, or from a scan; the segment is sealed after that if it can be. Raises OSError."""
        shared, segment = self._shared, footer.segment
        if footer.failed is not None:
            raise footer.failed
        if footer.entries is not None:
            self._sealed = True
            return footer.entries
        self.counters.scanned += 1
        with shared.calling(patience=_SCAN_PATIENCE):
            found = scan(shared.disk, shared.table.fd(segment), segment.number, shared.directory.nonce)
        self.counters.torn += found.torn
        self.counters.holes += found.holes
        if len(found.entries):
            self._seal(segment, found.entries, found.end_page)
        return found.entries

    def _seal(self, segment: Segment, entries: Entries, end_page: int) -> None:
        """Spare the next start the scan; where that fails (read-only, full), it scans again."""
        shared = self._shared
        try:
            size = seal_file(shared, segment, entries, end_page)
        except OSError:
            shared.counters.seals_failed += 1
            return
        with shared.lock:
            shared.table.resized(segment, size)
        self._sealed = True

    def _learn_tombstones(self, segment: Segment, entries: Entries) -> None:
        """Read the payloads of a segment's tombstones and put them in force. Raises OSError."""
        for entry in entries[entries["kind"] == _TOMBSTONE]:
            length = int(entry["length"])
            raw = read_piece(self._shared, segment, int(entry["page"]) * PAGE, PAGE * (1 + pages_of(length)))
            payload = raw[PAGE : PAGE + length]
            if raw.size < PAGE or not self._same(raw[:PAGE], entry) or digest(payload) != entry["digest"].tobytes():
                # What it named is lost: better to forget the whole namespace than to bring back what was cleared.
                self.counters.torn += 1
                payload = payload[:0]
            keys = payload.reshape(-1, KEY_BYTES).copy()
            with self._shared.lock:
                self._shared.tombstones.add(
                    Tombstone(int(entry["revokes"]), int(entry["namespace"]), keys, segment.number)
                )

    def _same(self, page: Bytes, entry: np.void) -> bool:
        return bool(good_headers(page, self._shared.directory.nonce)[0]) and headers_over(page)["entry"][0] == entry

    def _remove(self, segment: Segment) -> None:
        """Nothing is in it: give its room back."""
        with self._shared.lock:
            self._shared.table.remove(segment)
        try:
            self._shared.table.unlink(segment)
        except OSError:
            self._shared.counters.files_left += 1
        self.counters.emptied += 1


def _without_waiting(footers: list[Footer]) -> list[list[Footer]]:
    """Cut in front of each that more has to be read of, which may hang: what is newer is told first."""
    groups: list[list[Footer]] = []
    for footer in footers:
        entries = footer.entries
        waits = entries is None or bool((entries["kind"] == _TOMBSTONE).any())
        if waits or not groups:
            groups.append([])
        groups[-1].append(footer)
    return groups


def _only(entries: Entries, owner: Owners, mask: Mask) -> tuple[Entries, Owners]:
    """Both at the mask, without the copy in the usual case that it is all of them."""
    return (entries, owner) if mask.all() else (entries[mask], owner[mask])
