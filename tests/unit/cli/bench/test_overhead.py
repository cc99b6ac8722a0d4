"""The figures of `bench overhead` from known pairs: which way the ratio goes, and that the interval is around it."""

from __future__ import annotations

import pytest

from prefixcache.cli.bench.overhead import Pair, summary


def test_a_cache_that_costs_a_tenth_is_a_ratio_below_one() -> None:
    told = summary([Pair(with_s=1.1 + 0.001 * i, without_s=1.0, client_cpu_s=0.011) for i in range(-20, 21)])
    assert told["no_reuse_ratio_median"] == pytest.approx(1 / 1.1)
    low, high = told["no_reuse_ratio_interval"]
    assert low < told["no_reuse_ratio_median"] < high == told["no_reuse_ratio"] < 0.92
    assert told["client_cpu_share"] == pytest.approx(0.01, rel=0.02)
    assert told["pairs"] == 41
