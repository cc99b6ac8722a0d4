"""Slabs that change class: by leaf evictions at once, by moves in the background."""

from __future__ import annotations

from typing import Any

from prefixcache.core.commands import ComputeChecksum, CopySlots, SetGenerations
from prefixcache.core.events import ClearRequested, CopyDone
from prefixcache.core.reasons import Kind, Refusal, Skip
from prefixcache.core.spec import NamespaceSpec, PartSpec
from tests.unit.core.harness import FULL, GRANULE, TOKENS, Harness, chain

WIDE = NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 1, 3 * GRANULE),))


def two_classes(slots: int = 16, slab_slots: int = 4, **config: Any) -> Harness:
    h = Harness(slots=slots, slab_slots=slab_slots, **config)
    h.open(2, WIDE)
    return h


def test_a_class_without_anything_takes_an_emptied_slab() -> None:
    h = two_classes()
    h.store("abcdefghijklmnop")
    reserved = h.reserve("xy", namespace=2)
    assert len(reserved.blocks) == 2
    assert h.hit("abcdefghijklmnop") < 16


def test_blocks_in_use_are_never_taken_over() -> None:
    h = two_classes()
    h.store("abcdefghijklmnop")
    h.acquire("abcdefghijklmnop")
    reserved = h.reserve("xy", namespace=2)
    assert reserved.skipped == {Skip.POOL_FULL: 2}
    assert h.hit("abcdefghijklmnop") == 16


def fragmented() -> tuple[Harness, CopySlots]:
    """Every slab of one class keeps a leased block, so that only a move can empty one."""
    h = two_classes(slots=8, slab_slots=4)
    for letter in "abcdefgh":
        h.store(letter)
    for letter in "aceg":
        h.acquire(letter)
    assert len(h.reserve("x", namespace=2).blocks) == 0
    copies = [command for command in h.all if isinstance(command, CopySlots)]
    assert len(copies) == 1
    return h, copies[0]


def test_a_slab_is_emptied_by_moves() -> None:
    h, copy = fragmented()
    generations = [command for command in h.all if isinstance(command, SetGenerations)]
    assert generations[0].slots.tolist() == copy.targets.tolist()
    assert not set(copy.sources.tolist()) & set(copy.targets.tolist())
    assert h.send(CopyDone(copy.copy, True)) == []
    assert [h.hit(letter) for letter in "aceg"] == [1] * 4
    run = h.acquire("a").runs[0]
    assert run.slots.tolist()[0] in copy.targets.tolist() or run.slots.tolist()[0] not in copy.sources.tolist()


def test_the_old_place_stays_as_long_as_an_older_lease() -> None:
    h, copy = fragmented()
    h.send(CopyDone(copy.copy, True))
    assert h.reserve("x", namespace=2).skipped == {Skip.POOL_FULL: 1}, "a leased slot was given away"
    for lease in list(h.planner.state.leases.values()):
        h.release(lease.reply)
    assert len(h.reserve("x", namespace=2).blocks) == 1


def test_a_failed_copy_changes_nothing() -> None:
    h, copy = fragmented()
    h.send(CopyDone(copy.copy, False))
    assert [h.hit(letter) for letter in "aceg"] == [1] * 4
    assert set(h.acquire("a").runs[0].slots.tolist()).isdisjoint(copy.targets.tolist())
    h.refused(CopyDone(copy.copy, True), Kind.NOT_FOUND, Refusal.COPY_UNKNOWN)


def test_a_block_that_leaves_while_it_is_copied() -> None:
    h, copy = fragmented()
    for lease in list(h.planner.state.leases.values()):
        h.release(lease.reply)
    h.send(ClearRequested())
    held = set(copy.sources.tolist()) | set(copy.targets.tolist())
    assert h.used == len(held), "the source of a copy was freed under it"
    h.send(CopyDone(copy.copy, True))
    assert h.used == 0


def test_the_older_class_gives_even_if_the_other_has_something_to_evict() -> None:
    h = two_classes(slots=12, slab_slots=4)
    h.store("ab")
    h.store("cd")
    for letter in "xyzuvwxyzuvw":
        h.store(letter, namespace=2)
    assert h.planner.state.namespaces[2].table.used == 3, "the slab with the oldest blocks was never asked for"
    assert h.hit("ab") == h.hit("cd") == 0


def test_no_move_while_one_is_under_way() -> None:
    h, copy = fragmented()
    h.reserve("y", namespace=2)
    assert not any(isinstance(command, CopySlots) for command in h.all)
    h.send(CopyDone(copy.copy, True))


def test_keys_stay_the_same_when_slots_move() -> None:
    h, copy = fragmented()
    h.send(CopyDone(copy.copy, True))
    assert h.planner.state.namespaces[1].tree.walk(chain("a")).blocks == 1


def test_a_moved_block_still_gets_its_digest() -> None:
    h = two_classes(slots=8, slab_slots=4, checksum=True)
    for letter in "abcdefgh":
        h.store(letter)
    for letter in "aceg":
        h.acquire(letter)
    h.reserve("x", namespace=2)
    copy = next(command for command in h.all if isinstance(command, CopySlots))
    (order,) = h.send(CopyDone(copy.copy, True))
    assert isinstance(order, ComputeChecksum)
    assert order.slots.tolist() == copy.targets.tolist()


def test_no_more_is_evicted_than_the_slots_take() -> None:
    """Two parts in one class: a block gives two slots."""
    h = Harness(slots=16, slab_slots=4, spec=NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 1, GRANULE),) * 2))
    h.store("abcdefgh")
    h.store("xy")
    assert h.hit("abcdefgh") == 6
