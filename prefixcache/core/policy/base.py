"""What the core asks of an eviction policy.

Rules: a policy only orders leaves; it never touches the tree, the table or slots. The core tells it of every leaf that
comes, changes or goes, and asks for the next victim. A victim that turns out to be pinned is parked by the core and
comes back with `add_leaf` when its pin goes.
"""

from __future__ import annotations

from typing import Protocol

from prefixcache.core.radix import Node


class EvictionPolicy(Protocol):
    """`Node.rank` and `Node.tick` belong to the policy for as long as a node is a leaf it was told of."""

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

    def leaf_count(self) -> int:
        """How many leaves it holds (for checks and status)."""
