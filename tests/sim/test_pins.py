"""With a bug planted in pins, prefetch or gentle eviction, some of the first few hundred seeds find it.

That no seed finds anything without one is in test_simulator, whose seeds have pins, too.
"""

from __future__ import annotations

from typing import Any

import pytest

from prefixcache.core import clearing
from prefixcache.core.commands import Command
from prefixcache.core.loading import Loader
from prefixcache.core.loads import Wish
from prefixcache.core.pin_messages import PinRequested
from prefixcache.core.pinning import Pinning
from prefixcache.core.pins import PrefixPin, Term
from prefixcache.core.prefetching import Brought, Prefetcher
from prefixcache.core.radix import Node, Path
from prefixcache.core.removal import Remover
from prefixcache.core.state import State
from tests.sim.layouts import WITHOUT_GPUS
from tests.sim.planting import Patch, Plant, assert_found
from tests.sim.simulator import Simulator

SEEDS = 800


def expired_pin_still_holds(patch: Patch) -> None:
    patch.setattr(Pinning, "run_out", lambda self, term, out: None)


def ended_pin_keeps_its_blocks(patch: Patch) -> None:
    right = Pinning._end

    def wrong(self: Pinning, pin: PrefixPin) -> None:
        pin.pins = []
        right(self, pin)

    patch.setattr(Pinning, "_end", wrong)


def budget_not_looked_at(patch: Patch) -> None:
    patch.setattr(Pinning, "_affordable", lambda self, event, space, out: True)


def budget_not_given_back(patch: Patch) -> None:
    right = Pinning._end

    def wrong(self: Pinning, pin: PrefixPin) -> None:
        before = self.state.pinned_bytes
        right(self, pin)
        self.state.pinned_bytes = before

    patch.setattr(Pinning, "_end", wrong)


def shared_blocks_paid_for_once_by_each(patch: Patch) -> None:
    right = Pinning._begin

    def wrong(self: Pinning, event: PinRequested, space: Any, deadline: float) -> PrefixPin:
        pin = right(self, event, space, deadline)
        shared = sum(space.pinned_keys[key] > 1 for key in pin.each_key())
        self.state.pinned_bytes += shared * sum(space.strides)
        return pin

    patch.setattr(Pinning, "_begin", wrong)


def pinned_blocks_not_held(patch: Patch) -> None:
    right = Pinning._hold

    def wrong(self: Pinning, pin: PrefixPin) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Remover, "pin", lambda self, node, depth, holder: None)
            right(self, pin)

    patch.setattr(Pinning, "_hold", wrong)


def blocks_stored_later_not_held(patch: Patch) -> None:
    patch.setattr(State, "appear", lambda self, node: None)


def pin_survives_a_clear(patch: Patch) -> None:
    patch.setattr(Pinning, "cleared", lambda self, space, cut, out: None)


def pin_holds_what_was_cut_off(patch: Patch) -> None:
    patch.setattr(Pinning, "shorten", lambda self, node: None)


def renewed_pin_ends_at_its_old_time(patch: Patch) -> None:
    right = Pinning._renew

    def wrong(self: Pinning, pin: PrefixPin, deadline: float) -> None:
        right(self, pin, pin.term.deadline)

    patch.setattr(Pinning, "_renew", wrong)


def renewed_pin_has_two_ends(patch: Patch) -> None:
    def wrong(self: Pinning, pin: PrefixPin, deadline: float) -> None:
        pin.term = Term(deadline)
        pin.term.pin = pin
        self._watch(pin.term)

    patch.setattr(Pinning, "_renew", wrong)


def evicted_gently_what_is_leased(patch: Patch) -> None:
    patch.setattr(clearing, "_in_use", lambda node, first: "")


def tail_of_others_evicted(patch: Patch) -> None:
    def wrong(path: Path) -> Node | None:
        return path.nodes[0] if path.nodes else None

    patch.setattr(clearing, "_own_tail", wrong)


def prefetched_slots_not_counted(patch: Patch) -> None:
    right = Prefetcher.bring

    def wrong(self: Prefetcher, space: Any, keys: bytes, now: float, out: list[Command]) -> Brought:
        brought = right(self, space, keys, now, out)
        return brought._replace(coming=brought.coming + brought.ready)

    patch.setattr(Prefetcher, "bring", wrong)


def loads_without_waiters_forgotten(patch: Patch) -> None:
    right = Loader.fetch

    def wrong(self: Loader, *rest: Any) -> Wish:
        wish = right(self, *rest)
        for load in wish.loads:
            if not load.waiters:
                self.loads.pop(load.number, None)
        return wish

    patch.setattr(Loader, "fetch", wrong)


PLANTED: tuple[Plant, ...] = (
    expired_pin_still_holds,
    ended_pin_keeps_its_blocks,
    budget_not_looked_at,
    budget_not_given_back,
    shared_blocks_paid_for_once_by_each,
    pinned_blocks_not_held,
    blocks_stored_later_not_held,
    pin_survives_a_clear,
    pin_holds_what_was_cut_off,
    renewed_pin_ends_at_its_old_time,
    renewed_pin_has_two_ends,
    evicted_gently_what_is_leased,
    tail_of_others_evicted,
    prefetched_slots_not_counted,
    loads_without_waiters_forgotten,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_finds_the_planted_bug(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(plant, monkeypatch, lambda seed: Simulator(seed, WITHOUT_GPUS).run(), SEEDS)
