"""TG: what it remembers beside a plain model, the victim beside a look at all leaves, and what it learns."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.core import invariants
from prefixcache.core.policy.ages import age_bins
from prefixcache.core.policy.prioritised import Prioritised
from prefixcache.core.policy.tree_gittins import FAMILIES, TreeGittins, class_of_new, class_seen_again
from prefixcache.core.radix import Node, subtree
from prefixcache.sim.replay import Cache, SimulatedWorker
from tests.unit.core.policy.naive import blocks_of
from tests.unit.core.policy.test_naive import BLOCK_TOKENS, Numbers

gaps = st.sampled_from([0.0, 0.1, 1.0, 3.0, 30.0, 400.0])
story = st.lists(st.tuples(st.text("abc", min_size=1, max_size=7), gaps), min_size=1, max_size=40)


def tg_of(worker: SimulatedWorker) -> TreeGittins:
    policy = worker.planner.state.namespaces[1].policy
    assert isinstance(policy, Prioritised)
    assert isinstance(policy.policy, TreeGittins)
    return policy.policy


@dataclass
class Memory:
    """What TG should know: of each block there or gone (times seen, prefix kind, last, class, time)."""

    seen: dict[str, int] = field(default_factory=dict)
    traits: dict[str, tuple[int, int]] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)

    def serve(self, prompt: str, hits: int, now: float) -> None:
        blocks = blocks_of(prompt)
        prefix = min(self.seen[blocks[hits - 1]], 2) if hits > 1 else 0
        for place, block in enumerate(blocks):
            times_seen = self.seen.get(block, 0) + 1
            last = self.traits[block][1] if block in self.traits else int(place == len(blocks) - 1)
            if place >= hits:
                self.traits[block] = (prefix, last)
            self.kinds[block] = self._kind(block, times_seen, now, len(blocks) - hits)
            self.seen[block], self.times[block] = times_seen, now

    def _kind(self, block: str, seen: int, now: float, fresh: int) -> int:
        prefix, last = self.traits[block]
        if seen == 1:
            step = sum(fresh >= edge for edge in (2, 6, 20, 60))
            return (2 * prefix + last) * 5 + step
        step = sum(seen >= edge for edge in (3, 4, 7, 17))
        return 30 + 2 * (6 * step + 2 * prefix + last) + (now - self.times[block] < 2.0)


@settings(max_examples=100, deadline=None)
@given(story=story, capacity=st.integers(8, 12))
def test_it_remembers_every_block_that_ever_was(story: list[tuple[str, float]], capacity: int) -> None:
    """With room for the longest prompt and ghosts for all blocks of three letters that fit into the story."""
    worker = SimulatedWorker(Cache(capacity, BLOCK_TOKENS, "tg"), 7)
    numbers, memory, now = Numbers(), Memory(), 0.0
    for prompt, gap in story:
        now += gap
        hits = worker.serve(numbers.request(prompt, now))
        if len(memory.seen) > 4 * 8 - 7:
            break  # from here on ghosts may be dropped
        memory.serve(prompt, hits, now)
        invariants.check(worker.planner)
        space = worker.planner.state.namespaces[1]
        columns = tg_of(worker)._columns.of(space)
        blocks = {number: block for block, number in numbers.of.items()}
        for node in subtree(space.tree.root):
            for place, row in enumerate(node.row_array().tolist()):
                block = blocks[int.from_bytes(node.edge[32 * place : 32 * place + 8], "little")]
                entry = columns[row]
                assert entry["seen"] == memory.seen[block]
                assert entry["class"] == memory.kinds[block], block
                assert entry["time"] == memory.times[block]


@settings(max_examples=60, deadline=None)
@given(story=story, capacity=st.integers(1, 12))
def test_the_victim_is_worth_least_of_all_leaves(story: list[tuple[str, float]], capacity: int) -> None:
    worker = SimulatedWorker(Cache(capacity, BLOCK_TOKENS, "tg"), 7)
    numbers, now = Numbers(), 0.0
    for prompt, gap in story:
        now += gap
        worker.serve(numbers.request(prompt, now))
        policy = tg_of(worker)
        victim = policy.victim()
        leaves = [node for node in subtree(worker.planner.state.namespaces[1].tree.root) if node.rank >= 0]
        if victim is None:
            assert not leaves
            continue
        worths = {node: worth_of(policy, node, now) for node in leaves}
        assert worths[victim] == min(worths.values()) == policy.victim_worth()
        assert policy.victim() is victim  # however often it is asked


def worth_of(policy: TreeGittins, node: Node, now: float) -> float:
    assert node.space is not None
    entry = policy._columns.of(node.space)[node.row_array()[-1]]
    return float(policy._reuse.worth[entry["class"], age_bins(np.array([now - entry["time"]]))[0]])


def test_classes_do_not_overlap_and_pairs_are_families() -> None:
    new = {int(class_of_new(fresh, np.array([t]))[0]) for t in range(6) for fresh in (1, 3, 10, 40, 99)}
    again = {
        int(class_seen_again(np.array([seen]), np.array([t]), np.array([wait]))[0])
        for t in range(6)
        for seen in (2, 3, 5, 10, 99)
        for wait in (0.5, 5.0)
    }
    assert (len(new), len(again)) == (30, 60)
    assert new | again == set(range(len(FAMILIES)))
    assert len(set(FAMILIES.tolist())) == 60


def test_a_round_that_does_not_fit_is_kept_in_part() -> None:
    """Ten prompts in turn, room for half of them: the least recently used is always the one that comes next."""
    hits = {}
    for policy in ("lru", "tg"):
        worker = SimulatedWorker(Cache(40, BLOCK_TOKENS, policy), 8)
        numbers = Numbers()
        served = [worker.serve(numbers.request("abcdefghij"[step % 10] * 8, step * 1.5)) for step in range(1000)]
        hits[policy] = sum(served[500:]) / (500 * 8)
    assert hits["lru"] == 0
    assert hits["tg"] > 0.3


def test_ghosts_and_what_is_learnt_are_bounded() -> None:
    worker = SimulatedWorker(Cache(10, BLOCK_TOKENS, "tg"), 40)
    numbers = Numbers()
    for second in range(200):
        worker.serve(numbers.request(chr(0x4E00 + second) * 8, float(second)))
    policy = tg_of(worker)
    assert len(policy._ghosts) <= 40
    waiting = policy._reuse._exposure.by_age(200.0).sum()
    assert waiting == len(policy._ghosts) + policy._population.live


def test_one_seed_one_story() -> None:
    results = set()
    for _ in range(2):
        worker = SimulatedWorker(Cache(300, BLOCK_TOKENS, "tg", seed=4), 40)
        numbers = Numbers()
        prompts = [chr(0x4E00 + (step * step) % 211) * (1 + step % 5) for step in range(600)]
        results.add(tuple(worker.serve(numbers.request(prompt, float(step))) for step, prompt in enumerate(prompts)))
    assert len(results) == 1
