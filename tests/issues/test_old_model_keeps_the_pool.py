"""A host changes from one model to another whose blocks have another size. Memory full of the old model's blocks, which
nobody asks for any more, was given over one slab for every 64 stores that had to evict, whatever their size: the new
model threw away what it had just stored, for hours."""

from __future__ import annotations

from prefixcache.core.commands import Command, CopySlots
from prefixcache.core.events import CopyDone, Event
from prefixcache.core.spec import NamespaceSpec, PartSpec
from tests.unit.core.harness import FULL, GRANULE, TOKENS, Harness

SLOTS, SLAB = 512, 16
PROMPT = 4


def prompt(number: int) -> str:
    return chr(0x4E00 + number) + "abcdefgh"[: PROMPT - 1]


class Copying(Harness):
    """Ends copies as soon as they were begun."""

    def send(self, event: Event) -> list[Command]:
        commands = super().send(event)
        for command in commands:
            if isinstance(command, CopySlots):
                self.send(CopyDone(command.copy, ok=True))
        self.all = commands
        return commands


def test_a_new_model_gets_what_the_old_one_does_not_use() -> None:
    h = Copying(slots=SLOTS, slab_slots=SLAB)
    h.open(2, NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 1, 3 * GRANULE),)))
    fits = SLOTS // SLAB * (SLAB // 3)
    for number in range(SLOTS // PROMPT):
        h.store(prompt(number))
    for number in range(2 * fits // PROMPT):
        h.store(prompt(number), namespace=2)
    held = h.planner.state.namespaces[2].table.used
    assert held >= 0.75 * fits, f"{held} of {fits} blocks, and {h.planner.state.namespaces[1].table.used} old ones"


def test_a_model_in_use_keeps_its_own() -> None:
    """What is asked for all the time is younger than what the other model evicts."""
    h = Copying(slots=SLOTS, slab_slots=SLAB)
    h.open(2, NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 1, 3 * GRANULE),)))
    mine = range(SLOTS // PROMPT // 2)
    for number in mine:
        h.store(prompt(number))
    for number in range(SLOTS // PROMPT):
        h.store(prompt(number), namespace=2)
        for each in mine:
            h.release(h.acquire(prompt(each)))
    assert sum(h.hit(prompt(number)) for number in mine) == len(mine) * PROMPT


def test_a_prompt_of_several_slabs_does_not_throw_away_the_one_before() -> None:
    h = Copying(slots=SLOTS, slab_slots=SLAB)
    h.open(2, NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 1, 3 * GRANULE),)))
    for number in range(SLOTS // PROMPT):
        h.store(prompt(number))
    long = "abcdefghijklmnopqrst"  # four slabs
    for count in range(1, 6):
        h.store(chr(0x5E00 + count) + long[1:], namespace=2)
        held = h.planner.state.namespaces[2].table.used
        assert held >= (count - 1) * len(long), f"{held} blocks after {count} prompts of {len(long)}"
