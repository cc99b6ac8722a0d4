"""Clear, and blocks whose bytes are wrong."""

from __future__ import annotations

from prefixcache.core.commands import Change, Cleared, Published
from prefixcache.core.events import ClearRequested, PartFailedVerification
from prefixcache.core.reasons import Kind, Refusal
from tests.unit.core.harness import ONE_PART, Harness, chain


def test_clear_everything() -> None:
    h = Harness()
    h.open(2, ONE_PART)
    h.store("ab")
    h.store("xy", namespace=2)
    assert h.ask(ClearRequested(), Cleared) == Cleared(4, 0)
    assert h.used == 0


def test_clear_one_namespace() -> None:
    h = Harness()
    h.open(2, ONE_PART)
    h.store("ab")
    h.store("xy", namespace=2)
    assert h.ask(ClearRequested(2), Cleared) == Cleared(2, 0)
    assert h.hit("ab") == 2


def test_clear_a_prefix_takes_what_follows_it_and_leaves_what_leads_to_it() -> None:
    h = Harness()
    h.store("abcd")
    h.store("abxy")
    assert h.ask(ClearRequested(1, chain("abc")), Cleared) == Cleared(2, 0)
    assert (h.hit("abcd"), h.hit("abxy")) == (2, 4)
    assert h.ask(ClearRequested(1, chain("zz")), Cleared) == Cleared(0, 0)


def test_leased_blocks_are_out_of_sight_at_once_and_free_with_their_lease() -> None:
    h = Harness()
    h.store("abcd")
    acquired = h.acquire("ab")
    slots = acquired.runs[0].slots.tolist()
    assert h.ask(ClearRequested(), Cleared) == Cleared(4, 2)
    assert h.hit("abcd") == 0
    assert h.used == 2
    again = h.store("ab")
    assert not set(slots) & set(again.grants[0].slots.tolist())
    h.release(acquired)
    assert h.used == 2
    assert h.hit("ab") == 2


def test_what_leads_to_a_cleared_leased_block_stays_leased() -> None:
    """A lease on four blocks holds the first two as well when the last two are cleared from under it."""
    h = Harness(slots=4, slab_slots=4)
    h.store("abcd")
    acquired = h.acquire("abcd")
    h.ask(ClearRequested(1, chain("abc")), Cleared)
    assert len(h.reserve("wxyz").blocks) == 0
    h.release(acquired)
    assert len(h.reserve("wxyz").blocks) == 4


def test_a_part_that_failed_verification_takes_what_follows() -> None:
    h = Harness()
    h.store("abcd")
    space = h.planner.state.namespaces[1]
    row = int(space.tree.walk(chain("abcd")).nodes[-1].row_array()[1])
    generation = int(space.table.parts[0].generations[row])
    event = PartFailedVerification(1, 0, row, generation)
    assert h.ask(event, Cleared) == Cleared(3, 0)
    assert h.hit("abcd") == 1
    assert h.planner.state.stats.parts_failed_verification == 1
    h.refused(event, Kind.FAILED_PRECONDITION, Refusal.STALE)


def test_a_stale_verification_changes_nothing() -> None:
    h = Harness()
    h.store("ab")
    for row, generation, part in ((0, 99, 0), (1 << 31, 1, 0), (-1, 1, 0), (0, 1, 5), (0, 0, 0)):
        event = PartFailedVerification(1, part, row, generation)
        h.refused(event, Kind.FAILED_PRECONDITION, Refusal.STALE)
    assert h.hit("ab") == 2


def test_bad_arguments() -> None:
    h = Harness()
    h.refused(ClearRequested(None, chain("a")), Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID)
    h.refused(ClearRequested(9), Kind.NOT_FOUND, Refusal.NAMESPACE_UNKNOWN)
    h.refused(ClearRequested(1, b"x"), Kind.INVALID_ARGUMENT, Refusal.KEYS_INVALID)


def test_cleared_is_announced() -> None:
    h = Harness(publish=True)
    h.store("ab")
    h.store("ac")
    h.send(ClearRequested(1, chain("a")))
    told = [command for command in h.all if isinstance(command, Published)]
    assert {(each.change, each.keys, each.parent) for each in told} == {
        (Change.REMOVED, chain("a"), b""),
        (Change.REMOVED, chain("ab")[32:], chain("a")),
        (Change.REMOVED, chain("ac")[32:], chain("a")),
    }
    assert told[-1].keys == chain("a")  # a prefix loses its tail first
    h.store("ab")
    h.send(ClearRequested(1))
    told = [command for command in h.all if isinstance(command, Published)]
    assert [(each.change, each.keys) for each in told] == [(Change.CLEARED, b"")]
