"""Counters, and SGLang's own metrics made of them."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from prefixcache_sglang.counting import Counts, Transferred
from prefixcache_sglang.metrics import storage_metrics
from tests.unit.sglang_adapter.conftest import MakeBackend
from tests.unit.sglang_adapter.stub_sglang import Pool, Shape, indices, keys


def test_every_page_is_counted_once() -> None:
    counts = Counts()
    counts.asked(2, 1, "not_cached")
    counts.loaded(Transferred(2, 100, 0.5), 1, "lease_lost")
    counts.stored(Transferred(3, 300, 0.1), {"already_stored": 1})
    numbers = counts.numbers()
    assert (numbers.asked, numbers.found, numbers.loaded, numbers.stored) == (3, 2, 2, 3)
    assert numbers.not_found == {"not_cached": 1}
    assert numbers.not_loaded == {"lease_lost": 1}
    assert numbers.not_stored == {"already_stored": 1}
    loads, stores = counts.take_recent()
    assert [each.pages for each in loads + stores] == [2, 3]
    assert loads[0].gb_per_s == pytest.approx(2e-7)
    assert counts.take_recent() == ([], [])


def test_numbers_for_metrics_are_bounded() -> None:
    counts = Counts()
    for _ in range(3000):
        counts.loaded(Transferred(1, 1, 1.0), 0, "")
    assert len(counts.take_recent()[0]) == 1024


def test_sglangs_metrics_are_filled_where_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang.srt.observability.metrics_collector", "sglang.srt.metrics.collector"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert storage_metrics([], []) is None
    module: Any = sys.modules["sglang.srt.metrics.collector"]
    module.StorageMetrics = lambda: SimpleNamespace(prefetch_pgs=[], backup_pgs=[], prefetch_bandwidth=[])
    made = storage_metrics([Transferred(4, 2_000_000_000, 1.0)], [Transferred(5, 1, 1.0)])
    assert (made.prefetch_pgs, made.backup_pgs, made.prefetch_bandwidth) == ([4], [5], [2.0])


def test_stats_are_told_where_they_are_wanted(make: MakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "sglang.srt.observability.metrics_collector"
    module: Any = ModuleType(name)
    module.StorageMetrics = lambda: SimpleNamespace(prefetch_pgs=[], backup_pgs=[])
    monkeypatch.setitem(sys.modules, name, module)
    pool = Pool("page_first", Shape())
    assert make(pool).get_stats() is None
    backend = make(pool, enable_storage_metrics=True)
    backend.batch_set_v1(keys(2), indices(pool, [0, 1]))
    assert backend.get_stats().backup_pgs == [2]
    assert backend.get_stats().backup_pgs == []
