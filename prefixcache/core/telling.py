"""What is told of a node's blocks to those who watch: news as they happen, and a tour of all there is.

Rules: a block that never was stored (a link to later ones) is not told. A tour goes through a tree in slices while the
tree changes; what leaves or comes meanwhile is news, everything else is told at least once. Blocks may be told twice.
Must not know: who watches, sequence numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

from prefixcache.core.commands import Change, Published
from prefixcache.core.ids import HOST_POOL, KEY_BYTES, PoolId, Tier
from prefixcache.core.radix import VISIBLE, Node, RadixTree

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace


def stored_spans(node: Node, first: int = 0) -> Iterator[tuple[int, int]]:
    """Runs [start, end) of a node's blocks from its `first` on that are stored. Links without any part never were, so
    they never come or go."""
    space = node.space
    if space is None or first >= node.count:
        return
    if space.has_full:
        yield first, node.count
        return
    for place, stored in enumerate(space.any_part(node.row_array()[first:]).tolist(), first):
        if stored:
            yield place, place + 1


def news_of(change: Change, node: Node, span: tuple[int, int], tier: Tier, pool: PoolId = HOST_POOL) -> Published:
    """What happened to blocks [first, end) of a node."""
    space = node.space
    assert space is not None
    at = span[0] * KEY_BYTES
    parent = node.edge[at - KEY_BYTES : at] if at else space.parent_key(node)
    keys = node.edge[at : span[1] * KEY_BYTES]
    return Published(change, space.number, space.fingerprint, keys, parent, node.start + span[0], tier, pool)


class Tour:
    """All blocks of a tree, some nodes at a time. Every tour must be closed: the tree tells it what it reshapes.

    Nodes are told parents first. A node that is split or joined while the tour waits is told again under its new shape,
    so whatever stays in the tree all the while cannot slip through between two slices."""

    def __init__(self, tree: RadixTree, pool: PoolId = HOST_POOL) -> None:
        """`pool`: the GPU pool, for a tree of copies."""
        self._tree = tree
        self._pool = pool
        self._tier = Tier.HOST if pool == HOST_POOL else Tier.GPU
        self._waiting: list[Node] = list((tree.root.children or {}).values())
        tree.reshaped.append(self._waiting)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The tree need not tell this tour any more. Can be repeated."""
        self._tree.reshaped = [each for each in self._tree.reshaped if each is not self._waiting]
        self._waiting = []

    def next(self, most_nodes: int) -> list[Published]:
        """STORED for what is in the next nodes, up to `most_nodes`; empty with `done` set at the end."""
        told: list[Published] = []
        waiting = self._waiting
        for _ in range(most_nodes):
            if not waiting:
                break
            node = waiting.pop()
            if node.children:
                waiting.extend(node.children.values())
            if node.state == VISIBLE:
                tier = Tier.DISK if node.cold else self._tier
                told += [news_of(Change.STORED, node, span, tier, self._pool) for span in stored_spans(node)]
        return told

    @property
    def done(self) -> bool:
        """Whether everything was told."""
        return not self._waiting


def tours(space: Namespace) -> list[Tour]:
    """Tours of all that is held of a namespace: memory and disk, and copies in GPU pools."""
    return [Tour(space.tree), *(Tour(copies.tree, tier.pool) for tier, copies in space.copies)]
