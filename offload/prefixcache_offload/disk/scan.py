"""Reads a segment from end to end when it has no good footer, and finds every whole record in it.

A place without a good header is stepped over a page at a time: writes of several threads finish in any order, so behind
a record that was cut off there may be whole ones. Payloads are checked here, because the last ones may be torn.
"""

from typing import NamedTuple

import numpy as np

from prefixcache_offload.disk.records import (
    ENTRY,
    PAGE,
    RECORD_MAGIC,
    Bytes,
    Entries,
    digest,
    good_headers,
    headers_over,
    pages_of,
    stored_bytes,
)
from prefixcache_offload.disk.seam import Disk, read_fully, scratch

_WINDOW_BYTES = 8 << 20
_WORDS_PER_PAGE = PAGE // 8


class Scanned(NamedTuple):
    """entries: ENTRY[n] in order of place. torn: headers whose payload is not whole. end_page: behind the last record,
    whole or torn. holes: places where bytes other than zero lay that are no record."""

    entries: Entries
    torn: int
    holes: int
    end_page: int


class _Window:
    """A file seen through one large read at a time."""

    def __init__(self, disk: Disk, fd: int, file_bytes: int) -> None:
        self._disk, self._fd = disk, fd
        self.pages = file_bytes // PAGE
        self._first = 0
        self._data: Bytes = np.zeros(0, np.uint8)
        self._buffer = scratch(_WINDOW_BYTES)

    def get(self, page: int, count: int) -> Bytes:
        """u8 of `count` pages from `page`, fewer at the end of the file. Raises OSError."""
        have = self._data.size // PAGE
        if not self._first <= page or page + count > self._first + have:
            self._load(page, count)
        start = (page - self._first) * PAGE
        return self._data[start : start + count * PAGE]

    def loaded_from(self, page: int) -> Bytes:
        """What is at hand from `page` on; at least one page unless the file ends."""
        self.get(page, 1)
        return self._data[(page - self._first) * PAGE :]

    def _load(self, page: int, count: int) -> None:
        count = min(max(count, _WINDOW_BYTES // PAGE), self.pages - page)
        if count * PAGE > self._buffer.nbytes:
            self._buffer = scratch(count * PAGE)
        got = read_fully(self._disk, self._fd, [self._buffer[: count * PAGE]], page * PAGE)
        self._first = page
        self._data = np.frombuffer(self._buffer, np.uint8)[: got // PAGE * PAGE]


def scan(disk: Disk, fd: int, segment: int, nonce: bytes) -> Scanned:
    """Find the records of an open segment file. Raises OSError."""
    window = _Window(disk, fd, disk.size(fd))
    found: list[Entries] = []
    torn = holes = page = end = 0
    in_hole = False
    while page < window.pages:
        head = window.get(page, 1)
        if head.size < PAGE:
            break
        entry = _entry_at(head, segment, page, nonce)
        if entry is None:
            next_page, dirty = _next_candidate(window, page)
            holes += dirty and not in_hole
            in_hole = dirty
            page = next_page
            continue
        in_hole = False
        length = int(stored_bytes(entry)[0])
        payload = window.get(page + 1, pages_of(length))[:length]
        if payload.size == length and digest(payload) == entry["digest"][0].tobytes():
            found.append(entry)
        else:
            torn += 1
        page += 1 + pages_of(length)
        end = min(page, window.pages)
    entries = np.concatenate(found) if found else np.zeros(0, ENTRY)
    return Scanned(entries, torn, holes, end)


def _entry_at(head: Bytes, segment: int, page: int, nonce: bytes) -> Entries | None:
    """ENTRY[1] if a good record of this very place begins here."""
    if not good_headers(head, nonce)[0]:
        return None
    entry: Entries = headers_over(head)["entry"].copy()
    here = int(entry["segment"][0]) == segment and int(entry["page"][0]) == page
    return entry if here else None


def _next_candidate(window: _Window, page: int) -> tuple[int, bool]:
    """(the next page that may begin a record, whether the page itself held anything)."""
    data = window.loaded_from(page)
    first_words = data.view("<u8")[::_WORDS_PER_PAGE]
    later = np.flatnonzero(first_words[1:] == RECORD_MAGIC)
    step = int(later[0]) + 1 if later.size else first_words.size
    return page + max(step, 1), bool(data[: step * PAGE].any())
