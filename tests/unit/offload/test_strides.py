"""The canonical order in numbers, and the sizes it refuses."""

import pytest

from prefixcache_offload.strides import PartShape, Span, Strided

PART = PartShape(kv_heads=4, layers=3, tokens=8, k_dim=6, v_dim=2, itemsize=2, scale_bytes=16)


def test_sizes_add_up() -> None:
    assert PART.layer_bytes == 8 * 8 * 2 + 16
    assert PART.head_bytes == 3 * PART.layer_bytes
    assert PART.part_bytes == 4 * PART.head_bytes


def test_views_lie_in_canonical_order() -> None:
    span = Span(first_head=1, heads=2, first_layer=2, layers=1)
    start = PART.head_bytes + 2 * PART.layer_bytes
    steps = (PART.head_bytes, PART.layer_bytes)
    assert PART.view("k", span) == Strided(start, (2, 1, 8, 6), (*steps, 12, 2))
    assert PART.view("v", span) == Strided(start + 8 * 6 * 2, (2, 1, 8, 2), (*steps, 4, 2))
    assert PART.scales(span) == Strided(start + 8 * 8 * 2, (2, 1, 16), (*steps, 1))


def test_heads_of_a_rank_are_one_contiguous_range_and_the_parts_tile_the_slot() -> None:
    covered: list[int] = []
    for head in range(4):
        span = Span(head, 1, 0, 3)
        for view, size in ((PART.view("k", span), 2), (PART.view("v", span), 2), (PART.scales(span), 1)):
            for layer in range(3):
                first = view.offset + layer * view.strides[1]
                covered += range(first, first + view.elements // 3 * size)
        inside = covered[-PART.head_bytes :]
        assert (min(inside), max(inside)) == (head * PART.head_bytes, (head + 1) * PART.head_bytes - 1)
    assert sorted(covered) == list(range(PART.part_bytes))


@pytest.mark.parametrize(
    "span", [Span(0, 5, 0, 3), Span(-1, 1, 0, 1), Span(0, 0, 0, 1), Span(3, 2, 0, 1), Span(0, 4, 3, 1)]
)
def test_spans_outside_are_refused(span: Span) -> None:
    with pytest.raises(ValueError, match="outside"):
        PART.view("k", span)


@pytest.mark.parametrize(
    "sizes",
    [
        (0, 1, 1, 1, 1, 2),
        (1, 1, 1, 1, -1, 2),
        (1, 1, 1, 1, 1, 3),
        (1, 1, 1, 1, 1, 2, 3),
        (2**20, 2**20, 64, 128, 128, 2),
    ],
)
def test_impossible_parts_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"sizes|supported|unaligned|larger"):
        PartShape(*sizes)
