"""Priorities in the simulator: what each stored block was last asked to be, and that the right leaf would go next.

A restart forgets them (records on disk hold none).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixcache.core.commands import Command, Reserved
from prefixcache.core.events import ReserveRequested
from prefixcache.core.ids import KEY_BYTES, NamespaceKind
from prefixcache.core.policy.lru import LeafLru
from prefixcache.core.policy.prioritised import Prioritised
from prefixcache.core.policy.tiered import TieredLeaves
from prefixcache.core.radix import NOT_QUEUED, Node, subtree
from prefixcache.core.table import LOW, NORMAL
from tests.sim.audit import visible_nodes
from tests.sim.fakes import SimError

if TYPE_CHECKING:
    from tests.sim.simulator import Simulator


class Priorities:
    """`asked`: by namespace and key, since the key was granted."""

    def __init__(self, simulator: Simulator) -> None:
        self.sim = simulator
        self.asked: dict[int, dict[bytes, int]] = {}

    def forget(self) -> None:
        self.asked.clear()

    def recovered(self, namespace: int, keys: set[bytes]) -> None:
        """Blocks came from an earlier run."""
        for key in keys:
            self.asked.get(namespace, {}).pop(key, None)

    def reserve(self, event: ReserveRequested) -> list[Command]:
        """Sends it, and remembers what it asks for."""
        space = self.sim.planner.state.namespaces[event.namespace]
        keys = [event.keys[at : at + KEY_BYTES] for at in range(0, len(event.keys), KEY_BYTES)]
        if space.spec.kind is NamespaceKind.FOREIGN:
            there = [key for key in keys[event.from_block :] if key in self.sim.visible[event.namespace]]
        else:
            there = keys[: space.tree.walk(event.keys).blocks]
        replies = self.sim.send(event)
        reply = next((each for each in replies if isinstance(each, Reserved)), None)
        asked = self.asked.setdefault(event.namespace, {})
        if reply is not None and not self.sim.planner.state.draining:
            for key in there:
                asked[key] = max(asked.get(key, NORMAL), event.priority)
            for block in reply.blocks.tolist():
                if keys[block] not in there:
                    asked[keys[block]] = event.priority
        return replies

    def check(self) -> None:
        for space in self.sim.planner.state.namespaces.values():
            if space.table.prioritised and (space.has_full or space.foreign is not None):
                asked = self.asked.get(space.number, {})
                for rows, keys in visible_nodes(space):
                    for key, priority in zip(keys, space.table.priority[rows].tolist(), strict=True):
                        if priority != asked.get(key, NORMAL):
                            raise SimError(f"a block has priority {priority} instead of {asked.get(key, NORMAL)}")
        for policy in self.sim.planner.state.policies.values():
            for side in policy.both if isinstance(policy, TieredLeaves) else (policy,):
                if isinstance(side, Prioritised) and isinstance(side.policy, LeafLru):
                    self._check_victim(side)

    def _check_victim(self, side: Prioritised) -> None:
        """Low before normal before high; what was not used for long enough has no priority any more."""
        victim = side.victim()
        if victim is None:
            return
        leaves = [leaf for leaf in self._leaves() if self._side_of(leaf) is side]
        faded = side.faded_tick()
        if min(leaves, key=lambda leaf: _rank(leaf, faded)).tick != victim.tick:
            raise SimError("another leaf should go next")

    def _leaves(self) -> list[Node]:
        spaces = self.sim.planner.state.namespaces.values()
        return [node for space in spaces for node in subtree(space.tree.root) if node.rank != NOT_QUEUED]

    def _side_of(self, leaf: Node) -> object:
        assert leaf.space is not None
        policy = leaf.space.policy
        return (policy.clean if leaf.clean else policy.dirty) if isinstance(policy, TieredLeaves) else policy


def _rank(leaf: Node, faded: int) -> tuple[int, int]:
    """Who goes first: the lowest, then the longest unused."""
    assert leaf.space is not None
    table = leaf.space.table
    own = int(table.priority[leaf.row_array()[-1]]) if table.prioritised else NORMAL
    return LOW if leaf.tick <= faded else own, leaf.tick
