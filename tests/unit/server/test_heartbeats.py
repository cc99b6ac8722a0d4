"""Health from signs of life alone."""

from prefixcache.server.health import GrpcHealth, Health
from prefixcache.server.heartbeats import Heartbeats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_part_lives_as_long_as_it_beats() -> None:
    clock = Clock()
    heartbeats = Heartbeats(clock)
    beat = heartbeats.register("planner", 2.0)
    clock.now += 2.0
    assert heartbeats.dead() == []
    clock.now += 0.5
    (dead,) = heartbeats.dead()
    assert (dead.part, dead.age_s, dead.alive) == ("planner", 2.5, False)
    assert "2.5 s" in dead.detail
    beat()
    assert heartbeats.dead() == []


def test_a_part_that_never_beats_is_dead() -> None:
    clock = Clock()
    heartbeats = Heartbeats(clock)
    heartbeats.register("http", 1.0)
    clock.now += 5
    assert [part.part for part in heartbeats.dead()] == ["http"]


def test_a_failed_part_is_dead_whatever_it_beats() -> None:
    heartbeats = Heartbeats(Clock())
    beat = heartbeats.register("executor", 1.0)
    heartbeats.fail("executor", "its thread died")
    beat()
    assert [part.detail for part in heartbeats.dead()] == ["its thread died"]
    heartbeats.unregister("executor")
    assert heartbeats.states() == []


def test_health_puts_the_worst_first() -> None:
    clock, troubles, failure = Clock(), [""], [""]
    heartbeats = Heartbeats(clock)
    heartbeats.register("planner", 1.0)
    health = Health(heartbeats, lambda: [text for text in troubles if text], lambda: failure[0])
    assert health.state() == ("serving", "")
    troubles[0] = "the pool shrank"
    assert health.state() == ("degraded", "the pool shrank")
    assert health.is_serving()
    clock.now += 2
    assert health.state()[0] == "not_serving"
    assert health.state()[1].startswith("planner: no sign of life")
    failure[0] = "an event failed"
    assert health.state() == ("not_serving", "an event failed")
    health.ending = True
    assert health.state() == ("not_serving", "the server is ending")


def test_watchers_are_told_of_changes_only() -> None:
    clock = Clock()
    heartbeats = Heartbeats(clock)
    beat = heartbeats.register("planner", 1.0)
    told: list[tuple[str, int]] = []

    class Told(GrpcHealth):
        def set(self, service: str, status: int) -> None:
            told.append((service, status))

    watched = Told(Health(heartbeats, list))
    assert len(told) == 3
    watched.refresh()
    assert len(told) == 3
    clock.now += 2
    watched.refresh()
    assert {status for _, status in told[3:]} == {2}
    beat()
    watched.refresh()
    assert len(told) == 9
