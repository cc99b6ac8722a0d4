"""As `scenarios`, for engines with vLLM's own tiered offload and our tier under it."""

import os
import signal
import time
from collections import Counter
from typing import Any

from tests.e2e.processes import wait_until
from tests.engines.scenarios import WAIT_S, _core, change_weights, generate


def settle(llm: Any) -> None:
    """Step until nothing is on its way between the engine, vLLM's CPU tier and ours."""
    core, until = _core(llm), time.monotonic() + WAIT_S
    while core.scheduler.has_requests() or _manager(llm).has_pending_work():
        core.step_fn()
        assert time.monotonic() < until, "transfers do not end"


def watch(llm: Any) -> int:
    """To be called before `told` and `longest_held_s`. Answers the chunks that vLLM's CPU tier has room for."""
    connector, spill = _core(llm).scheduler.connector, _tier(llm)._spill
    connector.longest_s, spill.told = 0.0, Counter()
    asked_at: dict[str, float] = {}
    match, take = connector.get_num_new_matched_tokens, spill.take_counts

    def matched(request: Any, computed: int) -> tuple[int | None, bool]:
        began = asked_at.setdefault(request.request_id, time.monotonic())
        found: tuple[int | None, bool] = match(request, computed)
        if found[0] is not None:
            connector.longest_s = max(connector.longest_s, time.monotonic() - began)
            del asked_at[request.request_id]
        return found

    def taken() -> Any:
        counts = take()
        spill.told += counts
        return counts

    connector.get_num_new_matched_tokens, spill.take_counts = matched, taken
    primary = _manager(llm).primary_tier
    return int(getattr(primary, "_num_chunks", None) or primary._num_blocks)  # versions name them in two ways


def told(llm: Any) -> dict[str, int]:
    """Chunks that the tier counted since the last call, by "result.reason"."""
    spill = _tier(llm)._spill
    spill.take_counts()
    counts, spill.told = spill.told, Counter()
    return {".".join(labels): count for labels, count in counts.items() if count}


def longest_held_s(llm: Any) -> float:
    """How long the offload kept a request from being scheduled since the last call, at worst."""
    connector = _core(llm).scheduler.connector
    longest, connector.longest_s = connector.longest_s, 0.0
    return float(longest)


def changed_weights(llm: Any, factor: float) -> bool:
    """See `scenarios.change_weights`."""
    return change_weights(llm, factor)


def kill_while_promoting(llm: Any, prompt: list[int], max_tokens: int, pid: int) -> dict[str, Any]:
    """Kill a daemon when chunks are leased and their copy is about to begin. `killed`: whether it came to that."""
    spill = _tier(llm)._spill
    original = spill._cache.acquire
    killed: list[int] = []

    def killing(*arguments: Any, **more: Any) -> Any:
        lease = original(*arguments, **more)
        if lease and not killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
            assert wait_until(lambda: not spill._client._link.session.alive)
        return lease

    spill._cache.acquire = killing
    try:
        return generate(llm, [prompt], max_tokens)[0] | {"killed": bool(killed)}
    finally:
        spill._cache.acquire = original


def _manager(llm: Any) -> Any:
    return _core(llm).scheduler.connector.connector_scheduler.manager


def _tier(llm: Any) -> Any:
    (tier,) = _manager(llm).secondary_tiers
    return tier
