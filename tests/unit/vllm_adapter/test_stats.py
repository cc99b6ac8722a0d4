"""Our numbers on vLLM's metrics page and in its log lines."""

import functools
import importlib
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tests.unit.vllm_adapter import stub_vllm

LABELS = ["model_name", "engine"]


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, beside a vLLM that shows numbers of connectors."""
    stub_vllm.install(monkeypatch, new=True)
    return importlib.import_module("prefixcache_vllm.stats")


@pytest.fixture
def page(stats: Any) -> "Page":
    """A metrics page of two engines."""
    return Page(stats)


class Page:
    """What a scrape says after observations."""

    def __init__(self, stats: Any) -> None:
        self._registry = CollectorRegistry()
        types = {kind: functools.partial(kind, registry=self._registry) for kind in (Counter, Histogram)}
        self.metrics = stats.metrics_page(None, types, LABELS, {0: ["tiny", "0"], 1: ["tiny", "1"]})

    def lines(self) -> dict[str, float]:
        """Samples by name with labels."""
        text = generate_latest(self._registry).decode()
        rows = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in rows}


def test_numbers_by_engine_and_reason(page: Page) -> None:
    page.metrics.observe({"hits": 2, "loaded_tokens": 640, "not_loaded.not_stored": 3}, 1)
    page.metrics.observe({"hits": 1, "not_saved.already_stored": 7, "load_seconds": [0.003, 0.7]}, 1)
    lines = page.lines()
    one = 'engine="1",model_name="tiny"'
    assert lines[f"vllm:prefixcache_hits_total{{{one}}}"] == 3
    assert lines[f"vllm:prefixcache_loaded_tokens_total{{{one}}}"] == 640
    assert lines[f'vllm:prefixcache_not_loaded_total{{{one},reason="not_stored"}}'] == 3
    assert lines[f'vllm:prefixcache_not_saved_total{{{one},reason="already_stored"}}'] == 7
    assert lines[f"vllm:prefixcache_load_seconds_count{{{one}}}"] == 2
    assert lines['vllm:prefixcache_load_seconds_bucket{engine="1",le="0.005",model_name="tiny"}'] == 1


def test_counters_are_there_before_anything_is_counted(page: Page) -> None:
    assert page.lines()['vllm:prefixcache_hits_total{engine="0",model_name="tiny"}'] == 0


def test_what_is_not_known_ends_nothing(page: Page) -> None:
    before = page.lines()
    page.metrics.observe({"of_a_later_version": 1, "of_another.reason": 1})
    assert page.lines() == before


def test_no_page_in_versions_without(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_vllm.install(monkeypatch, new=False)
    stats = importlib.import_module("prefixcache_vllm.stats")
    assert stats.metrics_page(None, {}, LABELS, {}) is None


def test_steps_and_ranks_add_up(stats: Any) -> None:
    one = stats.stats_of({"loads": 1, "load_seconds": [0.25]})
    both = one.aggregate(stats.stats_of({"loads": 2, "load_seconds": [0.5, 0.75], "hits": 1}))
    assert both.reduce() == {"hits": 1, "load_seconds_max": 0.75, "load_seconds_mean": 0.5, "loads": 3}
    assert one.data == {"loads": 1, "load_seconds": [0.25]}, "what was added to stays as it was"
    both.reset()
    assert both.is_empty()
