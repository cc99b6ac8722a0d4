"""What a process may say it writes of a store, and what it tells the daemon of it."""

import numpy as np
import pytest

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import Namespace, Portion
from prefixcache_client.namespace import Secrets, namespace_of
from prefixcache_client.portions import reservation_id
from prefixcache_client.runs import SlotRun

TICKET = b"t" * 16
LAYOUT = Layout.of(
    LayerGroup(GroupKind.FULL, (0, 1, 2), 4, 8, 8, "bfloat16"),
    LayerGroup(GroupKind.SLIDING, (3,), 1, 8, 8, "bfloat16", 48),
)


def namespace(**more: str) -> Namespace:
    return namespace_of(LAYOUT, b"w" * 32, Secrets(None, b"", ""), block_tokens=16, **more)  # type: ignore[arg-type] # codec


def run(part: int) -> SlotRun:
    return SlotRun(part, 0, np.arange(2), np.arange(2, dtype=np.uint32), np.ones(2, np.uint64))


def test_what_it_has_is_told_by_part() -> None:
    portion = Portion(TICKET, (range(2, 4), range(0)), (range(1, 3), range(1)))
    portion.check(namespace().form)
    runs = portion.of([run(0), run(1)])
    assert [each.part for each in runs] == [0]
    (told,) = portion.written(runs)
    assert (told.part, told.first_head, told.heads, told.first_layer, told.layers) == (0, 2, 2, 1, 2)
    assert [portion.writes(mask) for mask in (0, 0b01, 0b10, 0b11)] == [True, True, False, True]


def test_without_layers_it_has_all_of_them() -> None:
    (told, other) = Portion(TICKET, (range(4), range(1))).written([run(0), run(1)])
    assert (told.first_layer, told.layers, other.heads) == (0, 0, 1)


def test_without_a_layer_of_a_part_it_writes_none_of_it() -> None:
    portion = Portion(TICKET, (range(4), range(1)), (range(3), range(0)))
    assert [each.part for each in portion.of([run(0), run(1)])] == [0]
    assert not portion.writes(0b10)


@pytest.mark.parametrize(
    ("ticket", "heads", "layers"),
    [
        (b"short", (range(4), range(1)), ()),
        (TICKET, (range(4),), ()),
        (TICKET, (range(5), range(1)), ()),
        (TICKET, (range(0, 4, 2), range(1)), ()),
        (TICKET, (range(-1, 2), range(1)), ()),
        (TICKET, (range(4), range(1)), (range(3),)),
        (TICKET, (range(4), range(1)), (range(4), range(1))),
    ],
)
def test_what_a_layout_does_not_have(ticket: bytes, heads: tuple[range, ...], layers: tuple[range, ...]) -> None:
    with pytest.raises(ValueError, match=r"part|ticket"):
        Portion(ticket, heads, layers).check(namespace().form)


def test_runs_say_what_of_a_block_is_written() -> None:
    portion = Portion(TICKET, (range(2, 4), range(1)), (range(1, 3), range(1)))
    portion.check(namespace(codec="int8").form)
    one, other = portion.of([run(0), run(1)])
    assert (one.heads, one.layers, other.heads, other.layers) == (range(2, 4), range(1, 3), range(1), range(1))
    cut = one.within(range(1, 2))
    assert cut is not None
    assert (cut.blocks.tolist(), cut.heads, cut.layers) == ([1], range(2, 4), range(1, 3))
    (whole, _) = Portion(TICKET, (range(4), range(1))).of([run(0), run(1)])
    assert (whole.heads, whole.layers) == (range(4), None)


def test_names_of_reservations() -> None:
    names = [reservation_id(TICKET, number) for number in range(3)]
    assert names[0] == TICKET
    assert len(set(names)) == 3
    assert {len(name) for name in names} == {16}
