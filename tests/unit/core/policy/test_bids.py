"""Blocks that bid for room: how many get in, and what becomes of the others."""

from __future__ import annotations

import pytest

from prefixcache.core.policy.base import Bids, Birth
from prefixcache.core.policy.tiered import TieredLeaves
from prefixcache.core.policy.tree_gittins import TreeGittins
from prefixcache.core.reasons import Skip
from prefixcache.core.spec import DiskSpec
from tests.unit.core.harness import Harness


@pytest.mark.parametrize(
    ("worths", "granted"),
    [
        ([9.0] * 6, 6),
        ([9.0, 9.0, 9.0, 9.0, 1.0, 1.0], 4),
        ([9.0, 1.0, 1.0, 9.0, 1.0, 1.0], 4),  # only a tail gives up: what is in front of a kept block stays
        ([1.0] * 6, 2),  # two slots are free and cost nobody anything
        ([5.0] * 6, 6),  # as much as the victim is enough
    ],
)
def test_the_tail_gives_up_where_it_is_worth_less_than_the_victim(
    monkeypatch: pytest.MonkeyPatch, worths: list[float], granted: int
) -> None:
    h = Harness(slots=10, slab_slots=10, policy="tg")
    h.store("abcdefgh")
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(TreeGittins, "expected", lambda self, space, keys, birth: Bids(list(worths)))
    monkeypatch.setattr(TreeGittins, "victim_worth", lambda self: 5.0)

    def refused(self: TreeGittins, space: object, keys: bytes, birth: Birth) -> None:
        told.append((len(keys) // 32, birth.new_blocks))

    monkeypatch.setattr(TreeGittins, "refused", refused)
    reserved = h.reserve("uvwxyz")
    assert reserved.blocks.tolist() == list(range(granted))
    assert reserved.skipped == ({Skip.NOT_WORTH_IT: 6 - granted} if granted < 6 else {})
    assert told == ([(6 - granted, 6)] if granted < 6 else [])
    assert h.used == 8 + granted - max(0, granted - 2)


def test_more_blocks_than_the_pool_holds_bid_for_what_it_holds() -> None:
    h = Harness(slots=4, slab_slots=4, policy="tg")
    assert h.reserve("abcdefgh").blocks.tolist() == [0, 1, 2, 3]


def test_bids_give_up_from_the_end() -> None:
    bids = Bids([3.0, 0.0, 2.0, 1.0, 1.5])
    assert (bids.give_up(2.0, 9), bids.worths) == (2, [3.0, 0.0, 2.0])
    assert (bids.give_up(2.0, 9), bids.give_up(2.5, 1), bids.give_up(9.0, 9)) == (0, 1, 2)
    assert bids.give_up(9.0, 9) == 0


def test_nothing_stays_out_where_there_is_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is worth little in memory reaches the disk through memory only."""
    monkeypatch.setattr(TreeGittins, "expected", lambda self, space, keys, birth: Bids([0.0] * (len(keys) // 32)))
    monkeypatch.setattr(TreeGittins, "victim_worth", lambda self: 5.0)
    memory_only = Harness(slots=8, slab_slots=8, policy="tg")
    memory_only.store("abcdefgh")
    assert len(memory_only.reserve("uvwxyz").blocks) == 0
    with_disk = Harness(slots=8, slab_slots=8, policy="tg", disk=DiskSpec())
    with_disk.store("abcdefgh")
    assert len(with_disk.reserve("uvwxyz").blocks) == 6


def test_what_is_worth_little_stays_out_where_the_disk_is_slower_than_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TreeGittins, "expected", lambda self, space, keys, birth: Bids([0.0] * (len(keys) // 32)))
    monkeypatch.setattr(TreeGittins, "victim_worth", lambda self: 5.0)
    h = Harness(slots=8, slab_slots=8, policy="tg", disk=DiskSpec())
    policy = h.planner.state.namespaces[1].policy
    assert isinstance(policy, TieredLeaves)
    policy.clean_first = False
    h.store("abcdefgh")
    assert h.reserve("uvwxyz").skipped == {Skip.NOT_WORTH_IT: 6}
