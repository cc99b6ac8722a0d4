"""ListPrefixes: which prefixes are worth most, hottest or largest first.

Reads the tree inside the owner's lock, so what is looked at has a bound: the walk goes down from the roots by use, and
what it does not reach was used less than all it saw. A prefix ends where prompts part, or where stored ones end.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Final, NamedTuple

from prefixcache.core.ids import KEY_BYTES
from prefixcache.core.namespaces import Namespace
from prefixcache.core.planner import Planner
from prefixcache.core.radix import VISIBLE, Node

MOST_VISITED: Final = 4096  # nodes looked at in one call


class Found(NamedTuple):
    """One prefix: it ends with `node`."""

    space: Namespace
    node: Node

    @property
    def hit_tokens(self) -> int:
        """Tokens served from it."""
        return self.node.uses * self.tokens

    @property
    def tokens(self) -> int:
        """Its length."""
        return self.node.end * self.space.block_tokens

    @property
    def size_bytes(self) -> int:
        """Bytes of its blocks, in one copy."""
        return self.node.end * self.space.block_bytes

    def tier_tokens(self) -> tuple[int, int]:
        """(tokens in memory, tokens on disk only)."""
        cold = sum(node.count for node in _path(self.node) if node.cold)
        return self.tokens - cold * self.space.block_tokens, cold * self.space.block_tokens

    def pins(self) -> list[str]:
        """Labels of the pins that hold all of it."""
        key, block = self.node.edge[-KEY_BYTES:], self.node.end - 1
        return [pin.label for pin in self.space.prefix_pins.values() if pin.depth > block and pin.key(block) == key]


def find(planner: Planner, spaces: Iterable[Namespace], *, largest: bool) -> tuple[list[Found], bool]:
    """Prefixes in order, and whether some were not looked at. Call it with the owner's lock held."""
    turns = count()
    heap: list[tuple[int, int, Found]] = []
    for space in spaces:
        if space.foreign is None:
            _push(heap, turns, space, space.tree.root)
    found: list[Found] = []
    visited = 0
    while heap and visited < MOST_VISITED:
        each = heapq.heappop(heap)[2]
        visited += 1
        if not _goes_on_alike(each.node):
            found.append(each)
        _push(heap, turns, each.space, each.node)
    found.sort(key=lambda each: -(each.size_bytes if largest else each.hit_tokens))
    return found, bool(heap)


def _push(heap: list[tuple[int, int, Found]], turns: Iterator[int], space: Namespace, node: Node) -> None:
    for child in (node.children or {}).values():
        if child.state == VISIBLE:
            heapq.heappush(heap, (-child.uses, next(turns), Found(space, child)))


def _goes_on_alike(node: Node) -> bool:
    """Whether a longer prefix says all there is to say: the next node is the only one and used as often."""
    visible = [child for child in (node.children or {}).values() if child.state == VISIBLE]
    return len(visible) == 1 and visible[0].uses >= node.uses


def _path(node: Node) -> Iterator[Node]:
    above: Node | None = node
    while above is not None and above.parent is not None:
        yield above
        above = above.parent
