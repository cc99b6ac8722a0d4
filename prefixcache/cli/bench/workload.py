"""Prompts for the index: made from their number, so that a million blocks need no storage to be asked for again.

Every prompt begins with one of HEADS system prompts of one block and goes on with tokens of its own. It must not know
the index.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from prefixcache.identity import block_keys

HEADS: Final = 20
VOCABULARY: Final = 128_000
ROOT: Final = bytes(range(32))


@dataclass(frozen=True)
class Prompts:
    """Prompts of `tokens` tokens in blocks of `block_tokens`; number 0, 1, 2, ... names one."""

    tokens: int
    block_tokens: int

    @property
    def blocks(self) -> int:
        return self.tokens // self.block_tokens

    def packed(self, number: int) -> bytes:
        """Token ids of a prompt, little-endian u32."""
        head, tail = self._pieces(number)
        return head + tail

    def keys(self, number: int) -> bytes:
        """Its block keys, n x 32 bytes."""
        _, tail = self._pieces(number)
        head_keys = _head_keys(number % HEADS, self.block_tokens)
        return head_keys + block_keys(head_keys[-32:], tail, self.block_tokens)

    def _pieces(self, number: int) -> tuple[bytes, bytes]:
        own = np.random.default_rng(number).integers(VOCABULARY, size=self.tokens - self.block_tokens, dtype="<u4")
        return _head(number % HEADS, self.block_tokens), own.tobytes()


@cache
def _head(number: int, block_tokens: int) -> bytes:
    return np.full(block_tokens, number, dtype="<u4").tobytes()


@cache
def _head_keys(number: int, block_tokens: int) -> bytes:
    return block_keys(ROOT, _head(number, block_tokens), block_tokens)
