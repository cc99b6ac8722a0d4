"""How many blocks wait for a reuse, by class and time of last use, without looking at each.

Rules: last uses fall into cells of time that widen with age, so there are few of them whatever the cache holds, and a
block's age is known to an eighth. Counts are exact but for that. Must not know: what a class means.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.policy.ages import AGE_BINS, FIRST_EDGE_S, Floats, age_bins

_WIDTH_SHARE: Final = 1 / 8
_LEAST_WIDTH_S: Final = FIRST_EDGE_S / 4
_FIRST_CELLS: Final = 256


class Exposure:
    """Counts of waiting blocks. Times never go back."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._starts: Floats = np.full(_FIRST_CELLS, np.inf)
        self._starts[0] = -np.inf
        self._ends: Floats = np.zeros(_FIRST_CELLS)  # the latest use in each cell
        self._counts: NDArray[np.int64] = np.zeros((_FIRST_CELLS, classes), np.int64)
        self._used = 1

    @property
    def cells(self) -> int:
        return self._used

    def add(self, classes: NDArray[np.int64], now: float) -> None:
        """Blocks of these classes were used now."""
        if now - self._starts[self._used - 1] >= _LEAST_WIDTH_S:
            if self._used == len(self._starts):
                self._starts = np.concatenate((self._starts, np.full(self._used, np.inf)))
                self._ends = np.concatenate((self._ends, np.zeros(self._used)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._starts[self._used] = now
            self._used += 1
        self._ends[self._used - 1] = now
        self._counts[self._used - 1] += np.bincount(classes, minlength=self._classes)

    def remove(self, classes: NDArray[np.int64], times_s: Floats) -> None:
        """Blocks of these classes, last used then, wait no longer."""
        cells = self._starts[: self._used].searchsorted(times_s, side="right") - 1
        np.subtract.at(self._counts, (cells, classes), 1)

    def by_age(self, now: float) -> Floats:
        """f64[classes, bins]: how many wait, by their age now."""
        # Nobody is in the first cell, which is there so that every time has one.
        middles = (self._starts[1 : self._used] + self._ends[1 : self._used]) / 2
        result = np.zeros((self._classes, AGE_BINS))
        if len(middles):
            # Later cells are younger, so those of one bin lie next to each other.
            bins = age_bins(now - middles)
            first = np.flatnonzero(np.diff(bins, prepend=AGE_BINS))
            result.T[bins[first]] = np.add.reduceat(self._counts[1 : self._used], first, axis=0)
        return result

    def merge(self, now: float) -> None:
        """Joins neighbours that together are narrow for their age."""
        used = self._used
        starts, ends = self._starts[:used].tolist(), self._ends[:used].tolist()
        kept = [0]
        for cell in range(1, used):
            if ends[cell] - starts[kept[-1]] > (now - ends[cell]) * _WIDTH_SHARE:
                kept.append(cell)
        count = len(kept)
        self._counts[:count] = np.add.reduceat(self._counts[:used], kept, axis=0)
        self._counts[count:used] = 0
        self._ends[:count] = np.maximum.reduceat(self._ends[:used], kept)
        self._starts[:count] = self._starts[kept]
        self._starts[count:used] = np.inf
        self._used = count
