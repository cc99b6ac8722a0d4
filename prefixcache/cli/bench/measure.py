"""Timing several things against each other on a machine that does other work as well.

Rules: whatever is compared is interleaved call by call, and every round begins with another one, so that a slow second
hits all alike; medians, because the mean belongs to the scheduler; garbage collection waits until the end.
It must not know what is measured.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

# Calls of each before anything counts: connections, code caches, CPU clock.
WARM_ROUNDS: Final = 3
INTERVAL: Final = 0.95
RESAMPLES: Final = 4000

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One thing to time. `prepare` makes the call of a round and `finish` takes its result; neither is timed."""

    prepare: Callable[[], Call]
    finish: Callable[[Any], object] | None = None

    @classmethod
    def of(cls, call: Call, finish: Callable[[Any], object] | None = None) -> Case:
        """The same call in every round."""
        return cls(lambda: call, finish)


def interleave(cases: Mapping[str, Case], rounds: int) -> dict[str, list[float]]:
    """Seconds of every case, `rounds` of each."""
    names = list(cases)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with no_collection():
        for number in range(-min(WARM_ROUNDS, rounds), rounds):
            start = number % len(names)
            for name in names[start:] + names[:start]:
                elapsed = _timed(cases[name])
                if number >= 0:
                    samples[name].append(elapsed)
    return samples


def _timed(case: Case) -> float:
    call = case.prepare()
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    if case.finish is not None:
        case.finish(result)
    return elapsed


def medians_us(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median of each, in microseconds."""
    return {name: statistics.median(values) * 1e6 for name, values in samples.items()}


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect once, then not until the end: a collection in the middle of a call would be counted as its cost."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% bootstrap interval of the median; the same numbers give the same interval."""
    chance = random.Random(len(values))
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = int(RESAMPLES * (1 - INTERVAL) / 2)
    return medians[tail], medians[-tail - 1]
