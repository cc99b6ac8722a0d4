"""A trace through the planner: what counts as a hit, how much is held, and that rules hold on the way."""

from __future__ import annotations

import pytest

from prefixcache.core import invariants
from prefixcache.core.ids import SLOT_GRANULE
from prefixcache.core.policy.names import NAMES
from prefixcache.sim.replay import Cache, SimulatedWorker, replay
from prefixcache.sim.sweep import KNOWN_POLICIES, Plan, sweep
from prefixcache.sim.trace import Request, Trace
from tests.unit.sim.traces import BLOCK_TOKENS, made_up


def test_a_partial_last_block_is_a_block_and_counts_by_its_tokens() -> None:
    prompt = Request(0.0, 1000, (1, 2))
    longer = Request(1.0, 1400, (1, 2, 3))
    trace = Trace("two", (prompt, prompt, longer, Request(2.0, 0, ())))
    outcome = replay(trace, Cache(10, 512, "lru"))
    assert (outcome.hit_blocks, outcome.hit_tokens) == (4, 1000 + 1024)
    assert outcome.blocks_written == 3


def test_a_prompt_longer_than_the_cache_is_held_in_part() -> None:
    trace = Trace("long", (Request(0.0, 2560, (1, 2, 3, 4, 5)),) * 2)
    outcome = replay(trace, Cache(3, 512, "lru"))
    assert (outcome.hit_blocks, outcome.blocks_written) == (3, 3)


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("blocks", [1, 7, 50])
def test_never_more_than_the_capacity_and_all_rules_hold(policy: str, blocks: int) -> None:
    trace = made_up(120, 5)
    worker = SimulatedWorker(Cache(blocks, BLOCK_TOKENS, policy), 100)
    for request in trace.requests:
        worker.serve(request)
        assert worker.planner.state.host.used_bytes <= blocks * SLOT_GRANULE
        invariants.check(worker.planner)
    assert worker.planner.state.host.used_bytes == blocks * SLOT_GRANULE


def test_times_before_zero_and_capacities_beyond_all_bounds() -> None:
    trace = Trace("odd", (Request(-5.0, 1024, (1, 2)), Request(-4.0, 1024, (1, 2))))
    (row,) = sweep(trace, Plan(("tg",), (1 << 60,), 512))
    assert (row.capacity_blocks, row.token_hit_ratio) == (1 << 60, 0.5)


@pytest.mark.parametrize("policy", NAMES)
def test_room_for_everything_makes_every_policy_the_same(policy: str) -> None:
    trace = made_up(200, 6)
    outcome = replay(trace, Cache(trace.unique_blocks, BLOCK_TOKENS, policy))
    assert outcome.blocks_written == trace.unique_blocks
    assert outcome.hit_blocks == trace.blocks - trace.unique_blocks


def test_a_sweep_has_a_row_per_policy_and_capacity_and_tells_how_far_it_is() -> None:
    trace = made_up(600, 7)
    told: dict[str, int] = {}

    def begin(label: str):  # type: ignore[no-untyped-def]  # a closure in a test
        told[label] = 0

        def advance(requests: int) -> None:
            told[label] += requests

        return advance

    rows = list(sweep(trace, Plan(("lru", "optimum"), (20, 40), BLOCK_TOKENS, block_bytes=1 << 20), begin))
    assert [(row.policy, row.capacity_blocks) for row in rows] == [
        ("lru", 20), ("lru", 40), ("optimum", 20), ("optimum", 40),
    ]  # fmt: skip
    assert list(told.values()) == [512] * 4
    assert all(row.bytes_written == row.blocks_written << 20 for row in rows)
    assert all(0 <= row.token_hit_ratio <= 1 and 0 <= row.block_hit_ratio <= 1 for row in rows)
    for row in rows:
        copied_s = row.blocks_read * (1 << 20) / 20e9 if row.policy == "lru" else 0.0
        assert row.load_s == pytest.approx(copied_s)
        assert row.saved_prefill_s == pytest.approx(row.token_hit_ratio * trace.tokens / 10_000 - copied_s)
    (host,) = rows[0].tiers
    assert (host.tier, host.capacity_blocks, host.token_hit_ratio) == ("host", 20, rows[0].token_hit_ratio)
    assert (host.blocks_written, host.blocks_read) == (rows[0].blocks_written, rows[0].blocks_read)
    assert rows[-1].tiers == ()
    assert "bytes_read" not in next(iter(sweep(trace, Plan(("lru",), (20,), BLOCK_TOKENS)))).as_json()
    assert set(KNOWN_POLICIES) == {*NAMES, "optimum"}
