"""Ticks as times."""

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.server import describing
from prefixcache.server.describing import TickTimes


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(4, 20))
def test_a_tick_is_never_told_older_than_it_is_nor_much_younger(steps: list[int], most: int) -> None:
    times, truth, tick = TickTimes(), [], 0
    before, describing._MOST_SAMPLES = describing._MOST_SAMPLES, most  # type: ignore[misc]  # a small one, to see thinning
    try:
        for now, step in enumerate(steps):
            tick += step
            times.note(tick, float(now))
            truth.append((tick, float(now)))
    finally:
        describing._MOST_SAMPLES = before  # type: ignore[misc]  # as above
    assert len(times._ticks) <= most + 1
    for noted, exact in truth:
        told = times.time_of(noted)
        assert told is not None
        assert exact <= told <= len(steps)
    assert times.time_of(tick + 1) is None


def test_a_tick_keeps_the_time_it_was_first_seen() -> None:
    times = TickTimes()
    times.note(5, 1.0)
    times.note(5, 9.0)
    assert times.time_of(5) == 1.0
