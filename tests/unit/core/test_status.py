"""Status is plain, complete and closes."""

from __future__ import annotations

import json

from prefixcache.core.commands import Refused
from prefixcache.core.events import CapacityReady, LeaseReleased, SessionEnded, TimePassed
from prefixcache.core.ids import HOST_POOL
from prefixcache.core.reasons import Kind, Refusal
from prefixcache.core.status import status, token_sum
from tests.unit.core.harness import GRANULE, TOKENS, A, Harness, name


def test_everything_is_counted() -> None:
    h = Harness(slots=8, slab_slots=4)
    h.store("abcd")
    h.acquire("abcdx")
    h.reserve("yz")
    h.send(LeaseReleased(A, name(999)))
    found = json.loads(json.dumps(status(h.planner)))
    assert found["tokens"] == {
        "looked_up": 5 * TOKENS,
        "hit": {"gpu": 0, "host": 0, "disk": 0, "peer": 0},
        "miss": {"not_stored": TOKENS},
        "pending": 4 * TOKENS,
    }
    assert found["tiers"]["host"] == {
        "enabled": True,
        "size_bytes": 8 * GRANULE,
        "ready_bytes": 8 * GRANULE,
        "used_bytes": 6 * GRANULE,
        "quarantined_slots": 0,
    }
    assert [tier for tier in found["tiers"] if found["tiers"][tier]["enabled"]] == ["host"]
    assert found["namespaces"][0]["blocks"] == 6
    assert (found["sessions"], found["leases"], found["reservations"]) == (2, 1, 1)
    assert found["refused"] == {"lease_unknown": 1}


def test_quarantine_is_shown() -> None:
    h = Harness()
    h.reserve("ab")
    h.send(SessionEnded(A))
    found = status(h.planner)
    assert found["tiers"]["host"]["quarantined_slots"] == 2
    assert (found["sessions"], found["reservations"]) == (1, 0)


def test_memory_becomes_ready_in_the_background() -> None:
    h = Harness(slots=16, slab_slots=4, ready_bytes=0)
    assert len(h.reserve("ab").blocks) == 0
    h.send(CapacityReady(HOST_POOL, 6 * GRANULE))
    assert len(h.reserve("abcdef").blocks) == 4
    h.send(CapacityReady(HOST_POOL, 2 * GRANULE))
    assert status(h.planner)["tiers"]["host"]["ready_bytes"] == 6 * GRANULE
    h.refused(CapacityReady(9, 1), Kind.NOT_FOUND, Refusal.ARGUMENT_INVALID)


def test_an_event_nobody_knows_is_refused() -> None:
    h = Harness()
    (refusal,) = h.planner.handle("hello", 0.0)  # type: ignore[arg-type]  # what no typed caller could send
    assert isinstance(refusal, Refused)
    assert refusal.reason is Refusal.EVENT_UNKNOWN
    assert h.send(TimePassed()) == []
    assert token_sum(h.planner)["looked_up"] == 0
