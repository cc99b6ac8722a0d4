"""The clairvoyant optimum: Belady's rule with bypass, as the ceiling that no policy can pass by more than luck.

Rules: after a request, whatever is used again furthest in the future goes first, deeper blocks first among equals (a
prefix then always outlives what follows it); a block that is never used again is not kept at all. A new block that
would go at once was never written. Must not know: planner, policies.
"""

from __future__ import annotations

import heapq
import time
from typing import Final

from prefixcache.sim.replay import Outcome, Progress
from prefixcache.sim.trace import Request, Trace

_NEVER: Final = 1 << 62
_TELL_EVERY: Final = 256


def optimum(trace: Trace, blocks: int, block_tokens: int, progress: Progress | None = None) -> Outcome:
    """Replays a trace with knowledge of all of it into an empty cache of so many blocks."""
    began = time.perf_counter()
    future = _next_uses(trace.requests)
    cache = _Cache(blocks)
    hit_tokens = hit_blocks = 0
    for number, request in enumerate(trace.requests):
        hits = cache.serve(request.ids, future[number])
        hit_blocks += hits
        hit_tokens += min(block_tokens * hits, request.tokens)
        if progress is not None and number % _TELL_EVERY == _TELL_EVERY - 1:
            progress(_TELL_EVERY)
    return Outcome(hit_tokens, hit_blocks, cache.written, time.perf_counter() - began)


def _next_uses(requests: tuple[Request, ...]) -> list[list[int]]:
    """For each block of each request, the number of the next request that has it."""
    upcoming: dict[int, int] = {}
    future: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        ids = requests[number].ids
        future.append([upcoming.get(block, _NEVER) for block in ids])
        upcoming.update(dict.fromkeys(ids, number))
    future.reverse()
    return future


class _Cache:
    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.written = 0
        self._held: dict[int, tuple[int, int]] = {}  # block -> (-next use, -depth)
        self._order: list[tuple[int, int, int]] = []  # (-next use, -depth, block), stale ones too

    def serve(self, ids: tuple[int, ...], next_uses: list[int]) -> int:
        held = self._held
        hits = next((depth for depth, block in enumerate(ids) if block not in held), len(ids))
        fresh = {block for block in ids if block not in held}
        for depth, (block, use) in enumerate(zip(ids, next_uses, strict=True)):
            held[block] = (-use, -depth)
            heapq.heappush(self._order, (-use, -depth, block))
        while self._order and (len(held) > self.blocks or self._order[0][0] == -_NEVER):
            use, depth, block = heapq.heappop(self._order)
            if held.get(block) == (use, depth):
                del held[block]
                fresh.discard(block)
        self.written += len(fresh)
        return hits
