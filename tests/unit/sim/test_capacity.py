"""Capacities as shares, blocks and bytes."""

from __future__ import annotations

import pytest

from prefixcache.sim.capacity import capacity_blocks


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("0.05", 50), (".05", 50), ("1.0", 1000), ("1.", 1000), ("5e-2", 50), ("0.0019", 1),
        ("1", 1), (" 2000 ", 2000), ("4KiB", 8), ("1.5KiB", 3), ("2kb", 3),
    ],
)  # fmt: skip
def test_what_people_write(text: str, blocks: int) -> None:
    assert capacity_blocks(text, 1000, 512) == blocks


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1.5", "is no share"), ("0.0", "is no share"), ("0.0001", "holds no block"), ("0", "holds no block"),
        ("100B", "holds no block"), ("lots", "a size such as 4GiB"), ("-3", "a size such as 4GiB"), ("", "a size such"),
    ],
)  # fmt: skip
def test_what_cannot_be(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        capacity_blocks(text, 1000, 512)


def test_bytes_need_the_size_of_a_block() -> None:
    with pytest.raises(ValueError, match="--block-bytes"):
        capacity_blocks("4GiB", 1000, None)
