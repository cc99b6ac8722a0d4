"""Prompts for the benchmark: made from their number, so that a million blocks need no storage to be asked for again.

Every prompt begins with one of HEADS system prompts of one block and goes on with tokens of its own. It must not know
who asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from prefixcache.identity import KEY_BYTES, block_keys

HEADS: Final = 20
VOCABULARY: Final = 49_152
ROOT: Final = bytes(range(KEY_BYTES))


@dataclass(frozen=True)
class Prompts:
    """Prompts of `tokens` tokens in blocks of `block_tokens`; number 0, 1, 2, ... names one."""

    tokens: int
    block_tokens: int

    @property
    def blocks(self) -> int:
        """Blocks of one prompt."""
        return self.tokens // self.block_tokens

    def packed(self, number: int) -> bytes:
        """Token ids of a prompt, little-endian u32."""
        return _head(number % HEADS, self.block_tokens) + self._own(number)

    def keys(self, number: int) -> bytes:
        """Its block keys from ROOT, n x 32 bytes."""
        head_keys = _head_keys(number % HEADS, self.block_tokens)
        return head_keys + block_keys(head_keys[-KEY_BYTES:], self._own(number), self.block_tokens)

    def _own(self, number: int) -> bytes:
        """Everything behind the head; no ramp, because real ids are none."""
        own = np.random.default_rng(number).integers(VOCABULARY, size=self.tokens - self.block_tokens, dtype=np.uint32)
        return own.astype("<u4").tobytes()


@cache
def _head(number: int, block_tokens: int) -> bytes:
    return np.full(block_tokens, number, dtype="<u4").tobytes()


@cache
def _head_keys(number: int, block_tokens: int) -> bytes:
    return block_keys(ROOT, _head(number, block_tokens), block_tokens)
