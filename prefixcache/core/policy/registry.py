"""Which policies there are, by the name that users give.

Belongs here: one line per policy. A new one needs that line and its name in `names`, nothing else. Must not know: how
any of them works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from prefixcache.core.policy.arc import LeafArc
from prefixcache.core.policy.base import Clock, EvictionPolicy
from prefixcache.core.policy.gdsf import LeafGdsf
from prefixcache.core.policy.lru import LeafLru
from prefixcache.core.policy.lru2 import LeafLru2
from prefixcache.core.policy.s3fifo import LeafS3Fifo
from prefixcache.core.policy.tree_gittins import TreeGittins

POLICIES: Final[Mapping[str, Callable[[Clock, int], EvictionPolicy]]] = {
    "lru": lambda clock, seed: LeafLru(),
    "lru2": lambda clock, seed: LeafLru2(clock),
    "arc": lambda clock, seed: LeafArc(),
    "s3fifo": lambda clock, seed: LeafS3Fifo(),
    "gdsf": lambda clock, seed: LeafGdsf(),
    "tg": TreeGittins,
}


def make_policy(name: str, clock: Clock, seed: int) -> EvictionPolicy:
    """A fresh policy. Raises ValueError for a name that is not in `POLICIES`."""
    if name not in POLICIES:
        raise ValueError(f"no policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name](clock, seed)
