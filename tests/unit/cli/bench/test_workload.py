"""Prompts made from their number: the same every time, sharing heads and nothing else, keyed by their tokens."""

from __future__ import annotations

from prefixcache.cli.bench.workload import HEADS, ROOT, Prompts
from prefixcache.identity import block_keys


def test_keys_are_those_of_the_tokens() -> None:
    prompts = Prompts(512, 64)
    for number in (0, 1, 999):
        assert prompts.keys(number) == block_keys(ROOT, prompts.packed(number), 64)
        assert len(prompts.keys(number)) == prompts.blocks * 32


def test_prompts_share_one_of_the_heads_only() -> None:
    prompts = Prompts(512, 64)
    keys = {number: prompts.keys(number) for number in range(2 * HEADS)}
    assert len({key[:32] for key in keys.values()}) == HEADS
    assert keys[0][:32] == keys[HEADS][:32]
    tails = [key[i : i + 32] for key in keys.values() for i in range(32, len(key), 32)]
    assert len(set(tails)) == len(tails)
