"""With a bug planted in the GPU tier, some of the first few hundred seeds with GPU pools find it.

That no seed finds anything without one is in test_simulator, whose seeds have GPU pools, too.
"""

from __future__ import annotations

from typing import Any

import pytest

from prefixcache.core import gpu, promoting
from prefixcache.core.acquiring import Acquiring
from prefixcache.core.commands import Command, PromoteSlots, SetGenerations
from prefixcache.core.events import DeviceLost, LeaseReleased, PromotionDone
from prefixcache.core.gpu import Copies, GpuTier
from prefixcache.core.namespaces import Namespace
from prefixcache.core.promoting import Promoter
from prefixcache.core.removal import Remover
from prefixcache.core.sessions import Sessions
from tests.sim.planting import Patch, Plant, assert_found
from tests.sim.simulator import Simulator

SEEDS = 1_500
GPUS = ("gpu", "gpu_disk", "gpu_moves", "gpu_cuts", "gpu_lost", "gpu_restarts")
# Where a bug shows in few of the seeds, those with more of what it takes are tried.
ALONE = {
    "pins_below_a_cut_forgotten": ("gpu_cuts",),
    "lost_device_keeps_its_copies": ("gpu_lost",),
    "lost_device_keeps_its_generations": ("gpu_lost",),
}


def leased_copies_evicted(patch: Patch) -> None:
    patch.setattr(promoting, "pin_path", lambda node, depth, holder: None)


def pins_below_a_cut_forgotten(patch: Patch) -> None:
    patch.setattr(gpu, "pin_path", lambda node, depth, holder: None)


def dropped_copies_given_away_under_a_lease(patch: Patch) -> None:
    def wrong(self: GpuTier) -> None:
        while self.retired:
            self.slots.release(self.retired.popleft()[1])

    patch.setattr(GpuTier, "settle_retired", wrong)


def copies_named_before_they_are_done(patch: Patch) -> None:
    right = Promoter._begin

    def wrong(self: Promoter, *rest: Any) -> None:
        before = set(self.jobs)
        right(self, *rest)
        for copy in set(self.jobs) - before:
            self.done(PromotionDone(copy, ok=True), rest[-1])

    patch.setattr(Promoter, "_begin", wrong)


def copies_outlive_what_was_cleared(patch: Patch) -> None:
    patch.setattr(Namespace, "leave_gpus", lambda self, rows: None)


def copies_outlive_what_went_to_disk(patch: Patch) -> None:
    right = Remover.cool

    def wrong(self: Remover, space: Namespace, node: Any) -> None:
        kept, space.copies = space.copies, ()
        right(self, space, node)
        space.copies = kept

    patch.setattr(Remover, "cool", wrong)


def failed_copies_believed(patch: Patch) -> None:
    right = Promoter.done
    patch.setattr(Promoter, "done", lambda self, event, out: right(self, PromotionDone(event.copy, ok=True), out))


def copies_under_old_generations(patch: Patch) -> None:
    right = Promoter._begin

    def wrong(self: Promoter, *rest: Any) -> None:
        right(self, *rest)
        out: list[Command] = rest[-1]
        pools = {command.target_pool for command in out if isinstance(command, PromoteSlots)}
        out[:] = [each for each in out if not (isinstance(each, SetGenerations) and each.pool in pools)]

    patch.setattr(Promoter, "_begin", wrong)


def parents_evicted_while_their_children_are_copied(patch: Patch) -> None:
    right = Promoter._begin

    def wrong(self: Promoter, *rest: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(promoting, "pin_path", lambda node, depth, holder: None)
            right(self, *rest)

    patch.setattr(Promoter, "_begin", wrong)


def the_same_block_copied_twice(patch: Patch) -> None:
    class Forgetful(set[int]):
        def __contains__(self, row: object) -> bool:
            return False

    right = Copies.__init__

    def wrong(self: Copies, space: Namespace) -> None:
        right(self, space)
        self.moving = Forgetful()

    patch.setattr(Copies, "__init__", wrong)


def copies_told_to_everybody(patch: Patch) -> None:
    patch.setattr(Sessions, "_gpus", lambda self, event: tuple(self.state.gpus.values()))


def lost_device_keeps_its_copies(patch: Patch) -> None:
    patch.setattr(GpuTier, "drop_all", lambda self, reason: None)


def lost_device_keeps_its_generations(patch: Patch) -> None:
    right = Promoter.lost

    def wrong(self: Promoter, event: DeviceLost, out: list[Command]) -> None:
        right(self, event, out)
        out[:] = [command for command in out if not isinstance(command, SetGenerations)]

    patch.setattr(Promoter, "lost", wrong)


def slots_of_failed_copies_leaked(patch: Patch) -> None:
    right = Promoter.done

    def wrong(self: Promoter, event: PromotionDone, out: list[Command]) -> None:
        if not event.ok and event.copy in self.jobs:
            self.jobs[event.copy].slots = {}
        right(self, event, out)

    patch.setattr(Promoter, "done", wrong)


def hits_counted_for_host_memory(patch: Patch) -> None:
    right = Acquiring.release

    def wrong(self: Acquiring, event: LeaseReleased, out: list[Command]) -> None:
        right(self, event, out)
        for ledger in self.state.stats.ledgers.values():
            ledger.hit[1] += ledger.hit[0]
            ledger.hit[0] = 0

    patch.setattr(Acquiring, "release", wrong)


def moved_rows_left_behind(patch: Patch) -> None:
    patch.setattr(Copies, "take", lambda self, rows: [column.slots[rows] for column in self.columns])


PLANTED: tuple[Plant, ...] = (
    leased_copies_evicted,
    pins_below_a_cut_forgotten,
    dropped_copies_given_away_under_a_lease,
    copies_named_before_they_are_done,
    copies_outlive_what_was_cleared,
    copies_outlive_what_went_to_disk,
    failed_copies_believed,
    copies_under_old_generations,
    parents_evicted_while_their_children_are_copied,
    the_same_block_copied_twice,
    copies_told_to_everybody,
    lost_device_keeps_its_copies,
    lost_device_keeps_its_generations,
    slots_of_failed_copies_leaked,
    hits_counted_for_host_memory,
    moved_rows_left_behind,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_finds_the_planted_bug(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(plant, monkeypatch, lambda seed: Simulator(seed, ALONE.get(plant.__name__, GPUS)).run(), SEEDS)


def test_the_seeds_promote_and_hit() -> None:
    """A simulator in which nothing reaches the tier would find nothing."""
    promoted = hit = evicted = 0
    for seed in range(40):
        simulator = Simulator(seed, GPUS)
        simulator.run()
        tiers = simulator.planner.state.gpus.values()
        promoted += sum(tier.promoted for tier in tiers)
        evicted += sum(tier.drops.total() for tier in tiers)
        hit += simulator.sums["from_gpu"]
    assert promoted > 40
    assert evicted > 40
    assert hit > 160
