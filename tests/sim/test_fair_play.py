"""The simulator itself finds nothing where the planner did nothing wrong: seeds that said otherwise, made certain."""

from __future__ import annotations

import pytest

from prefixcache.core.commands import Command, CopySlots
from prefixcache.core.events import Event
from prefixcache.core.planner import Planner
from tests.sim.pins import Kept
from tests.sim.simulator import Simulator
from tests.unit.core.harness import chain

SEEDS = 40


@pytest.mark.parametrize("happens", ["crash", "restart"])
def test_a_pin_whose_time_was_over_before_a_restart_is_nobodys(happens: str) -> None:
    """Nobody told the old planner that time passed; the new one never knew the pin."""
    pinned = 0
    for seed in range(SEEDS):
        simulator = Simulator(seed, ("disk_restarts",))
        simulator.pins.pin()
        live = list(simulator.pins.live.values())
        pinned += any(kept.deadline < simulator.now + 10 for kept in live)
        simulator.now += 10
        getattr(simulator, happens)()
        simulator.check()
        assert all(kept.deadline > simulator.now for kept in simulator.pins.live.values())
    assert pinned


def test_pins_that_are_left_are_pinned_anew_one_by_one() -> None:
    """While the first is told to the new planner, one that is over stands behind it."""
    simulators = (Simulator(seed, ("disk_restarts",)) for seed in range(SEEDS))
    simulator = next(each for each in simulators if each.config.pin_bytes)
    number = next(iter(simulator.specs))
    left, over = (Kept(number, chain(letter), deadline) for letter, deadline in (("a", 20.0), ("b", 5.0)))
    simulator.pins.live = {b"l" * 16: left, b"o" * 16: over}
    simulator.now = 10.0
    simulator.crash()
    simulator.check()
    assert list(simulator.pins.live) == [b"l" * 16]


def test_what_begins_after_everybody_left_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that passes may begin to move a slab (for a pinned prefix that is to be loaded, say)."""
    right = Planner._time_passed

    def and_moves(self: Planner, event: Event, now: float, out: list[Command]) -> None:
        right(self, event, now, out)  # type: ignore[arg-type]  # TimePassed, as it is wired
        for stride in sorted({stride for space in self.state.namespaces.values() for stride in space.strides}):
            self.transfers.begin_move(stride, out)

    monkeypatch.setattr(Planner, "_time_passed", and_moves)
    moved = 0
    for seed in range(SEEDS):
        simulator = Simulator(seed, ("moves", "disk", "gpu_disk"))
        simulator.run()
        last = max(at for at, (_, event, _) in enumerate(simulator.history) if type(event).__name__ == "TimePassed")
        moved += any(isinstance(command, CopySlots) for command in simulator.history[last][2])
    assert moved
