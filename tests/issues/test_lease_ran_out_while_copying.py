"""A lease runs out in the middle of a copy, and its slots go to others: a miss, whatever the client's clock says."""

import math
import time
from collections.abc import Callable

import numpy as np
import pytest

from prefixcache_client import Blocks, Client, Namespace
from tests.e2e.processes import DaemonProcess
from tests.issues.conftest import store_soon
from tests.issues.workers import BLOCK_TOKENS, TOKENS, Paused, bytes_of

TTL_S = 0.2


class Interrupted(Paused):
    """Something happens between the grant and the first byte."""

    def __init__(self, blocks: Blocks, action: Callable[[], None]) -> None:
        super().__init__(blocks)
        self.pause = action  # type: ignore[method-assign] # that is the point


@pytest.mark.parametrize("clock", ["right", "stopped"])
def test_it_is_a_miss(daemon: DaemonProcess, client: Client, ns: Namespace, clock: str) -> None:
    assert store_soon(client, ns, TOKENS, 1)
    target = np.zeros_like(bytes_of(0))

    def others_take_the_slots() -> None:
        until, number = time.monotonic() + 20, 0
        while client.lookup(ns, TOKENS).tokens and time.monotonic() < until:
            number += 1
            client.store(ns, [number * 1000 + i for i in range(16 * BLOCK_TOKENS)], bytes_of(number, 16))
        assert client.lookup(ns, TOKENS).tokens == 0

    with client.acquire(ns, TOKENS, ttl_s=TTL_S) as lease:
        assert lease.tokens == len(TOKENS)
        assert lease._grant is not None
        if clock == "stopped":
            lease._grant.ends_at = math.inf
        result = lease.copy_to(Interrupted(Blocks(target), others_take_the_slots))
        assert (result.ok, result.tokens, result.reason) == (False, 0, "lease_lost")
        assert not lease.valid()
    assert client.stats().missed["lease_lost"] == len(TOKENS)


def test_one_that_lives_is_a_hit(daemon: DaemonProcess, client: Client, ns: Namespace) -> None:
    """The test above can fail: the same without the interruption."""
    assert store_soon(client, ns, TOKENS, 1)
    target = np.zeros_like(bytes_of(0))
    with client.acquire(ns, TOKENS, ttl_s=20) as lease:
        assert lease.copy_to(Interrupted(Blocks(target), lambda: None)).ok
    assert np.array_equal(target, bytes_of(1))
