"""The simulator driven by hypothesis, which shrinks what it finds."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sim.simulator import Simulator


@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_nothing_found(rng: random.Random) -> None:
    Simulator(rng).run(25)
