"""Each policy inside the planner beside its plain model: the same hits and the same blocks there after every prompt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.core import invariants
from prefixcache.core.ids import KEY_BYTES, SLOT_GRANULE
from prefixcache.core.radix import subtree
from prefixcache.sim.replay import Cache, SimulatedWorker
from prefixcache.sim.trace import Request
from tests.unit.core.policy.naive import (
    NaiveArc,
    NaiveCache,
    NaiveGdsf,
    NaiveLru,
    NaiveLru2,
    NaiveS3Fifo,
    Rule,
    blocks_of,
)

BLOCK_TOKENS = 4096  # attention counts at depths that small tests reach

RULES: dict[str, Callable[[int], Rule]] = {
    "lru": lambda capacity: NaiveLru(),
    "lru2": NaiveLru2,
    "arc": lambda capacity: NaiveArc(),
    "s3fifo": lambda capacity: NaiveS3Fifo(),
    "gdsf": lambda capacity: NaiveGdsf(BLOCK_TOKENS, SLOT_GRANULE),
}

prompts = st.lists(st.text("abc", min_size=1, max_size=7), min_size=1, max_size=40)


class Numbers:
    """A number per block, as a trace has it."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}

    def request(self, prompt: str, time_s: float = 0.0) -> Request:
        blocks = blocks_of(prompt)
        ids = tuple(self.of.setdefault(block, len(self.of) + 1) for block in blocks)
        return Request(time_s, len(blocks) * BLOCK_TOKENS, ids)

    def held(self, worker: SimulatedWorker) -> set[str]:
        """What a planner holds, as blocks."""
        blocks = {number: block for block, number in self.of.items()}
        space = worker.planner.state.namespaces[1]
        edges = [node.edge for node in subtree(space.tree.root)]
        keys = [edge[at : at + 8] for edge in edges for at in range(0, len(edge), KEY_BYTES)]
        return {blocks[int.from_bytes(key, "little")] for key in keys}


@pytest.mark.parametrize("policy", RULES)
@settings(max_examples=150, deadline=None)
@given(prompts=prompts, capacity=st.integers(1, 12))
def test_the_planner_and_the_plain_model_agree(policy: str, prompts: list[str], capacity: int) -> None:
    worker = SimulatedWorker(Cache(capacity, BLOCK_TOKENS, policy), 7)
    model = NaiveCache(capacity, RULES[policy](capacity))
    numbers = Numbers()
    for step, prompt in enumerate(prompts):
        assert worker.serve(numbers.request(prompt, float(step))) == model.serve(prompt), prompt
        assert numbers.held(worker) == model.held, prompt
        invariants.check(worker.planner)
