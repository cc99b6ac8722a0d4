"""Emptying a slab at once, by eviction, for a class of slots that has none.

Rules: what lies in the slab goes, and with it all that follows it in its prefix; nothing that is pinned, filled or
copied. Of the slabs looked at the one that costs the fewest blocks. Only where few blocks are known, because nodes are
found by looking at all of them; elsewhere a slab is moved empty in the background (transfers). Must not know: who needs
the room.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prefixcache.core.ids import Rows
from prefixcache.core.namespaces import Namespace
from prefixcache.core.radix import VISIBLE, Node, subtree
from prefixcache.core.removal import Remover

MOST_ROWS = 1 << 17  # of a namespace; looking at more would hold everybody up

Owners = list[tuple[Namespace, int, Rows]]


class _Cut(NamedTuple):
    """All blocks of a node from `place` on, with all below it."""

    node: Node
    place: int


def empty(remover: Remover, candidates: list[Owners]) -> bool:
    """Evicts all blocks that live in one of the slabs, given by who owns their slots; whether any could be emptied."""
    plans = [plan for owners in candidates if (plan := _plan(owners)) is not None]
    if not plans:
        return False
    for cut in min(plans, key=_cost):
        _evict(remover, cut)
    return True


def _plan(owners: Owners) -> list[_Cut] | None:
    """Where to cut so that all these rows go; None where that cannot be."""
    rows_of: dict[Namespace, list[Rows]] = {}
    for space, _, rows in owners:
        rows_of.setdefault(space, []).append(rows)
    cuts: list[_Cut] = []
    for space, pieces in rows_of.items():
        if space.table.used > MOST_ROWS or space.writing or space.loading:
            return None
        rows = np.unique(np.concatenate(pieces))
        mine = _cuts(space, rows)
        going = [node.row_array() for cut in mine for node in subtree(cut.node)]
        if not mine or not np.isin(rows, np.concatenate(going)).all() or any(_is_held(cut) for cut in mine):
            return None  # some are cleared, and only wait for their leases
        cuts += mine
    return cuts


def _cuts(space: Namespace, rows: Rows) -> list[_Cut]:
    """The first block of these on each path."""
    found: list[_Cut] = []
    stack = list((space.tree.root.children or {}).values())
    while stack:
        node = stack.pop()
        if node.state != VISIBLE:
            continue
        here = np.isin(node.row_array(), rows)
        if here.any():
            found.append(_Cut(node, int(np.argmax(here))))
        else:
            stack += (node.children or {}).values()
    return found


def _is_held(cut: _Cut) -> bool:
    """Whether somebody holds or fills any of it, or some node of it cannot leave as a whole (part of it is on disk)."""
    if cut.node.pinned_depth() > cut.node.start + cut.place or _is_mixed(cut.node, cut.place):
        return True
    below = (node for node in subtree(cut.node) if node is not cut.node)
    return any(node.pins is not None or node.state != VISIBLE or _is_mixed(node, 0) for node in below)


def _is_mixed(node: Node, place: int) -> bool:
    space = node.space
    if space is None or not space.on_disk or node.cold:
        return False
    ways = space.ways_out(node.row_array()[place:])
    return bool((ways != ways[0]).any())


def _cost(cuts: list[_Cut]) -> int:
    return sum(sum(node.count for node in subtree(cut.node)) - cut.place for cut in cuts)


def _evict(remover: Remover, cut: _Cut) -> None:
    """Deepest first, so that each is a leaf when it goes."""
    for node in reversed(list(subtree(cut.node))):
        if node.cold:
            continue  # it goes with what is in front of it
        remover.evict_tail(node, node.count - cut.place if node is cut.node else node.count)
