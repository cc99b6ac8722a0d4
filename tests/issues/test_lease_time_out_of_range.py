"""A lease time below zero, or of more milliseconds than a u32 holds, was reported in protobuf's words or not at all."""

import math

import pytest

from prefixcache_client import Client, Namespace
from tests.issues.workers import TOKENS


@pytest.mark.parametrize("ttl_s", [-1.0, 1e12, math.inf, math.nan])
def test_it_is_the_callers_mistake(client: Client, ns: Namespace, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="ttl_s must be from 0"):
        client.acquire(ns, TOKENS, ttl_s=ttl_s)
