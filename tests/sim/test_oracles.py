"""The planner stands in nobody's way: who knows the future reaches the clairvoyant optimum through it."""

from __future__ import annotations

import pytest

from prefixcache.core.policy.registry import POLICIES
from prefixcache.sim.optimum import optimum
from prefixcache.sim.replay import Cache, SimulatedWorker
from prefixcache.sim.trace import Trace
from tests.sim.oracles import Future, oracle, rate_to_come, share_of_hits, soonest
from tests.unit.sim.traces import BLOCK_TOKENS, made_up


def percent_through_planner(
    monkeypatch: pytest.MonkeyPatch, trace: Trace, blocks: int, block_tokens: int, *, keeps_out: bool
) -> float:
    """Token hits of an oracle in the planner's place."""
    future = Future(trace)
    monkeypatch.setitem(POLICIES, "oracle", oracle(future, keeps_out=keeps_out))  # type: ignore[arg-type]  # a dict
    longest = max(len(request.ids) for request in trace.requests)
    worker = SimulatedWorker(Cache(blocks, block_tokens, "oracle"), longest, trace.requests[0].time_s)
    for number, request in enumerate(trace.requests):
        future.now = number
        worker.serve(request)
    return 100 * worker.outcome(0.0).hit_tokens / trace.tokens


@pytest.mark.parametrize("blocks", [3, 20, 60])
def test_an_oracle_in_the_planners_place_reaches_the_optimum(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    trace = made_up(200, 3)
    best = 100 * optimum(trace, blocks, BLOCK_TOKENS).hit_tokens / trace.tokens
    assert percent_through_planner(monkeypatch, trace, blocks, BLOCK_TOKENS, keeps_out=True) == pytest.approx(best)
    assert percent_through_planner(monkeypatch, trace, blocks, BLOCK_TOKENS, keeps_out=False) <= best


@pytest.mark.parametrize("blocks", [3, 20, 60])
def test_who_knows_less_reaches_less(blocks: int) -> None:
    trace = made_up(200, 3)
    best = optimum(trace, blocks, BLOCK_TOKENS).hit_tokens / trace.tokens
    assert share_of_hits(trace, blocks, BLOCK_TOKENS, soonest) == pytest.approx(best)
    assert share_of_hits(trace, blocks, BLOCK_TOKENS, rate_to_come) <= best
