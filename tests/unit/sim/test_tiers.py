"""Traces over memory and a disk: what is counted for which tier, what loading costs, and that all rules hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixcache.core import invariants
from prefixcache.core.policy.names import NAMES
from prefixcache.sim.disk import DiskModel
from prefixcache.sim.optimum import optimum
from prefixcache.sim.replay import Cache, SimulatedWorker, replay
from prefixcache.sim.sweep import Plan, sweep
from prefixcache.sim.trace import Request, Trace
from tests.unit.sim.traces import BLOCK_TOKENS, made_up

MIB = 1 << 20
FAST = 100e9


def prompts(*letters: str, pause_s: float = 10.0) -> Trace:
    """One request for each word; one block for each letter, the prefix of a word being one of the word."""
    numbers: dict[str, int] = {}
    rows = []
    for step, word in enumerate(letters):
        ids = tuple(numbers.setdefault(word[: end + 1], len(numbers)) for end in range(len(word)))
        rows.append(Request(step * pause_s, len(ids) * BLOCK_TOKENS, ids))
    return Trace("words", tuple(rows))


def test_what_memory_had_no_room_for_comes_from_disk_and_takes_its_time() -> None:
    """A block is 1 MiB and the disk reads 8 MiB a second: eight blocks take a second, computing them four."""
    words = [letter * 8 for letter in "abcdefghijkl"]
    trace = prompts(*words, words[0], pause_s=100.0)
    disk = DiskModel(400, MIB, 8 * MIB)
    outcome = replay(trace, Cache(40, BLOCK_TOKENS, "lru", disk=disk, prefill_tokens_per_s=1024.0))
    assert outcome.host is not None
    assert outcome.disk is not None
    assert outcome.hit_blocks == outcome.disk.blocks_read == 8
    assert outcome.disk.hit_tokens == outcome.hit_tokens == 8 * BLOCK_TOKENS
    assert outcome.waited_s == pytest.approx(1.0)
    assert outcome.blocks_written == 12 * 8
    assert outcome.host.blocks_written == 12 * 8 + 8
    assert outcome.disk.blocks_written >= 12 * 8 - 40


def test_a_disk_that_is_slower_than_computing_is_not_waited_for() -> None:
    words = [letter * 8 for letter in "abcdefghijkl"]
    trace = prompts(*words, words[0], pause_s=100.0)
    disk = DiskModel(400, MIB, MIB)
    outcome = replay(trace, Cache(40, BLOCK_TOKENS, "lru", disk=disk, prefill_tokens_per_s=1024.0))
    assert outcome.disk is not None
    assert (outcome.waited_s, outcome.disk.hit_tokens) == (0.0, 0)


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize(("above", "blocks", "below"), [(0, 8, 20), (20, 60, 40)])
def test_all_rules_hold_and_no_cap_is_passed(policy: str, above: int, blocks: int, below: int) -> None:
    trace = made_up(120, 5)
    disk = DiskModel(below, MIB, 1e9)
    worker = SimulatedWorker(Cache(blocks, BLOCK_TOKENS, policy, disk=disk, gpu_blocks=above), 200)
    for number, request in enumerate(trace.requests):
        worker.serve(request)
        assert worker.disk is not None
        assert worker.disk.blocks_held <= below
        assert worker.planner.state.host.used_bytes <= blocks * MIB
        if number % 20 == 0:
            invariants.check(worker.planner)
    worker.finish()
    outcome = worker.outcome(0.0)
    tokens = worker.planner.state.stats.tokens
    assert tokens.pending == 0
    assert outcome.hit_blocks * BLOCK_TOKENS == sum(tokens.hit)
    tiers = [tier for tier in (outcome.gpu, outcome.host, outcome.disk) if tier is not None]
    assert len(tiers) == 2 + bool(above)
    assert sum(tier.hit_tokens for tier in tiers) == outcome.hit_tokens
    assert outcome.hit_blocks <= optimum(trace, blocks + below, BLOCK_TOKENS).hit_blocks


@pytest.mark.parametrize("policy", NAMES)
def test_a_fast_disk_that_holds_everything_is_worth_nearly_as_much_as_memory(policy: str) -> None:
    """New blocks that are worth little in memory are stored all the same, for the disk's sake."""
    trace = made_up(200, 9)
    memory = trace.unique_blocks // 4
    alone = replay(trace, Cache(memory, BLOCK_TOKENS, policy)).hit_blocks
    disk = DiskModel(4 * trace.unique_blocks, MIB, FAST)
    below = replay(trace, Cache(memory, BLOCK_TOKENS, policy, disk=disk))
    best = optimum(trace, trace.unique_blocks, BLOCK_TOKENS).hit_blocks
    assert best >= below.hit_blocks >= alone + 0.8 * (best - alone)


def test_rows_tell_both_tiers() -> None:
    trace = made_up(150, 7)
    plan = Plan(("lru", "optimum"), (20,), BLOCK_TOKENS, block_bytes=MIB, disks=(0, 80), disk_bytes_per_s=1e9)
    alone, both, best_alone, best = (row.as_json() for row in sweep(trace, plan))
    assert [tier["tier"] for tier in alone["tiers"]] == ["host"]
    host, disk = both["tiers"]
    assert (host["tier"], host["capacity_blocks"], disk["tier"], disk["capacity_blocks"]) == ("host", 20, "disk", 80)
    assert host["token_hit_ratio"] + disk["token_hit_ratio"] == pytest.approx(both["token_hit_ratio"])
    assert disk["bytes_written"] == disk["blocks_written"] * MIB > 0
    assert host["blocks_written"] >= both["blocks_written"]
    assert both["disk_blocks"] == 80
    assert both["load_s"] > alone["load_s"]
    assert best["token_hit_ratio"] > best_alone["token_hit_ratio"]
    with pytest.raises(ValueError, match="size of a block"):
        list(sweep(trace, Plan(("lru",), (20,), BLOCK_TOKENS, disks=(80,))))


def test_a_gpu_holds_copies_of_what_is_hit_again_and_changes_nothing_else() -> None:
    trace = made_up(200, 7)
    plan = Plan(("lru",), (60,), BLOCK_TOKENS, block_bytes=MIB)
    (alone,) = sweep(trace, plan)
    (both,) = sweep(trace, replace(plan, gpu_blocks=20))
    gpu, host = both.tiers
    assert (both.token_hit_ratio, both.blocks_written) == (alone.token_hit_ratio, alone.blocks_written)
    assert (gpu.tier, gpu.capacity_blocks) == ("gpu", 20)
    assert 0 < gpu.token_hit_ratio < both.token_hit_ratio
    assert gpu.token_hit_ratio + host.token_hit_ratio == pytest.approx(both.token_hit_ratio)
    assert gpu.blocks_read + host.blocks_read == both.blocks_read
    assert gpu.blocks_written >= 20
    assert both.load_s < alone.load_s
    with pytest.raises(ValueError, match="size of a block"):
        list(sweep(trace, replace(plan, gpu_blocks=20, block_bytes=None)))


def test_more_memory_than_slots_have_numbers_for() -> None:
    with pytest.raises(ValueError, match="more than 16 TiB"):
        SimulatedWorker(Cache(1 << 20, BLOCK_TOKENS, "lru", disk=DiskModel(80, 1 << 30, 1e9)), 10)
