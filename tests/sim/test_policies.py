"""The fault simulator under every policy: whatever goes wrong, all rules hold and the policy counts what is there."""

from __future__ import annotations

import dataclasses

import pytest

from prefixcache.core.policy.names import DEFAULT, NAMES
from prefixcache.core.policy.prioritised import Prioritised
from prefixcache.core.policy.tiered import TieredLeaves
from prefixcache.core.radix import FILLING, subtree
from prefixcache.core.spec import PlannerConfig
from tests.sim.simulator import Simulator

SEEDS = 60


class PolicySimulator(Simulator):
    """The same story as its seed tells, under another policy."""

    policy = DEFAULT

    def _config(self, generation: int) -> PlannerConfig:
        return dataclasses.replace(super()._config(generation), policy=self.policy, policy_seed=generation)


@pytest.mark.parametrize("policy", [name for name in NAMES if name != DEFAULT])
def test_seeds(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PolicySimulator, "policy", policy)
    evicted = 0
    for seed in range(SEEDS):
        simulator = PolicySimulator(seed)
        try:
            simulator.run()
            check_population(simulator)
        except Exception as error:
            raise AssertionError(f"{policy}, seed {seed}: {error!r}") from error
        evicted += simulator.planner.state.stats.blocks_evicted
    assert evicted > SEEDS


def check_population(simulator: Simulator) -> None:
    """The blocks a policy counts as there are exactly those that are stored."""
    stored: dict[int, int] = {}
    for space in simulator.planner.state.namespaces.values():
        roots = [space.tree.root, *space.limbo]
        nodes = [node for root in roots for node in subtree(root) if node.state != FILLING and not node.cold]
        stored[id(space.policy)] = stored.get(id(space.policy), 0) + sum(node.count for node in nodes)
    for policy in simulator.planner.state.policies.values():
        for side in policy.both if isinstance(policy, TieredLeaves) else (policy,):
            assert isinstance(side, Prioritised)
            population = getattr(side.policy, "_population", None)
            if population is not None:
                assert population.live == stored.get(id(policy), 0)
