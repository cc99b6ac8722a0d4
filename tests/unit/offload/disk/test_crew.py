"""How many writers work at once: one while it keeps up, more where what waits would take too long."""

from __future__ import annotations

import pytest

from prefixcache_offload.disk import crew
from prefixcache_offload.disk.crew import Crew

MIB = 1 << 20


def seen(bytes_per_s: float) -> Crew:
    """A crew that wrote for a second, one call after the other."""
    made = Crew()
    for call in range(10):
        made.begin(call / 10)
        made.end((call + 1) / 10, int(bytes_per_s / 10))
    return made


def test_one_writes_until_anything_is_known() -> None:
    made = Crew()
    assert made.lacks(1 << 40, urgent=False) == 1
    made.begin(0.0)
    assert made.lacks(1 << 40, urgent=False) == 0


def test_one_is_enough_while_it_keeps_up_and_others_join_where_it_does_not() -> None:
    fast, slow = seen(1000 * MIB), seen(100 * MIB)
    waiting = 64 * MIB  # of a fast disk 0.064 s, of a slow one 0.64 s
    assert (fast.lacks(waiting, urgent=False), fast.behind(waiting)) == (1, 0)
    assert slow.lacks(waiting, urgent=False) == 1 + slow.behind(waiting) > 4
    fast.begin(2.0)
    assert fast.lacks(waiting, urgent=False) == 0
    assert fast.lacks(waiting, urgent=True) == 1, "beside a call that may hang"


def test_calls_at_the_same_time_count_as_one_stretch() -> None:
    made = Crew()
    made.begin(0.0)
    made.begin(0.0)
    made.end(1.0, 50 * MIB)
    made.end(1.0, 50 * MIB)
    assert made.behind(100 * MIB) == pytest.approx(1 / crew._PATIENCE_S, abs=1)


def test_a_disk_that_became_slower_is_seen() -> None:
    made = seen(1000 * MIB)
    for call in range(100):
        made.begin(10.0 + call)
        made.end(11.0 + call, 10 * MIB)
    assert made.behind(64 * MIB) > 50


def test_a_call_that_failed_is_time_without_bytes() -> None:
    made = seen(1000 * MIB)
    before = made.behind(1000 * MIB)
    made.begin(5.0)
    made.end(6.0, 0)
    assert made.behind(1000 * MIB) > before
