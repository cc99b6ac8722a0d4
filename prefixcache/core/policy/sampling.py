"""Chance for policies: a small generator of integers that a seed determines wholly.

Rules: splitmix64 over a counter, in numpy, because one victim needs dozens of numbers. Not for secrets.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_STEP: Final = 0x9E37_79B9_7F4A_7C15
_FIRST: Final = np.uint64(0xBF58_476D_1CE4_E5B9)
_SECOND: Final = np.uint64(0x94D0_49BB_1331_11EB)
_MASK: Final = (1 << 64) - 1
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))
_AHEAD: Final = 64  # calls served by one draw
_UPPER: Final = np.uint64(32)


class Sampler:
    """Numbers in order; two samplers of one seed give the same."""

    def __init__(self, seed: int, count: int) -> None:
        """count: how many numbers each `indices` gives."""
        self._state = seed & _MASK
        self._steps = np.arange(1, _AHEAD * count + 1, dtype=np.uint64) * np.uint64(_STEP)
        self._count = count
        self._ready: list[NDArray[np.uint64]] = []

    def indices(self, bound: int) -> NDArray[np.int64]:
        """`count` numbers of [0, bound), repeats possible; 0 < bound < 2^32."""
        if not self._ready:
            self._ready = list(self._draw().reshape(_AHEAD, self._count))
        return (self._ready.pop() * np.uint64(bound) >> _UPPER).view(np.int64)

    def _draw(self) -> NDArray[np.uint64]:
        """The next numbers below 2^32."""
        mixed = self._steps + np.uint64(self._state)
        self._state = (self._state + len(self._steps) * _STEP) & _MASK
        mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _FIRST
        mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _SECOND
        return (mixed ^ (mixed >> _SHIFTS[2])) >> _UPPER
