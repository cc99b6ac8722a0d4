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
    assert made.lacks(1 << 40, 1.0, urgent=False) == 1
    made.begin(0.0)
    assert made.lacks(1 << 40, 0.5, urgent=False) == 0


def test_one_is_enough_while_it_keeps_up_and_others_join_where_it_does_not() -> None:
    fast, slow = seen(1000 * MIB), seen(100 * MIB)
    waiting = 64 * MIB  # of a fast disk 0.064 s, of a slow one 0.64 s
    assert (fast.lacks(waiting, 2.0, urgent=False), fast.behind(waiting, 2.0)) == (1, 0)
    assert slow.lacks(waiting, 2.0, urgent=False) == 1 + slow.behind(waiting, 2.0) > 4
    fast.begin(2.0)
    assert fast.lacks(waiting, 2.0, urgent=False) == 0
    assert fast.lacks(waiting, 2.0, urgent=True) == 1, "beside a call that may hang"


def test_calls_at_the_same_time_count_as_one_stretch() -> None:
    made = Crew()
    made.begin(0.0)
    made.begin(0.0)
    made.end(1.0, 50 * MIB)
    made.end(1.0, 50 * MIB)
    assert made.behind(100 * MIB, 1.0) == pytest.approx(1 / crew._PATIENCE_S, abs=1)


def test_a_disk_that_became_slower_is_seen() -> None:
    made = seen(1000 * MIB)
    for call in range(100):
        made.begin(10.0 + call)
        made.end(11.0 + call, 10 * MIB)
    assert made.behind(64 * MIB, 200.0) > 50


def test_a_call_that_failed_is_time_without_bytes() -> None:
    made = seen(1000 * MIB)
    before = made.behind(1000 * MIB, 6.0)
    made.begin(5.0)
    made.end(6.0, 0)
    assert made.behind(1000 * MIB, 6.0) > before


def test_beside_a_call_that_hangs_another_one_joins() -> None:
    made = seen(1000 * MIB)
    made.begin(2.0)
    assert made.lacks(16 * MIB, 2.1, urgent=False) == 0
    assert made.lacks(16 * MIB, 12.0, urgent=False) > 0
    made = Crew()
    made.begin(0.0)
    assert made.lacks(16 * MIB, 2.0, urgent=False) > 0
