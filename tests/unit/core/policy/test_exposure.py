"""Counts by class and age beside a plain list of everybody who waits."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.core.policy.ages import AGE_BINS, UPPER_EDGES_S, age_bins
from prefixcache.core.policy.exposure import Exposure

CLASSES = 3
steps = st.tuples(st.sampled_from([0.0, 0.01, 0.1, 1.0, 7.0, 60.0, 3000.0]), st.integers(0, 2), st.integers(0, 3))


def tolerance(age_s: float) -> float:
    """An age may be wrong by half a cell: an eighth of itself, and the width of the finest cells."""
    return age_s / 8 + 0.1


@settings(max_examples=100, deadline=None)
@given(st.lists(steps, min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_everybody_is_counted_once_near_the_right_age(story: list[tuple[float, int, int]], rng: object) -> None:
    exposure = Exposure(CLASSES)
    waiting: list[tuple[int, float]] = []
    now = 0.0
    for number, (gap, kind, leaving) in enumerate(story):
        now += gap
        exposure.add(np.array([kind, kind]), now)
        waiting += [(kind, now), (kind, now)]
        rng.shuffle(waiting)  # type: ignore[attr-defined]  # hypothesis types it as object
        gone = [waiting.pop() for _ in range(min(leaving, len(waiting)))]
        if gone:
            exposure.remove(np.array([each[0] for each in gone]), np.array([each[1] for each in gone]))
        if number % 3 == 2:
            exposure.merge(now)
    counts = exposure.by_age(now)
    assert counts.shape == (CLASSES, AGE_BINS)
    assert (counts >= 0).all()
    for kind in range(CLASSES):
        ages = sorted(now - since for which, since in waiting if which == kind)
        assert counts[kind].sum() == len(ages)
        counted = np.repeat(np.arange(AGE_BINS), counts[kind].astype(int))
        for age, place in zip(ages, counted.tolist(), strict=True):
            low, high = age_bins(np.array([max(0.0, age - tolerance(age)), age + tolerance(age)]))
            assert low <= place <= high


def test_cells_stay_few_however_long_it_runs() -> None:
    exposure = Exposure(1)
    most = 0
    for step in range(40_000):
        exposure.add(np.array([0]), step * 0.25)
        if step % 20 == 0:
            exposure.merge(step * 0.25)
        most = max(most, exposure.cells)
    assert most < 200
    assert exposure.by_age(10_000.0).sum() == 40_000
    assert UPPER_EDGES_S[-1] > 10_000
