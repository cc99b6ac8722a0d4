"""How much a simulated cache holds, as people write it.

Rules: `0.05` is a share of the trace's unique blocks, `2000` is blocks, `4GiB` is bytes (and needs the size of a
block). Must not know: policies.
"""

from __future__ import annotations

import re
from typing import Final

from prefixcache.server.units import parse_size

_SHARE: Final = re.compile(r"\d*\.\d+|\d+\.\d*|\d+(\.\d*)?[eE]-\d+")
_BLOCKS: Final = re.compile(r"\d+")


def capacities_blocks(
    texts: str, unique_blocks: int, block_bytes: int | None, *, or_none: bool = False
) -> tuple[int, ...]:
    """Capacities with commas between, each once. or_none: `0` stands for nothing. Raises ValueError, also where there
    is none."""
    blocks = [
        0 if or_none and text.strip() == "0" else capacity_blocks(text, unique_blocks, block_bytes)
        for text in texts.split(",")
        if text.strip()
    ]
    if not blocks:
        raise ValueError("names none")
    return tuple(dict.fromkeys(blocks))


def capacity_blocks(text: str, unique_blocks: int, block_bytes: int | None) -> int:
    """Whole blocks of a capacity. Raises ValueError for one that is not understood or holds no block."""
    text = text.strip()
    if _SHARE.fullmatch(text):
        share = float(text)
        if not 0 < share <= 1:
            raise ValueError(
                f"{text} is no share: shares are above 0 and at most 1; blocks are written without a point"
            )
        blocks = int(unique_blocks * share)
    elif _BLOCKS.fullmatch(text):
        blocks = int(text)
    else:
        size_bytes = parse_size(text)
        if block_bytes is None:
            raise ValueError(f"{text} is in bytes; say how many a block takes with --block-bytes")
        blocks = size_bytes // block_bytes
    if blocks < 1:
        raise ValueError(f"{text} holds no block")
    return blocks
