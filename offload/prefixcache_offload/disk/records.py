"""The log's format: records, footers and trailers as bytes, made and judged. No file is opened here.

Everything is little-endian and 4 KiB-aligned.
- A record is one page with a `HEADER` at its start, then the payload, padded to whole pages, so that the payload can
  be read straight into a slot. It names the segment and page it lies at, so a copy of it elsewhere is not it.
- The payload is the block's bytes (`Codec.RAW`) or another form of them that takes `pages` whole pages; `length` is
  that of the block's bytes always. The digest is of the payload as it lies there.
- A footer is the array of a segment's `ENTRY`s, padded to whole pages, then one page with a `TRAILER`: the last page of
  a sealed file.
- Every header and trailer holds the directory's nonce: 16 random bytes that are in no payload, so that a worker
  cannot forge a record inside the bytes it stores.

An `ENTRY` is 128 bytes; arrays of them are the only form in which records are talked about, never an object each.
"""

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

PAGE = 4096
KEY_BYTES = 32
DIGEST_BYTES = 16
NONCE_BYTES = 16
VERSION = 1

ENTRY = np.dtype(
    [
        ("namespace", "<u8"),
        ("sequence", "<u8"),
        ("revokes", "<u8"),  # tombstones: everything named here with a smaller sequence is gone
        ("key", "u1", KEY_BYTES),
        ("parent", "u1", KEY_BYTES),
        ("digest", "u1", DIGEST_BYTES),  # xxh3-128 of the payload
        ("length", "<u4"),  # of the block's bytes; of the payload too where its codec is RAW
        ("depth", "<u4"),
        ("segment", "<u4"),
        ("page", "<u4"),  # of the header, from the segment's start
        ("part", "<u2"),
        ("group", "u1"),
        ("codec", "u1"),
        ("kind", "u1"),
        ("value_bytes", "u1"),  # size of the numbers in the payload; 0: unknown
        ("pages", "<u2"),  # of the payload, where its codec is not RAW
    ]
)
HEADER = np.dtype(
    [("magic", "<u8"), ("version", "<u4"), ("spare", "<u4"), ("nonce", "u1", 16), ("entry", ENTRY), ("check", "u1", 16)]
)
TRAILER = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("segment", "<u4"),
        ("nonce", "u1", 16),
        ("count", "<u4"),
        ("footer_page", "<u4"),
        ("file_bytes", "<u8"),
        ("footer_digest", "u1", 16),
        ("check", "u1", 16),
    ]
)
RECORD_MAGIC = int.from_bytes(b"PfxRec\r\n", "little")
TRAILER_MAGIC = int.from_bytes(b"PfxEnd\r\n", "little")

Entries = npt.NDArray[np.void]
"""ENTRY[n]."""
Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Pages = npt.NDArray[np.uint32]


class Kind(IntEnum):
    """What a record is."""

    BLOCK = 1
    TOMBSTONE = 2
    """Its payload is n x 32 bytes of keys of `namespace`; none: all of the namespace; namespace 0 and none: all."""


class Codec(IntEnum):
    """What form a payload has. A record of any other is never data: somebody newer wrote it."""

    RAW = 0
    LOSSLESS = 1


_LAST_CODEC = max(int(codec) for codec in Codec)  # there is none missing below
_RAW = int(Codec.RAW)  # numpy asks a member of an enum for a dozen names before it compares with it
MOST_CODED_PAGES = (1 << 16) - 1


def digest(data: Any) -> bytes:
    """xxh3-128 of any contiguous buffer."""
    made: bytes = xxhash.xxh3_128_digest(data)
    return made


def pages_of(size_bytes: int) -> int:
    """Whole pages that hold so many bytes."""
    return -(-size_bytes // PAGE)


def stored_bytes(entries: Entries) -> npt.NDArray[np.int64]:
    """Bytes of each payload as it lies on disk: i64[n]."""
    stored: npt.NDArray[np.int64] = entries["length"].astype(np.int64)
    coded = (entries["codec"] != _RAW) & (entries["pages"] > 0)
    if coded.any():
        stored[coded] = entries["pages"][coded].astype(np.int64) * PAGE
    return stored


def record_pages(entries: Entries) -> npt.NDArray[np.int64]:
    """Pages each record takes, header included: i64[n]."""
    return 1 + -(-stored_bytes(entries) // PAGE)


def known(entries: Entries) -> Mask:
    """bool[n]: whose payload has a form that can be read."""
    readable: Mask = entries["codec"] <= _LAST_CODEC
    return readable


def footer_bytes(count: int) -> int:
    """Bytes of footer and trailer of a segment with `count` records."""
    return PAGE * (pages_of(count * ENTRY.itemsize) + 1)


def headers_over(pages: Bytes) -> npt.NDArray[np.void]:
    """HEADER[n] at the start of each of n pages, u8[n * 4096]; a view."""
    return np.ndarray((pages.size // PAGE,), HEADER, pages, 0, (PAGE,))


def write_headers(pages: Bytes, entries: Entries, nonce: bytes) -> None:
    """Fill u8[n * 4096] with the headers of n records; the rest of each page is left as it is (zeros, by habit)."""
    headers = headers_over(pages)
    headers["magic"] = RECORD_MAGIC
    headers["version"] = VERSION
    headers["spare"] = 0
    headers["nonce"] = np.frombuffer(nonce, np.uint8)
    headers["entry"] = entries
    checked = HEADER.itemsize - DIGEST_BYTES
    for i in range(len(entries)):
        start = i * PAGE
        made = digest(pages[start : start + checked])
        pages[start + checked : start + HEADER.itemsize] = np.frombuffer(made, np.uint8)


def good_headers(pages: Bytes, nonce: bytes) -> Mask:
    """bool[n]: which of n pages begin with a whole header of this directory. Their `entry` may then be believed."""
    headers = headers_over(pages)
    good: Mask = (headers["magic"] == RECORD_MAGIC) & (headers["version"] == VERSION)
    good &= (headers["nonce"] == np.frombuffer(nonce, np.uint8)).all(axis=1)
    checked = HEADER.itemsize - DIGEST_BYTES
    for i in np.flatnonzero(good):
        start = int(i) * PAGE
        good[i] = digest(pages[start : start + checked]) == headers["check"][i].tobytes()
    return good


def same_records(found: Entries, wanted: Entries) -> Mask:
    """bool[n]: the record found is the one wanted, by place, name, length and form."""
    same: Mask = np.ones(len(wanted), np.bool_)
    for name in ("namespace", "length", "segment", "page", "part", "codec", "pages"):
        same &= found[name] == wanted[name]
    same &= (found["key"] == wanted["key"]).all(axis=1)
    return same


def make_footer(entries: Entries, segment: int, footer_page: int, nonce: bytes) -> bytearray:
    """Footer and trailer of a segment whose records end before `footer_page`; whole pages."""
    body = bytearray(footer_bytes(len(entries)))
    raw = entries.tobytes()
    body[: len(raw)] = raw
    trailer = np.zeros(1, TRAILER)
    trailer["magic"], trailer["version"], trailer["segment"] = TRAILER_MAGIC, VERSION, segment
    trailer["nonce"] = np.frombuffer(nonce, np.uint8)
    trailer["count"], trailer["footer_page"] = len(entries), footer_page
    trailer["file_bytes"] = footer_page * PAGE + len(body)
    trailer["footer_digest"] = np.frombuffer(digest(raw), np.uint8)
    signed = trailer.tobytes()[:-DIGEST_BYTES]
    body[-PAGE : TRAILER.itemsize - PAGE] = signed + digest(signed)
    return body


def read_trailer(page: Bytes, segment: int, file_bytes: int, nonce: bytes) -> np.void | None:
    """The TRAILER in a file's last page, u8[4096], or None unless it is whole and this file's own."""
    raw = page[: TRAILER.itemsize].tobytes()
    if digest(raw[:-DIGEST_BYTES]) != raw[-DIGEST_BYTES:]:
        return None
    trailer = np.frombuffer(raw, TRAILER)[0]
    ours = trailer["magic"] == TRAILER_MAGIC and trailer["version"] == VERSION and trailer["nonce"].tobytes() == nonce
    length = int(trailer["footer_page"]) * PAGE + footer_bytes(int(trailer["count"]))
    fits = trailer["segment"] == segment and int(trailer["file_bytes"]) == file_bytes == length
    return trailer if ours and fits else None


def read_footer(raw: Bytes, trailer: np.void) -> Entries | None:
    """ENTRY[count] out of the footer's bytes, or None if they are not what the trailer says."""
    size = int(trailer["count"]) * ENTRY.itemsize
    body = raw[:size]
    if body.size != size or digest(body) != trailer["footer_digest"].tobytes():
        return None
    entries = np.frombuffer(body.tobytes(), ENTRY)
    ends = entries["page"].astype(np.int64) + record_pages(entries)
    sound = (entries["segment"] == trailer["segment"]).all() and (ends <= int(trailer["footer_page"])).all()
    return entries if sound else None
