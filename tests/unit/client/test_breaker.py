"""The breaker's states, on a clock of the test's own."""

import pytest

from prefixcache_client.breaker import CLOSED, HALF_OPEN, OPEN, CircuitBreaker


def tripped() -> CircuitBreaker:
    breaker = CircuitBreaker(threshold=3, open_s=1.0, max_open_s=3.0)
    for _ in range(3):
        breaker.failure(0.0)
    return breaker


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker(threshold=3, open_s=1.0, max_open_s=3.0)
    for _ in range(5):
        breaker.failure(0.0)
        breaker.failure(0.0)
        assert breaker.state == CLOSED
        breaker.success()
    assert tripped().state == OPEN


def test_opening_is_told_once() -> None:
    breaker = CircuitBreaker(threshold=2, open_s=1.0, max_open_s=3.0)
    assert [breaker.failure(0.0) for _ in range(4)] == [False, True, False, False]
    assert breaker.admit(1.0)
    assert not breaker.failure(1.0), "a failed probe is nothing new"


def test_refuses_while_open_and_lets_one_probe_through() -> None:
    breaker = tripped()
    assert not breaker.admit(0.99)
    assert breaker.admit(1.0)
    assert breaker.state == HALF_OPEN
    assert not breaker.admit(1.0), "only one probe at a time"


def test_a_probe_that_succeeds_closes_it() -> None:
    breaker = tripped()
    assert breaker.admit(1.0)
    breaker.success()
    assert breaker.state == CLOSED
    assert breaker.admit(1.0)


def test_failed_probes_wait_twice_as_long_up_to_a_bound() -> None:
    breaker, now, waits = tripped(), 0.0, []
    for _ in range(4):
        start = now
        while not breaker.admit(now):
            now += 0.125
        waits.append(now - start)
        breaker.failure(now)
    assert waits == [1.0, 2.0, 3.0, 3.0]
    assert breaker.times_opened == 5


def test_a_success_forgets_how_long_it_waited() -> None:
    breaker = tripped()
    assert breaker.admit(1.0)
    breaker.failure(1.0)
    assert breaker.admit(3.0)
    breaker.success()
    for _ in range(3):
        breaker.failure(10.0)
    assert breaker.admit(11.0)


def test_a_probe_that_never_reports_does_not_close_the_door_for_ever() -> None:
    breaker = tripped()
    assert breaker.admit(1.0)
    assert not breaker.admit(1.5)
    assert breaker.admit(2.0)


def test_late_failures_while_open_change_nothing() -> None:
    breaker = tripped()
    breaker.failure(0.9)
    assert breaker.admit(1.0)
    assert breaker.times_opened == 1


@pytest.mark.parametrize("bad", [{"threshold": 0}, {"open_s": 0.0}, {"open_s": 2.0, "max_open_s": 1.0}])
def test_impossible_settings(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        CircuitBreaker(**bad)  # type: ignore[arg-type] # threshold is an int among floats
