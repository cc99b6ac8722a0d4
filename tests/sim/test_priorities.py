"""With a bug planted in priorities, some of the first few hundred seeds find it."""

from __future__ import annotations

from typing import Any

import pytest

from prefixcache.core.policy.prioritised import Prioritised
from prefixcache.core.table import HIGH, LOW, NORMAL, BlockTable
from tests.sim.planting import Patch, Plant, assert_found
from tests.sim.simulator import Simulator

SEEDS = 500


def low_leaves_not_taken_first(patch: Patch) -> None:
    def wrong(self: Prioritised) -> Any:
        for order in (self.policy, self.low, self.high):
            self._chosen = order
            if (node := order.victim()) is not None:
                return node
        return None

    patch.setattr(Prioritised, "victim", wrong)


def high_leaves_kept_for_ever(patch: Patch) -> None:
    patch.setattr(Prioritised, "_let_fade", lambda self: None)


def low_leaves_starved(patch: Patch) -> None:
    patch.setattr(Prioritised, "_is_older", lambda self, node, low: False)


def priority_of_the_block_before_in_its_row(patch: Patch) -> None:
    right = BlockTable.allocate

    def wrong(self: BlockTable, count: int) -> Any:
        before = self.priority.copy()
        rows = right(self, count)
        self.priority[: len(before)] = before
        return rows

    patch.setattr(BlockTable, "allocate", wrong)


def raised_leaf_stays_where_it_was(patch: Patch) -> None:
    right = BlockTable.raise_priority

    def wrong(self: BlockTable, rows: Any, priority: int) -> bool:
        right(self, rows, priority)
        return False

    patch.setattr(BlockTable, "raise_priority", wrong)


def priority_lowered_by_a_later_store(patch: Patch) -> None:
    def wrong(self: BlockTable, rows: Any, priority: int) -> bool:
        if self.prioritised:
            self.priority[rows] = priority
        return True

    patch.setattr(BlockTable, "raise_priority", wrong)


def high_taken_for_low(patch: Patch) -> None:
    right = BlockTable.set_priority
    swapped = {LOW: HIGH, NORMAL: NORMAL, HIGH: LOW}
    patch.setattr(BlockTable, "set_priority", lambda self, rows, priority: right(self, rows, swapped[priority]))


PLANTED: tuple[Plant, ...] = (
    low_leaves_not_taken_first,
    high_leaves_kept_for_ever,
    low_leaves_starved,
    priority_of_the_block_before_in_its_row,
    raised_leaf_stays_where_it_was,
    priority_lowered_by_a_later_store,
    high_taken_for_low,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_finds_the_planted_bug(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(plant, monkeypatch, lambda seed: Simulator(seed).run(), SEEDS)
