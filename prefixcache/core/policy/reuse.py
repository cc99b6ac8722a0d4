"""What was learnt of reuse: per class, how often blocks were used again at which age, and what that makes one worth.

Rules: a wait begins when a block is used and ends with its next use (an event) or when nobody would notice one any more
(censored); blocks and ghosts that still wait count as at risk at their age. Everything decays slowly, so that old
habits fade. Must not know: keys, leaves, who asks.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.policy.ages import (
    AGE_BINS,
    UPPER_EDGES_S,
    Floats,
    age_bins,
    gittins_index,
    hazard,
    reaching,
)
from prefixcache.core.policy.exposure import Exposure

PERIOD_S: Final = 5.0
DECAY: Final = 0.99  # of each period
POOLED_WEIGHT: Final = 20.0  # observations of all classes together that a family starts from
FAMILY_WEIGHT: Final = 5.0  # observations of its family that a class starts from
_NOBODY: Final = 1e-9

Classes = NDArray[np.int64]


class ReuseRecord:
    """See the module's rules. `worth`: f64[classes, bins], reuses per second of keeping a block.

    families: the family (0, 1, ...) of each class; classes of one family are alike until they show otherwise."""

    def __init__(self, families: Classes) -> None:
        classes = len(families)
        self._families = families
        self._members: Floats = (families == np.arange(int(families.max()) + 1)[:, None]).astype(np.float64)
        self._events: Floats = np.zeros((classes, AGE_BINS))
        self._censored: Floats = np.zeros((classes, AGE_BINS))
        self._exposure = Exposure(classes)
        self._due: float | None = None
        # Nothing is known yet: the younger the better, as LRU has it.
        self.worth: Floats = np.tile(1 / UPPER_EDGES_S, (classes, 1))

    def begin(self, classes: Classes, now: float) -> None:
        """Blocks of these classes were used now and wait."""
        self._exposure.add(classes, now)

    def end(self, classes: Classes, times_s: Floats, now: float, *, reused: bool) -> None:
        """They had waited since then; they were used again, or nobody watches them any more."""
        self._exposure.remove(classes, times_s)
        np.add.at(self._events if reused else self._censored, (classes, age_bins(now - times_s)), 1)

    def refresh(self, now: float) -> None:
        """Computes `worth` anew when a period is over."""
        if self._due is None:
            self._due = now + PERIOD_S
        if now < self._due:
            return
        periods = int((now - self._due) // PERIOD_S) + 1
        self._due += periods * PERIOD_S
        self._events *= DECAY**periods
        self._censored *= DECAY**periods
        self._exposure.merge(now)
        at_risk = reaching(self._events + self._censored + self._exposure.by_age(now))
        pooled = self._events.sum(axis=0) / np.maximum(at_risk.sum(axis=0), _NOBODY)
        families = hazard(self._by_family(self._events), self._by_family(at_risk), pooled, POOLED_WEIGHT)
        self.worth = gittins_index(hazard(self._events, at_risk, families[self._families], FAMILY_WEIGHT))

    def _by_family(self, values: Floats) -> Floats:
        """f64[families, bins]: sums over the classes of each."""
        return self._members @ values

    def worth_at(self, classes: Classes, ages_s: Floats) -> Floats:
        """What blocks of these classes and ages are worth."""
        return self.worth[classes, age_bins(ages_s)]
