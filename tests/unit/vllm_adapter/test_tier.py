"""The tier as vLLM's tiering manager calls it, against a real daemon."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.e2e.processes import DaemonProcess, wait_until
from tests.unit.vllm_adapter import stub_offload
from tests.unit.vllm_adapter.stub_offload import JobResult, LookupResult
from tests.unit.vllm_adapter.test_chunks import folder, offloading_spec, vllm_config
from tests.unit.vllm_adapter.test_identity import kv_config

__all__ = ["folder"]

ROW, CHUNKS = 8192, 16
MakeTier = Callable[..., Any]


def key(number: int, group: int = 0) -> bytes:
    return b"%032d" % number + group.to_bytes(4, "big")


def context(request: str = "r") -> Any:
    return SimpleNamespace(req_id=request, get_offload_key_position=lambda each: 32 * int(each[:32]))


def job(number: int, keys: list[bytes], chunks: list[int], rows_name: str = "chunk_ids") -> Any:
    rows = {rows_name: np.array(chunks, np.int32)}
    return SimpleNamespace(job_id=number, keys=keys, req_context=context(), **rows)


@pytest.fixture
def make(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: Path, daemon: DaemonProcess
) -> Iterator[MakeTier]:
    """Makes tiers as vLLM does; `changes`: of its config. They are shut down at the end. Parameter: a new vLLM?"""
    new = getattr(request, "param", True)
    stub_offload.install(monkeypatch, new=new)
    from prefixcache_vllm.tier import PrefixCacheTier

    made = []

    def connector(vllm_config: Any, kv_cache_config: Any, view: memoryview, **settings: Any) -> Any:
        return PrefixCacheTier(
            offloading_spec=offloading_spec(), primary_kv_view=view, tier_type="PrefixCacheTier",
            **{"backpressure_detector": None} if new else {},
            **{"prefixcache.address": f"unix://{daemon.socket}"} | settings,
        )  # fmt: skip

    def make_one(rows: Any, settings: dict[str, Any] | None = None, **changes: Any) -> Any:
        made.append(connector(vllm_config(folder, **changes), kv_config(), memoryview(rows), **settings or {}))
        return made[-1]

    yield make_one
    for tier in made:
        tier.shutdown()


def rows_of(seed: int) -> Any:
    return np.random.default_rng(seed).integers(-128, 128, (CHUNKS, ROW)).astype(np.int8)


def ended(tier: Any, number: int) -> JobResult:
    found: list[JobResult] = []
    assert wait_until(lambda: found.extend(tier.get_finished_jobs()) or any(each.job_id == number for each in found))
    return next(each for each in found if each.job_id == number)


def answers(tier: Any, keys: list[bytes], request: str = "r") -> list[LookupResult]:
    def look() -> list[LookupResult]:
        found = [tier.lookup(each, context(request)) for each in keys]
        tier.on_schedule_end(None)
        return found

    assert look()[0] in (LookupResult.RETRY, LookupResult.MISS)
    assert wait_until(lambda: LookupResult.RETRY not in look())
    return look()


def test_spilled_by_one_engine_and_promoted_by_another(make: MakeTier) -> None:
    source, target = rows_of(1), np.zeros((CHUNKS, ROW), np.int8)
    first = make(source)
    first.on_new_request(context())
    keys = [key(number) for number in (3, 1, 2)]
    first.submit_store(job(2, keys, [7, 0, 12]))
    result = ended(first, 2)
    assert (result.success, result.transfer_bytes) == (True, 3 * ROW)
    second = make(target)
    assert answers(second, [*keys, key(9)]) == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    second.submit_load(job(4, keys, [5, 6, 15]))
    assert ended(second, 4).success
    assert np.array_equal(target[[5, 6, 15]], source[[7, 0, 12]])
    counters = second.get_stats().counters
    assert {labels: count for (_, labels), count in counters.items()} == {
        ("loaded", ""): 3, ("not_found", "not_cached"): 1
    }  # fmt: skip
    second.submit_load(job(6, [key(1), key(8)], [1, 2]))
    result = ended(second, 6)
    assert (result.success, result.successful_keys) == (False, (key(1),))
    second.on_request_finished(context())
    assert len(second._spill.lookups) == 0


@pytest.mark.parametrize("make", [False], indirect=True)
def test_a_vllm_that_calls_things_by_other_names(make: MakeTier) -> None:
    source = rows_of(1)
    tier = make(source)
    tier.submit_store(job(1, [key(1), key(2)], [7, 0], "block_ids"))
    assert ended(tier, 1).success
    tier.submit_load(job(2, [key(2)], [5], "block_ids"))
    assert ended(tier, 2).success
    assert np.array_equal(source[5], rows_of(1)[0])


def test_changed_weights_find_nothing(make: MakeTier) -> None:
    tier = make(rows_of(1))
    tier.submit_store(job(1, [key(1)], [0]))
    assert ended(tier, 1).success
    tier.drain_jobs()
    assert answers(tier, [key(1)]) == [LookupResult.MISS]
    assert answers(make(rows_of(2)), [key(1)]) == [LookupResult.HIT], "others have not changed theirs"


def test_an_engine_that_cannot_share_works_without(make: MakeTier, caplog: pytest.LogCaptureFixture) -> None:
    tier = make(rows_of(1), lora_config=object())
    assert tier.reason_off == "lora_names"
    assert "lora_names" in caplog.text
    assert tier.lookup(key(1), context()) is LookupResult.MISS
    tier.submit_store(job(1, [key(1)], [0]))
    tier.submit_load(job(2, [key(1)], [0]))
    assert [(each.job_id, each.success) for each in tier.get_finished_jobs()] == [(1, False), (2, False)]
    assert list(tier.get_finished_jobs()) == []
    assert tier.get_stats() is None
    tier.on_schedule_end(None)
    tier.on_request_finished(context())
    tier.drain_jobs()


def test_wrong_settings_and_the_metrics_name(make: MakeTier) -> None:
    with pytest.raises(ValueError, match="means nothing to this tier"):
        make(rows_of(1), {"prefixcache.load": "sync"})
    from prefixcache_vllm.tier import CHUNKS as NAME
    from prefixcache_vllm.tier import PrefixCacheTier

    (definition,) = PrefixCacheTier.build_metric_definitions({}).items()
    assert definition[0] == NAME
    assert definition[1].labelnames == ("result", "reason")
