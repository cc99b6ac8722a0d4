"""What a token costs is learnt from the engine's steps, whatever else they do."""

from __future__ import annotations

import random

import pytest

from prefixcache_vllm.cost import ComputeCost


class Engine:
    """Steps of a made-up engine: a token of a prompt costs 1 ms, a token that is decoded 30 ms alone or with others."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cost = ComputeCost(lambda: self.now)

    def run(self, scheduled: dict[str, int], seconds: float | None = None, **more: bool) -> None:
        """A step from its beginning to its end."""
        self.cost.begins(scheduled, **more)
        self.now += seconds if seconds is not None else 0.03 + 0.001 * sum(scheduled.values())
        self.cost.ends()


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_few_long_steps_make_it_known(engine: Engine) -> None:
    for _ in range(3):
        engine.run({"a": 970})
        assert engine.cost.s_per_token == 0.0
    engine.run({"a": 970})
    assert engine.cost.s_per_token == pytest.approx(1.0 / 970)


def test_steps_that_decode_or_are_short_say_nothing(engine: Engine) -> None:
    for _ in range(50):
        engine.run({"a": 1, "b": 1})
        engine.run({"a": 200})
        engine.run({str(number): 1 for number in range(400)})
        engine.run({str(number): 8 for number in range(100)}, 0.9)
    assert engine.cost.s_per_token == 0.0


def test_pauses_between_steps_cost_nothing(engine: Engine) -> None:
    for _ in range(8):
        engine.run({"a": 1000})
        engine.now += 3600.0
    assert engine.cost.s_per_token == pytest.approx(0.00103)


def test_an_engine_that_schedules_one_step_ahead(engine: Engine) -> None:
    engine.cost.begins({"a": 1000})
    for _ in range(8):
        engine.cost.begins({"a": 1000})
        engine.now += 1.03
        engine.cost.ends()
    assert engine.cost.s_per_token == pytest.approx(0.00103)


def test_steps_without_a_token_end_too(engine: Engine) -> None:
    """As while an answer is waited for: a queue of two steps always has such a one in front then."""
    for _ in range(8):
        for _ in range(3):
            engine.cost.begins({})
            engine.now += 0.001
            engine.cost.ends()
        engine.cost.begins({})
        engine.cost.begins({"a": 1000})
        engine.cost.ends()
        engine.now += 1.03
        engine.cost.ends()
    assert engine.cost.s_per_token == pytest.approx(0.00103)


def test_the_first_steps_and_single_hangs_are_forgotten(engine: Engine) -> None:
    engine.run({"a": 1000}, 60.0)
    for number in range(200):
        engine.run({"a": 1000}, 30.0 if number % 10 == 0 else None)
    assert engine.cost.s_per_token == pytest.approx(0.00103)


def test_an_engine_that_becomes_slower_is_followed(engine: Engine) -> None:
    for _ in range(40):
        engine.run({"a": 1000})
    for _ in range(40):
        engine.run({"a": 1000}, 5.0)
    assert engine.cost.s_per_token == pytest.approx(0.005)


def test_long_steps_weigh_more_than_short_ones(engine: Engine) -> None:
    for _ in range(16):
        engine.run({"a": 256}, 1.0)
        engine.run({"a": 8192}, 8.0)
    assert engine.cost.s_per_token == pytest.approx(8 / 8192)


def test_steps_that_load_as_well_say_nothing(engine: Engine) -> None:
    for _ in range(10):
        engine.run({"a": 1000}, 60.0, only_computes=False)
    assert engine.cost.s_per_token == 0.0
    for _ in range(4):
        engine.run({"a": 1000})
    assert engine.cost.s_per_token == pytest.approx(0.00103)


@pytest.mark.parametrize("seed", range(20))
def test_ends_without_beginnings_and_steps_that_never_end(engine: Engine, seed: int) -> None:
    """However an engine tells them: nothing grows or is negative, and what it tells in order later is learnt."""
    random_ = random.Random(seed)
    for _ in range(500):
        match random_.randrange(3):
            case 0:
                engine.cost.begins({"a": random_.randrange(1000)})
            case 1:
                engine.cost.ends()
            case _:
                engine.now += random_.random()
    assert engine.cost.s_per_token >= 0.0
    assert len(engine.cost._under_way) <= 16
    for _ in range(100):
        engine.cost.ends()
    for _ in range(40):
        engine.run({"a": 1000})
    assert engine.cost.s_per_token == pytest.approx(0.00103)
