"""Seeds with watchers find nothing; with a bug planted, some of the first few hundred do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from prefixcache.core.commands import Change, Published
from prefixcache.core.radix import Node, RadixTree
from prefixcache.core.removal import Remover
from prefixcache.core.state import State
from prefixcache.core.telling import Tour
from prefixcache.server.event_log import EventLog
from prefixcache.server.watch import Watch
from tests.sim.planting import Patch, Plant, assert_found
from tests.sim.watched import WatchedSimulator

SEEDS = 200
PLANTED_SEEDS = 1000


def test_what_a_watcher_knows_is_what_is_held() -> None:
    for seed in range(SEEDS):
        WatchedSimulator(seed).run()


def removals_missed(patch: Patch) -> None:
    """Of what is evicted to make room."""
    right = State.publish_blocks

    def wrong(self: State, change: Change, node: Node, first: int = 0) -> None:
        if change is not Change.REMOVED or node.children:
            right(self, change, node, first)

    patch.setattr(State, "publish_blocks", wrong)


def subtrees_leave_unseen(patch: Patch) -> None:
    patch.setattr(State, "publish_subtree", lambda self, node: None)


def moves_to_disk_missed(patch: Patch) -> None:
    patch.setattr(State, "publish_move", lambda self, node, tier: None)


def tours_not_told_of_splits(patch: Patch) -> None:
    right = RadixTree.split

    def wrong(self: RadixTree, node: Node, count: int) -> Node:
        told, self.reshaped = self.reshaped, []
        upper = right(self, node, count)
        self.reshaped = told
        return upper

    patch.setattr(RadixTree, "split", wrong)


def joined_nodes_still_toured(patch: Patch) -> None:
    right = RadixTree.join

    def wrong(self: RadixTree, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        state = parent.state
        right(self, node)
        parent.state = state

    patch.setattr(RadixTree, "join", wrong)


def snapshot_told_before_the_news(patch: Patch) -> None:
    """Blocks are looked at now, and told behind news of later."""
    right = Tour.next
    kept: dict[int, list[Published]] = {}

    def wrong(self: Tour, most_nodes: int) -> list[Published]:
        now = right(self, most_nodes)
        told = kept.pop(id(self), [])
        if self.done:
            return told + now
        kept[id(self)] = now
        return told

    patch.setattr(Tour, "next", wrong)


def gaps_not_told(patch: Patch) -> None:
    def wrong(self: Watch, lost: int) -> Iterator[Any]:
        self._at = self._source.log.last
        yield self.keepalive()

    patch.setattr(Watch, "_gap", wrong)


def lost_events_passed_over(patch: Patch) -> None:
    """A log that answers the oldest event it has for one that it has no more."""
    right = EventLog.get
    patch.setattr(EventLog, "get", lambda self, sequence: right(self, max(sequence, self.first)))


def resumed_at_another_daemon(patch: Patch) -> None:
    right = Watch._begin

    def wrong(self: Watch) -> Iterator[Any]:
        if self._wish.incarnation:
            self._at = min(self._wish.after, self._source.log.last)
            yield self.keepalive()
        else:
            yield from right(self)

    patch.setattr(Watch, "_begin", wrong)


def copies_of_cold_blocks_kept(patch: Patch) -> None:
    right = Remover.cool

    def wrong(self: Remover, space: Any, node: Node) -> None:
        before = len(self.state.news)
        right(self, space, node)
        self.state.news[before:] = [each for each in self.state.news[before:] if not each.pool]

    patch.setattr(Remover, "cool", wrong)


PLANTED: tuple[Plant, ...] = (
    removals_missed,
    subtrees_leave_unseen,
    moves_to_disk_missed,
    tours_not_told_of_splits,
    joined_nodes_still_toured,
    snapshot_told_before_the_news,
    gaps_not_told,
    lost_events_passed_over,
    resumed_at_another_daemon,
    copies_of_cold_blocks_kept,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_finds_the_planted_bug(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(plant, monkeypatch, lambda seed: WatchedSimulator(seed).run(), PLANTED_SEEDS)
