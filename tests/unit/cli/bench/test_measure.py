"""Timing: everything is called equally often, in turn, with only the call inside the clock."""

from __future__ import annotations

import gc

import pytest

from prefixcache.cli.bench import measure
from prefixcache.cli.bench.measure import Case, interleave


def test_cases_take_turns_and_each_goes_first_equally_often() -> None:
    order: list[str] = []
    cases = {name: Case.of(lambda name=name: order.append(name)) for name in "abc"}  # type: ignore[misc]  # a default binds the loop's name
    samples = interleave(cases, 6)
    assert {name: len(values) for name, values in samples.items()} == {"a": 6, "b": 6, "c": 6}
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 6 + measure.WARM_ROUNDS
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    firsts = [names[0] for names in rounds[measure.WARM_ROUNDS :]]
    assert sorted(firsts) == ["a", "a", "b", "b", "c", "c"]


def test_prepare_and_finish_are_outside_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])

    def advance(seconds: float) -> float:
        clock[0] += seconds
        return seconds

    def prepare() -> measure.Call:
        advance(100)
        return lambda: advance(2)

    finished: list[float] = []
    samples = interleave({"x": Case(prepare, lambda result: finished.append(result + advance(50)))}, 3)
    assert samples["x"] == [2, 2, 2]
    assert finished == [52] * 6


def test_collection_waits() -> None:
    seen: list[bool] = []
    interleave({"x": Case.of(lambda: seen.append(gc.isenabled()))}, 1)
    assert seen == [False, False]
    assert gc.isenabled()


def test_median_interval_holds_the_median_and_narrows() -> None:
    few, many = [1.0, 2.0, 3.0] * 3, [1.9, 2.0, 2.1] * 40
    low, high = measure.median_interval(few)
    assert low <= 2.0 <= high
    assert measure.median_interval(few) == (low, high)
    narrow_low, narrow_high = measure.median_interval(many)
    assert narrow_high - narrow_low < high - low
