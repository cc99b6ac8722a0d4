"""Those who know the future, wholly or in part, to say what a policy could reach.

`Oracle` decides inside the planner, under all its rules (leaf-first, hard cap, room before a grant). `share_of_hits`
has no planner: after each request it keeps what is worth most, so an oracle may be told less than everything.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable

from prefixcache.core.ids import KEY_BYTES
from prefixcache.core.namespaces import Namespace
from prefixcache.core.policy.base import Bids, Birth, Clock, EvictionPolicy, Forgetful
from prefixcache.core.radix import NOT_QUEUED, Node
from prefixcache.sim.trace import Trace

NEVER = 1 << 40


class Future:
    """When each block of a trace is used, by number of request; `now` is the one being served."""

    def __init__(self, trace: Trace) -> None:
        self.now = 0
        self.trace = trace
        self._uses: dict[int, list[int]] = defaultdict(list)
        for number, request in enumerate(trace.requests):
            for block in request.ids:
                self._uses[block].append(number)

    def next_use(self, block: int) -> int:
        uses = self._uses[block]
        place = bisect_right(uses, self.now)
        return uses[place] if place < len(uses) else NEVER

    def uses_after(self, block: int) -> list[int]:
        """All later requests with this block."""
        uses = self._uses[block]
        return uses[bisect_right(uses, self.now) :]


class Oracle(Forgetful):
    """The leaf whose next use is furthest in the future goes first, the deepest among equals. keeps_out: so do new
    blocks; else each of them gets its room."""

    remembers = True

    def __init__(self, future: Future, *, keeps_out: bool) -> None:
        self._future = future
        self._keeps_out = keeps_out
        self._leaves: set[Node] = set()
        self._worth = 0.0

    def add_leaf(self, node: Node, tick: int) -> None:
        node.tick, node.rank = tick, 1
        self._leaves.add(node)

    def touch_leaf(self, node: Node, tick: int) -> None:
        node.tick = tick

    def retick_leaf(self, node: Node, tick: int) -> None:
        node.tick = tick

    def remove_leaf(self, node: Node) -> None:
        if node.rank != NOT_QUEUED:
            self._leaves.discard(node)
            node.rank = NOT_QUEUED

    def victim(self) -> Node | None:
        if not self._leaves:
            return None
        last = max(self._leaves, key=lambda node: (self._future.next_use(_blocks(node.edge)[-1]), node.end))
        self._worth = -float(self._future.next_use(_blocks(last.edge)[-1]))
        return last

    def victim_worth(self) -> float:
        return self._worth

    def run_length(self, node: Node, most: int) -> int:
        return 1

    def leaf_count(self) -> int:
        return len(self._leaves)

    def expected(self, space: Namespace, keys: bytes, birth: Birth) -> Bids | None:
        if not self._keeps_out:
            return None
        return Bids([-float(self._future.next_use(block)) - 0.5 for block in _blocks(keys)])


def oracle(future: Future, *, keeps_out: bool) -> Callable[[Clock, int], EvictionPolicy]:
    """For the registry."""
    return lambda clock, seed: Oracle(future, keeps_out=keeps_out)


def rate_to_come(future: Future, block: int) -> float:
    """Uses still to come over the time until the last of them: who comes back and how often, not when."""
    uses = future.uses_after(block)
    if not uses:
        return 0.0
    requests = future.trace.requests
    return len(uses) / max(requests[uses[-1]].time_s - requests[future.now].time_s, 1e-3)


def soonest(future: Future, block: int) -> float:
    """Everything is known."""
    return -float(future.next_use(block))


def blurred(error_s: float) -> Callable[[Future, int], float]:
    """Which blocks come back is known, and when but for an error of this standard deviation, one for each use."""
    rng = random.Random(1)
    errors: dict[int, float] = {}

    def worth(future: Future, block: int) -> float:
        use = future.next_use(block)
        if use == NEVER:
            return float("-inf")
        requests = future.trace.requests
        error = errors.setdefault(use, rng.gauss(0, error_s))
        return -max(requests[use].time_s + error, requests[future.now].time_s)

    return worth


def share_of_hits(trace: Trace, blocks: int, block_tokens: int, worth: Callable[[Future, int], float]) -> float:
    """Token hit ratio where after each request the `blocks` of most worth stay, the least deep among equals."""
    future = Future(trace)
    held: dict[int, int] = {}  # block -> depth
    hit_tokens = 0
    for number, request in enumerate(trace.requests):
        future.now = number
        hits = next((depth for depth, block in enumerate(request.ids) if block not in held), len(request.ids))
        hit_tokens += min(block_tokens * hits, request.tokens)
        held.update({block: depth for depth, block in enumerate(request.ids)})
        ranked = sorted(held, key=lambda block: (-worth(future, block), held[block]))
        held = {block: held[block] for block in ranked[:blocks]}
    return hit_tokens / trace.tokens


def _blocks(keys: bytes) -> list[int]:
    return [int.from_bytes(keys[at : at + 8], "little") for at in range(0, len(keys), KEY_BYTES)]
