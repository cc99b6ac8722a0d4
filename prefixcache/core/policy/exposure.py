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
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._starts[self._used] = now
            self._used += 1
        np.add.at(self._counts[self._used - 1], classes, 1)

    def remove(self, classes: NDArray[np.int64], times_s: Floats) -> None:
        """Blocks of these classes, last used then, wait no longer."""
        cells = np.searchsorted(self._starts[: self._used], times_s, side="right") - 1
        np.subtract.at(self._counts, (cells, classes), 1)

    def by_age(self, now: float) -> Floats:
        """f64[classes, bins]: how many wait, by their age now."""
        starts = self._starts[: self._used]
        ends = np.append(starts[1:], now)
        middles = np.where(np.isinf(starts), ends, (starts + ends) / 2)
        result = np.zeros((self._classes, AGE_BINS))
        np.add.at(result.T, age_bins(np.maximum(now - middles, 0.0)), self._counts[: self._used])
        return result

    def merge(self, now: float) -> None:
        """Joins neighbours that together are narrow for their age."""
        starts = self._starts[: self._used].tolist()
        kept = [0]
        for cell in range(1, len(starts)):
            end = starts[cell + 1] if cell + 1 < len(starts) else now
            if end - starts[kept[-1]] > (now - end) * _WIDTH_SHARE:
                kept.append(cell)
        counts = np.add.reduceat(self._counts[: self._used], kept, axis=0)
        self._counts[: len(kept)] = counts
        self._counts[len(kept) : self._used] = 0
        self._starts[: len(kept)] = self._starts[kept]
        self._starts[len(kept) : self._used] = np.inf
        self._used = len(kept)
