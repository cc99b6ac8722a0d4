"""With a bug planted in the disk tier, some of the first few hundred seeds with a disk find it.

That no seed finds anything without one is in test_simulator, whose seeds have disks, too.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from prefixcache.core import acquiring, arriving, demoting, fates, landing, patching, radix
from prefixcache.core.chores import Chores
from prefixcache.core.clearing import Clearing
from prefixcache.core.commands import Command, SetGenerations
from prefixcache.core.demoting import Demoter
from prefixcache.core.disk import Disk
from prefixcache.core.events import ReadEnd, RecordsRead, RecordsWritten
from prefixcache.core.fates import NodesOf
from prefixcache.core.filling import Filling
from prefixcache.core.freeing import Freer
from prefixcache.core.ids import NO_SLOT
from prefixcache.core.landing import Lander
from prefixcache.core.loading import Loader
from prefixcache.core.loads import Load
from prefixcache.core.namespaces import ForeignIndex, Namespace
from prefixcache.core.nodes import NodeIndex
from prefixcache.core.policy.tiered import TieredLeaves
from prefixcache.core.recovering import Recoverer
from prefixcache.core.removal import Remover
from prefixcache.core.reservations import Reservation
from prefixcache.core.survey import Survey
from prefixcache.core.table import BlockTable
from prefixcache.core.told import Run, Told
from tests.sim.planting import Patch, Plant, assert_found
from tests.sim.simulator import Simulator

SEEDS = 600
SEEDS_OF_RARE = 1500
DISKS = ("disk", "disk_moves", "disk_restarts", "disk_windows", "disk_foreign", "disk_replaced")


def failed_reads_believed(patch: Patch) -> None:
    patch.setattr(Lander, "_judged", lambda self, load, index, ends: np.full_like(ends, ReadEnd.OK))


def failed_writes_believed(patch: Patch) -> None:
    right = Demoter.done

    def wrong(self: Demoter, event: RecordsWritten, out: list[Command]) -> None:
        right(self, RecordsWritten(event.job, event.index, event.ends * 0, event.segments, event.pages, 0), out)

    patch.setattr(Demoter, "done", wrong)


def written_blocks_not_pinned(patch: Patch) -> None:
    right = Demoter._write_path

    def wrong(self: Demoter, *rest: Any) -> int:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Remover, "pin", lambda self, node, depth, holder: None)
            return right(self, *rest)

    patch.setattr(Demoter, "_write_path", wrong)


def one_part_on_disk_taken_for_all(patch: Patch) -> None:
    def first_is_clean(self: BlockTable, rows: Any) -> Any:
        return (self.parts[0].segments[rows] != 0) | (self.parts[0].slots[rows] == NO_SLOT)

    patch.setattr(BlockTable, "is_clean", first_is_clean)
    patch.setattr(Namespace, "may_cool", lambda self, rows: self.table.parts[0].segments[rows] != 0)


def children_on_disk_outlive_their_parent(patch: Patch) -> None:
    patch.setattr(Remover, "drop_cold", lambda self, node: 0)


def segments_freed_under_children(patch: Patch) -> None:
    patch.setattr(fates, "may_leave", lambda node, gone: node.cold)


def nodes_emptied_that_are_not_there_any_more(patch: Patch) -> None:
    """What was true when a segment was chosen is taken for true in a later step."""
    right, seen = NodesOf.add, weakref.WeakKeyDictionary[Any, dict[int, Any]]()

    def add(self: NodesOf, space: Namespace, rows: Any) -> None:
        right(self, space, rows)
        seen.setdefault(self, {}).update(space.tree.index.by_number if space.tree.index else {})

    def take(self: NodesOf, most: int) -> Any:
        space, numbers = self._left.popleft()
        return space, [seen[self][number] for number in reversed(numbers)]

    patch.setattr(NodesOf, "add", add)
    patch.setattr(NodesOf, "take", take)


def left_for_later_and_not_told(patch: Patch) -> None:
    patch.setattr(Chores, "tell", lambda self, out: None)


def asked_for_a_turn_again_and_again(patch: Patch) -> None:
    right = Chores.tell

    def wrong(self: Chores, out: list[Command]) -> None:
        self.is_told = False
        right(self, out)

    patch.setattr(Chores, "tell", wrong)


def cleared_blocks_without_tombstone(patch: Patch) -> None:
    patch.setattr(Clearing, "_revoke", lambda self, space, node, out: None)


def cleared_blocks_found_again(patch: Patch) -> None:
    patch.setattr(Recoverer, "cleared", lambda self, space, keys: None)


def moved_records_read_where_they_were(patch: Patch) -> None:
    patch.setattr(Freer, "_settle", lambda self, space, records, fine, places, out: None)


def arrivals_not_told(patch: Patch) -> None:
    patch.setattr(landing, "tell_waiters", lambda state, load, *, over, out: None)


def held_children_miscounted(patch: Patch) -> None:
    patch.setattr(radix, "_tell_parent", lambda node, *, was_held: None)


def lost_records_counted(patch: Patch) -> None:
    patch.setattr(Disk, "lose", lambda self, space, part, rows: None)


def loads_under_old_generations(patch: Patch) -> None:
    right = Loader._read

    def wrong(self: Loader, *rest: Any) -> Load:
        load = right(self, *rest)
        out = rest[-1]
        out[:] = [command for command in out if not isinstance(command, SetGenerations)]
        return load

    patch.setattr(Loader, "_read", wrong)


def deadline_ignored(patch: Patch) -> None:
    patch.setattr(Loader, "_choose", lambda self, event, space, plan, wish: None)


def slots_of_a_read_given_back_at_once(patch: Patch) -> None:
    right = Loader.leave

    def wrong(self: Loader, lease: Any, out: list[Command]) -> None:
        for load in lease.loads:
            if load.waiters == [lease] and load.number in self.loads:
                self.remover.release_slots(load.held_slots())
        right(self, lease, out)

    patch.setattr(Loader, "leave", wrong)


def rows_of_joined_nodes_lost(patch: Patch) -> None:
    patch.setattr(NodeIndex, "move", lambda self, source, target: self.by_number.pop(source.number))


def orders_of_leaves_mixed_up(patch: Patch) -> None:
    patch.setattr(Remover, "reorder", lambda self, space, rows: None)
    patch.setattr(TieredLeaves, "retick_leaf", lambda self, node, tick: self._side(node).retick_leaf(node, tick))


def orphans_served(patch: Patch) -> None:
    right = Told.take

    def wrong(self: Told, event: Any) -> Any:
        event.parents = bytes(len(event.parents))
        return right(self, event)

    patch.setattr(Told, "take", wrong)


def part_of_a_block_served(patch: Patch) -> None:
    right = Load.note

    def wrong(self: Load, index: Any, ends: Any) -> None:
        right(self, index, ends)
        self.left[self.owner[index]] = 0

    patch.setattr(Load, "note", wrong)


def hits_counted_for_the_wrong_tier(patch: Patch) -> None:
    patch.setattr(acquiring, "_DISK", acquiring._HOST)


def writes_never_end(patch: Patch) -> None:
    patch.setattr(demoting.Demoter, "_end", lambda self, number, job: None)


def reads_taken_twice(patch: Patch) -> None:
    right = Lander.done

    def wrong(self: Lander, event: RecordsRead, now: float, out: list[Command]) -> None:
        right(self, event, now, out)
        load = self.loader.loads.get(event.job)
        if load is not None and load.open_records > 1:
            right(self, event, now, out)

    patch.setattr(Lander, "done", wrong)


def windows_one_block_short(patch: Patch) -> None:
    right = Survey.range_of

    def wrong(self: Survey, part: int, end: int) -> slice:
        found = right(self, part, end)
        return slice(found.start + (part in self.space.optional_parts), found.stop)

    patch.setattr(Survey, "range_of", wrong)


def patches_of_cold_blocks_left_cold(patch: Patch) -> None:
    patch.setattr(Filling, "_warm", lambda self, reservation, entries: [])


def patches_of_plain_blocks_left_cold(patch: Patch) -> None:
    patches_of_cold_blocks_left_cold(patch)


def blocks_in_memory_again_count_as_cold(patch: Patch) -> None:
    right = Remover.warm

    def wrong(self: Remover, space: Namespace, node: Any, place: int, count: int) -> Any:
        before = space.cold_blocks
        warmed = right(self, space, node, place, count)
        space.cold_blocks = before
        return warmed

    patch.setattr(Remover, "warm", wrong)


def records_forgotten_when_stored_again(patch: Patch) -> None:
    right = BlockTable.place

    def wrong(self: BlockTable, part: int, rows: Any, *rest: Any) -> None:
        right(self, part, rows, *rest)
        if self.on_disk:
            self.parts[part].segments[rows] = 0

    patch.setattr(BlockTable, "place", wrong)


def load_and_store_fill_one_row(patch: Patch) -> None:
    patch.setattr(Filling, "_not_there", lambda self, reservation, part, here: here)


def blocks_being_stored_again_granted_twice(patch: Patch) -> None:
    patch.setattr(patching, "filled_by_others", lambda space, part: set())


def keys_found_after_they_left(patch: Patch) -> None:
    patch.setattr(ForeignIndex, "forget", lambda self, node: None)


def keys_recovered_below_an_old_parent(patch: Patch) -> None:
    right = Recoverer._bring

    def wrong(self: Recoverer, space: Namespace, told: Told, run: Run) -> Any:
        if space.foreign is not None:
            space.foreign.by_key.pop(run.keys[0], None)
        return right(self, space, told, run)

    patch.setattr(Recoverer, "_bring", wrong)


def unknown_keys_cleared_without_tombstone(patch: Patch) -> None:
    patch.setattr(Clearing, "_revoke_unknown", lambda self, space, keys, out: None)


def keys_told_in_the_wrong_places(patch: Patch) -> None:
    right = arriving.scattered_runs
    patch.setattr(arriving, "scattered_runs", lambda space, places, *rest: right(space, places[::-1], *rest))


def keys_stored_again_mixed_up_with_new_ones(patch: Patch) -> None:
    patch.setattr(Reservation, "_by_entry", lambda self, column: column)


def a_replaced_directory_believed(patch: Patch) -> None:
    patch.setattr(Freer, "lose_all", lambda self: None)


def a_replaced_directory_not_told(patch: Patch) -> None:
    patch.setattr(Recoverer, "begin_anew", lambda self: None)


PLANTED: tuple[Plant, ...] = (
    failed_reads_believed,
    failed_writes_believed,
    written_blocks_not_pinned,
    one_part_on_disk_taken_for_all,
    children_on_disk_outlive_their_parent,
    segments_freed_under_children,
    nodes_emptied_that_are_not_there_any_more,
    left_for_later_and_not_told,
    asked_for_a_turn_again_and_again,
    cleared_blocks_without_tombstone,
    cleared_blocks_found_again,
    moved_records_read_where_they_were,
    arrivals_not_told,
    held_children_miscounted,
    lost_records_counted,
    loads_under_old_generations,
    deadline_ignored,
    slots_of_a_read_given_back_at_once,
    rows_of_joined_nodes_lost,
    orders_of_leaves_mixed_up,
    orphans_served,
    part_of_a_block_served,
    hits_counted_for_the_wrong_tier,
    writes_never_end,
    reads_taken_twice,
    windows_one_block_short,
    patches_of_cold_blocks_left_cold,
    patches_of_plain_blocks_left_cold,
    blocks_in_memory_again_count_as_cold,
    records_forgotten_when_stored_again,
    load_and_store_fill_one_row,
    blocks_being_stored_again_granted_twice,
    a_replaced_directory_believed,
    a_replaced_directory_not_told,
    keys_found_after_they_left,
    keys_recovered_below_an_old_parent,
    unknown_keys_cleared_without_tombstone,
    keys_told_in_the_wrong_places,
    keys_stored_again_mixed_up_with_new_ones,
)


# Shows only where what was cleared is still on disk, and not stored again, at a restart.
RARE = (cleared_blocks_without_tombstone, cleared_blocks_found_again, unknown_keys_cleared_without_tombstone)

# What each of these breaks is seen by seeds of one flavour only.
FLAVOURS_OF: dict[Plant, tuple[str, ...]] = {
    moved_records_read_where_they_were: ("disk",),
    cleared_blocks_without_tombstone: ("disk_restarts",),
    cleared_blocks_found_again: ("disk_restarts",),
    orphans_served: ("disk_restarts",),
    windows_one_block_short: ("disk_windows",),
    patches_of_cold_blocks_left_cold: ("disk_windows",),
    patches_of_plain_blocks_left_cold: ("disk",),
    a_replaced_directory_believed: ("disk_replaced",),
    a_replaced_directory_not_told: ("disk_replaced",),
    keys_found_after_they_left: ("disk_foreign",),
    keys_recovered_below_an_old_parent: ("disk_foreign",),
    unknown_keys_cleared_without_tombstone: ("disk_foreign",),
    keys_told_in_the_wrong_places: ("disk_foreign",),
    keys_stored_again_mixed_up_with_new_ones: ("disk_foreign",),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_finds_the_planted_bug(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(
        plant,
        monkeypatch,
        lambda seed: Simulator(seed, FLAVOURS_OF.get(plant, DISKS)).run(),
        SEEDS_OF_RARE if plant in RARE else SEEDS,
    )
