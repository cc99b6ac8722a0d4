"""Ages in log-time bins, and what a hazard over them is worth: the Gittins index of waiting.

Rules: plain arithmetic over arrays `[classes, bins]`. Must not know: blocks, keys, when anything is computed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

AGE_BINS: Final = 72
FIRST_EDGE_S: Final = 0.25
EDGE_RATIO: Final = 2**0.25
UPPER_EDGES_S: Final[Floats] = FIRST_EDGE_S * np.power(EDGE_RATIO, np.arange(AGE_BINS, dtype=np.float64))
"""Upper edge of each bin, seconds. The last bin holds everything older as well."""
_INNER_EDGES: Final = UPPER_EDGES_S[:-1]
_WIDTHS_S: Final[Floats] = np.diff(UPPER_EDGES_S, prepend=0.0)
MOST_HAZARD: Final = 0.999  # certainty would leave nobody to reach the next bin
_LEAST_SURVIVAL: Final = 1e-9  # what waits longer than all others of its class is worth nothing, not a division by 0


def age_bins(ages_s: Floats) -> NDArray[np.int64]:
    """The bin of each age; an age on an edge belongs below it."""
    return _INNER_EDGES.searchsorted(ages_s)


def hazard(events: Floats, at_risk: Floats, prior: Floats, weight: float) -> Floats:
    """Chance of a reuse within each bin for those who reach it, where `weight` observations of `prior` are added to
    what was observed. events, at_risk: f64[classes, bins]; prior: the same, or one for all."""
    return np.minimum((events + weight * prior) / (at_risk + weight), MOST_HAZARD)


def reaching(ends: Floats) -> Floats:
    """How many reach each bin, of those that end (or are now) in each: sums from the right."""
    return np.cumsum(ends[:, ::-1], axis=1)[:, ::-1]


def gittins_index(hazards: Floats) -> Floats:
    """f64[classes, bins]: the best ratio, over all horizons, of the chance of a reuse before the horizon to the time
    (seconds) spent waiting until then, for somebody who has just reached the bin.

    With survival S and T the area under it, the ratio from bin a to horizon b is (S[a] - S[b]) / (T[b] - T[a]).
    """
    # Bins first: then each step works on whole rows of classes that lie next to each other.
    survival = np.ones((hazards.shape[1] + 1, len(hazards)))
    np.cumprod(1 - hazards.T, axis=0, out=survival[1:])
    np.maximum(survival, _LEAST_SURVIVAL, out=survival)
    # Reuses are spread evenly over a bin.
    area = np.zeros_like(survival)
    np.cumsum((survival[:-1] + survival[1:]) / 2 * _WIDTHS_S[:, None], axis=0, out=area[1:])
    # By distance of the horizon, for all bins at once: the same numbers from fewer calls, and none that folds.
    index, chance, wait = np.zeros((3, *hazards.T.shape))
    for ahead in range(1, len(survival)):
        bins = len(survival) - ahead
        np.subtract(survival[:bins], survival[ahead:], out=chance[:bins])
        np.subtract(area[ahead:], area[:bins], out=wait[:bins])
        np.divide(chance[:bins], wait[:bins], out=chance[:bins])
        np.maximum(index[:bins], chance[:bins], out=index[:bins])
    best: Floats = index.T
    return best
