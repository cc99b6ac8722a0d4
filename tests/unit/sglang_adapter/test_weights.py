"""Weights changed in place, and the cache cleared: nothing of before is found again, by no rank of the engine."""

import sys
from types import ModuleType
from typing import Any

import pytest

from prefixcache_sglang import weights
from tests.unit.sglang_adapter.conftest import MakeBackend
from tests.unit.sglang_adapter.stub_sglang import Pool, Shape, fill, indices, keys


@pytest.fixture
def updater(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class as SGLang has it, in its place."""

    class SchedulerWeightUpdaterManager:
        def update_weights_from_disk(self, request: str) -> str:
            if request == "bad":
                raise RuntimeError("half of them were changed")
            return request

        def flush_cache_after_weight_update(self, request: str) -> str:
            return request

    name = "sglang.srt.managers.scheduler_components.weight_updater"
    module: Any = ModuleType(name)
    module.SchedulerWeightUpdaterManager = SchedulerWeightUpdaterManager
    monkeypatch.setitem(sys.modules, name, module)
    return SchedulerWeightUpdaterManager


def test_pages_of_earlier_weights_are_not_found(make: MakeBackend, updater: Any) -> None:
    pool = Pool("page_first", Shape())
    engine, rank, neighbour = make(pool), make(pool), make(pool)
    engine.batch_set_v1(keys(1), indices(pool, [0]))
    assert rank.batch_exists(keys(1)) == 1
    assert updater().update_weights_from_disk("new") == "new"
    assert engine.batch_exists(keys(1)) == rank.batch_exists(keys(1)) == 0
    assert engine.batch_set_v1(keys(1), indices(pool, [0])) == [True]
    assert rank.batch_exists(keys(1)) == 1, "all ranks of an engine come to the same epoch"
    assert make(pool).batch_exists(keys(1)) == 1, "an engine that loads the weights from their files shares with those"
    neighbour.close()


def test_a_change_that_failed_may_have_changed_weights(make: MakeBackend, updater: Any) -> None:
    pool = Pool("page_first", Shape())
    engine = make(pool)
    engine.batch_set_v1(keys(1), indices(pool, [0]))
    with pytest.raises(RuntimeError, match="half"):
        updater().update_weights_from_disk("bad")
    assert engine.batch_exists(keys(1)) == 0


def test_the_engine_is_watched_once(make: MakeBackend, updater: Any) -> None:
    make(), make()
    calls: list[int] = []
    watcher = weights.Watcher(lambda: calls.append(1))
    assert weights.install()
    updater().flush_cache_after_weight_update("x")
    assert calls == [1]
    del watcher
    updater().flush_cache_after_weight_update("x")
    assert calls == [1]


def test_without_an_updater_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, _ in weights._UPDATERS:
        monkeypatch.setitem(sys.modules, module, None)
    assert not weights.install()


def test_clear_hides_what_was_stored_from_this_engine(make: MakeBackend) -> None:
    pool = Pool("page_first", Shape())
    fill(pool, 1)
    engine, other = make(pool), make(pool)
    engine.batch_set_v1(keys(2), indices(pool, [0, 1]))
    assert engine.clear() is True
    assert engine.batch_exists(keys(2)) == 0
    assert other.batch_exists(keys(2)) == 2


def test_epochs_are_numbers_of_this_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [weights.epoch_number(changes) for changes in range(4)]
    assert numbers[0] == 0
    assert len(set(numbers)) == 4
    assert all(0 < number < 1 << 63 for number in numbers[1:])
    assert weights.epoch_number(1) == numbers[1]
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert weights.epoch_number(1) != numbers[1]
