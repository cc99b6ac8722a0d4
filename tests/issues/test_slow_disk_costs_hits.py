"""A disk that is slower than computing cost hits that no disk at all would have had.

Blocks that went down were not stored again by the worker that computed them anew (`already_stored`), and what was on
disk left memory first, also what was hit most.
"""

import random

import pytest

from prefixcache.sim.disk import DiskModel
from prefixcache.sim.replay import Cache, replay
from prefixcache.sim.trace import Request, Trace

BLOCK_BYTES = 2 << 20
BLOCK_TOKENS = 64
MEMORY, DISK = 48, 400


def conversations() -> Trace:
    """Prompts that grow turn by turn, some of them much oftener asked than others."""
    rng = random.Random(5)
    turns = [1] * 40
    requests = []
    for number in range(400):
        which = min(int(rng.expovariate(0.15)), len(turns) - 1)
        ids = tuple(which * 1000 + block for block in range(turns[which] + 3))
        turns[which] = turns[which] % 6 + 1
        requests.append(Request(number * 0.5, len(ids) * BLOCK_TOKENS, ids))
    return Trace("conversations", tuple(requests))


def hits(trace: Trace, policy: str, bytes_per_s: float | None) -> float:
    disk = None if bytes_per_s is None else DiskModel(DISK, BLOCK_BYTES, bytes_per_s)
    return replay(trace, Cache(MEMORY, BLOCK_TOKENS, policy, disk=disk)).hit_tokens / sum(
        request.tokens for request in trace.requests
    )


@pytest.mark.parametrize(("policy", "tolerance"), [("lru", 0.005), ("tg", 0.02), ("arc", 0.05)])
def test_a_disk_slower_than_computing_costs_no_hits(policy: str, tolerance: float) -> None:
    """What of a policy's order is lost by cutting it in two is within the tolerance; of `lru` it is nothing. It was
    four fifths of all hits."""
    trace = conversations()
    without = hits(trace, policy, None)
    assert hits(trace, policy, 1e9) > without + 0.1, "a fast one adds some"
    for bytes_per_s in (1e8, 1e7):
        assert hits(trace, policy, bytes_per_s) > without - tolerance
