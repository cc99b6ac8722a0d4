"""Settings that cannot work are refused at once."""

import math

import pytest

from prefixcache_client import ClientOptions


@pytest.mark.parametrize(
    "bad",
    [{"timeout_s": 0}, {"store_timeout_s": -1}, {"stream_timeout_s": 0}, {"lease_ttl_s": -1}, {"store_queue": 0}]
    + [{"recompute_s_per_token": cost} for cost in (-1.0, math.inf, math.nan)],
)
def test_impossible(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        ClientOptions(**bad)  # type: ignore[arg-type] # store_queue is an int among floats


def test_breaker_settings_are_checked_by_the_client() -> None:
    from prefixcache_client import Client

    with pytest.raises(ValueError, match="breaker"):
        Client("unix:///nowhere", ClientOptions(breaker_threshold=0))
