"""Making room, synchronously, before slots are handed out.

Rules: leaf by leaf, least valuable first, until there is enough or nothing may go; never waits, never looks at more
than what it evicts. A leaf that is pinned is parked and comes back with its pin. Must not know: who wants the room.
"""

from __future__ import annotations

from prefixcache.core.policy.base import Bids, EvictionPolicy
from prefixcache.core.radix import Node
from prefixcache.core.removal import Remover
from prefixcache.core.state import State


class Evictor:
    """Evicts for a slot class (stride in bytes) of the host pool."""

    def __init__(self, state: State, remover: Remover) -> None:
        self.state = state
        self.remover = remover

    def free_up(self, stride: int, wanted: int, bids: Bids | None = None) -> bool:
        """Evicts blocks that use this class until `wanted` slots are free, or as many as the `bids` that do
        not give up need (of one slot each). False: nothing more may go."""
        pool = self.state.host
        while (missing := wanted - pool.free_slots(stride)) > 0:
            policy = self.oldest_policy(stride, using=True)
            if policy is None:
                return False
            node = policy.victim()
            assert node is not None
            assert node.space is not None
            each = node.space.strides.count(stride)
            blocks = -(-missing // each)
            if bids is not None and (fewer := bids.give_up(policy.victim_worth(), blocks)):
                wanted -= fewer * each
                continue
            self.evict_from(policy, blocks)
        return True

    def evict_from(self, policy: EvictionPolicy, most: int) -> int:
        """Evicts up to `most` blocks off the tail of the policy's victim; parks it if it is pinned."""
        node = policy.victim()
        if node is None:
            return 0
        count = self._evictable(policy, node, most)
        if count:
            self.remover.evict_tail(node, count)
        else:
            policy.remove_leaf(node)
        return count

    def oldest_policy(self, stride: int, *, using: bool) -> EvictionPolicy | None:
        """The policy with the oldest victim among those whose blocks use this class (or do not)."""
        best = None
        best_tick = 0
        for signature, policy in self.state.policies.items():
            if (stride in signature) is using:
                victim = policy.victim()
                if victim is not None and (best is None or victim.tick < best_tick):
                    best, best_tick = policy, victim.tick
        return best

    def _evictable(self, policy: EvictionPolicy, node: Node, most: int) -> int:
        """How many blocks off the tail are unpinned and may go in one step (at least one, if unpinned)."""
        loose = node.end - node.pinned_depth()
        if loose <= 1 or most == 1:
            return min(loose, 1)
        return policy.run_length(node, min(loose, most))
