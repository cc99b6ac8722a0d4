"""The log's format: what is written is read back, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from prefixcache_offload.disk.records import (
    ENTRY,
    HEADER,
    PAGE,
    TRAILER,
    Kind,
    footer_bytes,
    good_headers,
    headers_over,
    make_footer,
    read_footer,
    read_trailer,
    record_pages,
    same_records,
    write_headers,
)
from tests.unit.offload.disk.log import entries_of

NONCE = bytes(range(16))


def placed(count: int) -> np.ndarray:
    entries = entries_of(range(count))
    entries["segment"], entries["kind"] = 9, Kind.BLOCK
    entries["page"] = np.cumsum(record_pages(entries)) - record_pages(entries)
    return entries


def test_sizes_are_the_format() -> None:
    assert (ENTRY.itemsize, HEADER.itemsize, TRAILER.itemsize) == (128, 176, 80)
    assert record_pages(entries_of([0, 2, 3])).tolist() == [2, 2, 3]
    assert footer_bytes(32) == 2 * PAGE
    assert footer_bytes(33) == 3 * PAGE


def test_headers_come_back_and_every_flipped_bit_is_found() -> None:
    entries = placed(3)
    pages = np.zeros(3 * PAGE, np.uint8)
    write_headers(pages, entries, NONCE)
    assert good_headers(pages, NONCE).all()
    assert np.array_equal(headers_over(pages)["entry"], entries)
    for bit in range(HEADER.itemsize * 8):
        pages[PAGE + bit // 8] ^= 1 << bit % 8
        assert good_headers(pages, NONCE).tolist() == [True, False, True]
        pages[PAGE + bit // 8] ^= 1 << bit % 8
    assert not good_headers(pages, bytes(16)).any(), "another directory's"
    assert not good_headers(np.zeros(PAGE, np.uint8), bytes(16)).any()


@pytest.mark.parametrize("field", ["namespace", "length", "segment", "page", "part", "key"])
def test_a_record_is_the_one_wanted_only_if_all_of_its_name_and_place_is(field: str) -> None:
    wanted, found = placed(2), placed(2)
    assert same_records(found, wanted).all()
    found[field][1] += 1
    assert same_records(found, wanted).tolist() == [True, False]


def test_footer_comes_back_and_every_flipped_bit_is_found() -> None:
    entries = placed(40)
    end = int(record_pages(entries).sum())
    body = np.frombuffer(make_footer(entries, 9, end, NONCE), np.uint8).copy()
    size = end * PAGE + body.size
    trailer = read_trailer(body[-PAGE:], 9, size, NONCE)
    assert trailer is not None
    assert np.array_equal(read_footer(body[:-PAGE], trailer), entries)
    assert read_trailer(body[-PAGE:], 8, size, NONCE) is None, "another segment's"
    assert read_trailer(body[-PAGE:], 9, size + PAGE, NONCE) is None, "the file goes on"
    assert read_trailer(body[-PAGE:], 9, size, bytes(16)) is None, "another directory's"
    for byte in [*range(0, 40 * 128, 97), *range(body.size - PAGE, body.size - PAGE + TRAILER.itemsize)]:
        body[byte] ^= 16
        broken = read_trailer(body[-PAGE:], 9, size, NONCE)
        assert broken is None or read_footer(body[:-PAGE], broken) is None
        body[byte] ^= 16


def test_a_footer_with_records_beyond_its_own_place_is_not_believed() -> None:
    entries = placed(4)
    body = np.frombuffer(make_footer(entries, 9, 3, NONCE), np.uint8)
    trailer = read_trailer(body[-PAGE:], 9, 3 * PAGE + body.size, NONCE)
    assert trailer is not None
    assert read_footer(body[:-PAGE], trailer) is None
