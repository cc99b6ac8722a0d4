"""The clairvoyant optimum beside all that could be done, and above every policy."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.core.policy.names import NAMES
from prefixcache.sim.optimum import optimum
from prefixcache.sim.replay import Cache, replay
from prefixcache.sim.trace import Request, Trace
from tests.unit.sim.traces import BLOCK_TOKENS, made_up


def trace_of(prompts: list[str]) -> Trace:
    numbers: dict[str, int] = {}
    requests = []
    for step, prompt in enumerate(prompts):
        ids = [numbers.setdefault(prompt[:end], len(numbers)) for end in range(1, len(prompt) + 1)]
        requests.append(Request(float(step), len(ids) * BLOCK_TOKENS, tuple(ids)))
    return Trace("tiny", tuple(requests))


def best_of_all(prompts: list[str], capacity: int) -> int:
    """The most blocks that any choice of what to keep after each prompt can hit."""
    paths = [[prompt[:end] for end in range(1, len(prompt) + 1)] for prompt in prompts]

    @cache
    def best(step: int, held: frozenset[str]) -> int:
        if step == len(paths):
            return 0
        path = paths[step]
        hits = next((place for place, block in enumerate(path) if block not in held), len(path))
        there = sorted(held | set(path))
        whole = [
            frozenset(kept)
            for size in range(min(capacity, len(there)) + 1)
            for kept in combinations(there, size)
            if all(len(block) == 1 or block[:-1] in kept for block in kept)
        ]
        return hits + max(best(step + 1, kept) for kept in whole)

    return best(0, frozenset())


@settings(max_examples=120, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=6), st.integers(1, 4))
def test_nothing_does_better(prompts: list[str], capacity: int) -> None:
    assert optimum(trace_of(prompts), capacity, BLOCK_TOKENS).hit_blocks == best_of_all(prompts, capacity)


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("blocks", [3, 20, 60, 10_000])
def test_no_policy_does_better(policy: str, blocks: int) -> None:
    trace = made_up(300, 3)
    best = optimum(trace, blocks, BLOCK_TOKENS)
    assert replay(trace, Cache(blocks, BLOCK_TOKENS, policy)).hit_blocks <= best.hit_blocks


def test_only_what_is_kept_was_written() -> None:
    assert optimum(trace_of(["ab", "cd", "ab"]), 2, BLOCK_TOKENS).blocks_written == 2
    assert optimum(trace_of(["ab", "cd", "ef"]), 2, BLOCK_TOKENS).blocks_written == 0


def test_deeper_blocks_go_first() -> None:
    outcome = optimum(trace_of(["abc", "abc"]), 2, BLOCK_TOKENS)
    assert (outcome.hit_blocks, outcome.hit_tokens) == (2, 2 * BLOCK_TOKENS)
