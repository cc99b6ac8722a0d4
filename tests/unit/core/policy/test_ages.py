"""Age bins and the Gittins index, beside sums over single ages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefixcache.core.policy.ages import (
    AGE_BINS,
    FIRST_EDGE_S,
    MOST_HAZARD,
    UPPER_EDGES_S,
    age_bins,
    gittins_index,
    hazard,
    reaching,
)


def test_bins_grow_by_a_fourth_root_and_take_their_upper_edge() -> None:
    assert len(UPPER_EDGES_S) == AGE_BINS == 72
    assert UPPER_EDGES_S[0] == FIRST_EDGE_S == 0.25
    assert UPPER_EDGES_S[4] == pytest.approx(0.5)
    ages = np.array([0.0, 0.25, 0.2501, UPPER_EDGES_S[10], UPPER_EDGES_S[10] * 1.0001, 1e12])
    assert age_bins(ages).tolist() == [0, 0, 1, 10, 11, AGE_BINS - 1]


def test_reaching_counts_from_the_right() -> None:
    assert reaching(np.array([[1.0, 2.0, 3.0]])).tolist() == [[6.0, 5.0, 3.0]]


def test_few_observations_leave_the_prior_and_many_replace_it() -> None:
    prior = np.array([0.1])
    assert hazard(np.array([[0.0]]), np.array([[0.0]]), prior, 20.0)[0, 0] == pytest.approx(0.1)
    assert hazard(np.array([[9e5]]), np.array([[1e6]]), prior, 20.0)[0, 0] == pytest.approx(0.9, abs=1e-3)
    assert hazard(np.array([[9.0]]), np.array([[9.0]]), prior, 0.0)[0, 0] == MOST_HAZARD


def slow_index(hazards: list[float], start: int) -> float:
    """The best horizon, by walking through all of them."""
    alive, reused, waited, best = 1.0, 0.0, 0.0, 0.0
    lower = [0.0, *UPPER_EDGES_S[:-1]]
    for place in range(start, len(hazards)):
        width = UPPER_EDGES_S[place] - lower[place]
        gone = alive * hazards[place]
        waited += width * (alive - gone / 2)
        alive -= gone
        reused += gone
        best = max(best, reused / waited)
    return best


@settings(max_examples=50, deadline=None)
@example([0.999] * AGE_BINS, 0)
@given(st.lists(st.floats(0, MOST_HAZARD), min_size=AGE_BINS, max_size=AGE_BINS), st.integers(0, AGE_BINS - 1))
def test_the_index_is_the_best_ratio_over_all_horizons(hazards: list[float], start: int) -> None:
    index = gittins_index(np.array([hazards, [0.0] * AGE_BINS]))
    alive = np.prod(1 - np.array(hazards[:start]))
    if alive > 1e-5:  # hardly anybody gets further
        assert index[0, start] == pytest.approx(slow_index(hazards, start), rel=1e-3, abs=1e-9)
    assert (index[1] == 0).all()
    assert np.isfinite(index).all()


def test_a_rhythm_is_worth_most_just_before_its_beat() -> None:
    hazards = np.full((1, AGE_BINS), 0.001)
    beat = int(age_bins(np.array([10.0]))[0])
    hazards[0, beat] = 0.9
    index = gittins_index(hazards)[0]
    assert index.argmax() == beat
    assert index[0] < index[beat - 1] < index[beat]
    assert index[beat + 1] < index[0]
