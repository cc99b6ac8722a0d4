"""What the core asks of an eviction policy.

Rules: a policy orders leaves and remembers what it wants to know about blocks; it never touches the tree, the table or
slots, and nothing but leaves ever goes. The core tells it of every leaf that comes, changes or goes, and asks for the
next victim. A victim that turns out to be pinned is parked by the core and comes back with `add_leaf` when its pin
goes. Policies that remember are told of blocks as well. Time, capacity and chance come from outside: a `Clock` that the
planner sets, the blocks that are there, and a seeded `Sampler`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Protocol

import numpy as np

from prefixcache.core.ids import Rows
from prefixcache.core.radix import Node

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace


# Ranks of leaves in orders whose entries go stale. One counter for all orders there are: a leaf moves from one to
# another (`tiered`, `prioritised`), and an entry that it left behind must never look like its place in the new one.
SERIALS = count(1)


class Clock:
    """The event being handled: its time in seconds and its number. Only the planner sets it."""

    __slots__ = ("now", "tick")

    def __init__(self) -> None:
        self.now = 0.0
        self.tick = 0


@dataclass(frozen=True, slots=True)
class Birth:
    """How new blocks came: how many were missing with them, the row in front of the first of them (-1: fewer than two
    blocks were there), and the last key of the prompt."""

    new_blocks: int = 1
    hit_row: int = -1
    last_key: bytes = b""


UNKNOWN_BIRTH = Birth()


class Bids:
    """What each of the blocks that want room is worth, root first. Those at the end give up where they are worth less
    than what would have to go for them."""

    __slots__ = ("given_up", "worths")

    def __init__(self, worths: list[float]) -> None:
        self.worths = worths
        self.given_up = 0

    def give_up(self, worth: float, most: int) -> int:
        """Takes back up to `most` blocks at the end that are worth less than `worth`; answers how many."""
        taken = 0
        while taken < most and self.worths and self.worths[-1] < worth:
            self.worths.pop()
            taken += 1
        self.given_up += taken
        return taken


class EvictionPolicy(Protocol):
    """`Node.rank` and `Node.tick` belong to the policy for as long as a node is a leaf it was told of. After
    `add_leaf`, `touch_leaf` and `retick_leaf` the tick must be the one given; a node it does not hold has the rank
    NOT_QUEUED."""

    @property
    def remembers(self) -> bool:
        """Whether it wants `expected`, `used`, `stored`, `evicted` and `forgotten` (each costs something)."""

    def add_leaf(self, node: Node, tick: int) -> None:
        """`node` is a leaf now (not known as one before); its tail was last used at `tick`."""

    def touch_leaf(self, node: Node, tick: int) -> None:
        """The tail of `node` was used now. A node the policy does not hold is none of its business."""

    def retick_leaf(self, node: Node, tick: int) -> None:
        """`node` lost its tail; the new one was last used at `tick`."""

    def remove_leaf(self, node: Node) -> None:
        """`node` is no leaf any more, or parked. Unknown nodes are fine."""

    def victim(self) -> Node | None:
        """The leaf whose tail should go next; it stays until the core removes or reticks it."""

    def run_length(self, node: Node, most: int) -> int:
        """How many blocks (1..`most`) off the tail of a victim may go before it is asked again."""

    def leaf_count(self) -> int:
        """How many leaves it holds (for checks and status)."""

    def expected(self, space: Namespace, keys: bytes, birth: Birth) -> Bids | None:
        """These blocks are missing and room for them is wanted now, before `victim` is asked. None: at any price."""

    def refused(self, space: Namespace, keys: bytes, birth: Birth) -> None:
        """These blocks, the last of those expected, got no room."""

    def victim_worth(self) -> float:
        """What the victim is worth, in the unit of its bids."""

    def used(self, space: Namespace, rows: Rows) -> None:
        """A prompt hit these blocks, root first. The table still says when they were used before."""

    def stored(self, space: Namespace, node: Node, birth: Birth) -> None:
        """Every block of `node` was stored now; it is no leaf yet."""

    def evicted(self, space: Namespace, node: Node, count: int) -> None:
        """The last `count` blocks of a victim are about to go."""

    def forgotten(self, space: Namespace, rows: Rows) -> None:
        """These rows are given back; those not told of by `evicted` were cleared."""


class Forgetful:
    """What a policy does that only wants to know leaves; others override what they want to know."""

    remembers = False

    def victim_worth(self) -> float:
        """It makes no bids."""
        return 0.0

    def expected(self, space: Namespace, keys: bytes, birth: Birth) -> Bids | None:
        """Whatever comes is worth more than what was there."""
        return None

    def refused(self, space: Namespace, keys: bytes, birth: Birth) -> None:
        """Nothing to remember."""

    def used(self, space: Namespace, rows: Rows) -> None:
        """Nothing to remember."""

    def stored(self, space: Namespace, node: Node, birth: Birth) -> None:
        """Nothing to remember."""

    def evicted(self, space: Namespace, node: Node, count: int) -> None:
        """Nothing to remember."""

    def forgotten(self, space: Namespace, rows: Rows) -> None:
        """Nothing to remember."""


def run_of_one_use(node: Node, most: int) -> int:
    """How many blocks off the tail, up to `most`, were last used together with it."""
    space = node.space
    if most == 1 or space is None:
        return 1
    touched = space.table.touched[node.row_array()[-most:]]
    return equal_tail(touched != touched[-1])


def equal_tail(differs: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Length of the run of False at the end."""
    others = np.flatnonzero(differs)
    return len(differs) - (int(others[-1]) + 1 if len(others) else 0)


def tail_row(node: Node) -> int:
    """Row of the last block of a node."""
    return int.from_bytes(node.rows[-4:], "little")
