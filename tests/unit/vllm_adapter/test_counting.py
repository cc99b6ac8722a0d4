"""Counters as flat numbers."""

from collections import Counter

from prefixcache_vllm.counting import REASONED, TOTALS, added, difference, of_drafts, scheduler_numbers, worker_numbers
from prefixcache_vllm.transfers import Counts


def test_numbers() -> None:
    counts = Counts(
        loads=2, load_bytes=10, load_seconds=[0.5, 0.25], loads_failed=Counter(lease_lost=1), saved_blocks=3
    )  # fmt: skip
    worker = worker_numbers(counts, 64)
    assert worker == {
        "loads": 2, "load_bytes": 10, "load_seconds": [0.5, 0.25], "load_failed.lease_lost": 1, "saved_blocks": 3,
        "saved_tokens": 192,
    }  # fmt: skip
    first = scheduler_numbers({"loaded_tokens": 64}, {"not_stored": 1}, {}, {})
    second = scheduler_numbers({"loaded_tokens": 128}, {"not_stored": 1}, {"pooling": 2}, {"eagle": 1})
    assert difference(second, first) == {
        "loaded_tokens": 64, "left_alone.pooling": 2, "draft_not_loaded.eagle": 1,
    }  # fmt: skip
    assert added(worker, {"loads": 1, "hits": 1}) == worker | {"loads": 3, "hits": 1}


def test_a_draft_models_numbers_have_names_of_their_own() -> None:
    named = of_drafts({"loads": 2, "not_saved.queue_full": 1, "load_seconds": [0.5]})
    assert named == {"draft_loads": 2, "draft_not_saved.queue_full": 1}
    assert "draft_loads" in TOTALS
    assert "draft_not_saved" in REASONED
