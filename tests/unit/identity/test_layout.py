"""Layouts: sizes against arithmetic done by hand, and everything that no model can have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.identity import GroupKind, LayerGroup, Layout, LayoutError
from prefixcache.identity.canonical import pack, unpack

FULL = LayerGroup(GroupKind.FULL, tuple(range(30)), kv_heads=3, k_dim=64, v_dim=64, dtype="bfloat16")
SLIDING = LayerGroup(GroupKind.SLIDING, (0, 1, 3, 4), 1, 256, 256, "bfloat16", window_tokens=512)
GLOBAL = LayerGroup(GroupKind.FULL, (2, 5), 1, 256, 256, "bfloat16")

groups = st.builds(
    lambda kind, layers, heads, dims, dtype, window, scales: LayerGroup(
        kind, tuple(sorted(layers)), heads, dims[0], dims[1], dtype, window * (kind is GroupKind.SLIDING), scales
    ),
    st.sampled_from(GroupKind),
    st.sets(st.integers(0, 100), min_size=1, max_size=20),
    st.integers(1, 16),
    st.tuples(st.integers(1, 64).map(lambda n: n * 2), st.integers(0, 64).map(lambda n: n * 2)),
    st.sampled_from(["bfloat16", "float32", "int8", "float8_e4m3fn", "int4"]),
    st.integers(1, 5000),
    st.integers(0, 64),
)
layouts = st.builds(
    lambda groups, stages: Layout.of(*groups, stages=tuple(sorted(stages))),
    st.lists(groups, min_size=1, max_size=4, unique_by=lambda group: group.shape),
    st.sets(st.integers(1, 100), max_size=3),
)


def test_smollm2_is_22_5_kib_a_token() -> None:
    layout = Layout.of(FULL)
    (part,) = layout.parts(64)
    assert part.bytes == layout.block_bytes(64) == 64 * 30 * 3 * 2 * 64 * 2 == 64 * 23040
    assert part.head_range(1, 2) == (part.bytes // 3, part.bytes // 3 * 2)


def test_a_hybrid_model_has_a_part_per_group_in_layer_order() -> None:
    layout = Layout.of(GLOBAL, SLIDING)
    assert [group.kind for group in layout.groups] == [GroupKind.SLIDING, GroupKind.FULL]
    sliding, full = layout.parts(64)
    assert (sliding.index, sliding.group, sliding.layer_count, sliding.bytes) == (0, 0, 4, 4 * 64 * 512 * 2)
    assert (full.index, full.group, full.layer_count, full.bytes) == (1, 1, 2, 2 * 64 * 512 * 2)
    assert [group.window_blocks(64) for group in layout.groups] == [8, 0]


def test_mla_is_one_head_without_values() -> None:
    layout = Layout.of(LayerGroup(GroupKind.FULL, tuple(range(27)), 1, 576, 0, "bfloat16"))
    assert layout.block_bytes(64) == 27 * 64 * 576 * 2


def test_opaque_blocks_have_the_bytes_they_have() -> None:
    for size in (64, 100, 12298, 1 << 20):
        layout = Layout.opaque(size, 64, "native:sglang:page-first")
        assert layout.block_bytes(64) == size
        assert len(layout.parts(64)) == 1
    with pytest.raises(LayoutError, match="name the engine"):
        Layout.opaque(4096, 64, "canonical")
    with pytest.raises(LayoutError):
        Layout.opaque(63, 64, "native:a:b")


def test_scales_are_counted_per_head_and_layer() -> None:
    layout = Layout.of(LayerGroup(GroupKind.FULL, (0, 1), 4, 128, 128, "int8", scale_bytes=32))
    assert layout.block_bytes(16) == 4 * 2 * (16 * 256 + 32)


def test_a_state_group_keeps_one_row_whatever_the_block() -> None:
    layout = Layout.of(LayerGroup(GroupKind.STATE, (0,), 8, 100, 1000, "float32"))
    assert layout.block_bytes(16) == layout.block_bytes(64) == 8 * 1100 * 4


def test_pipeline_stages_cut_parts_at_model_layers() -> None:
    parts = Layout.of(SLIDING, GLOBAL, stages=(3, 5)).parts(64)
    ranges = [(part.index, part.group, part.first_layer, part.layer_count) for part in parts]
    assert ranges == [(0, 0, 0, 2), (1, 0, 2, 2), (2, 1, 0, 1), (3, 1, 1, 1)]


@pytest.mark.parametrize(("window", "blocks"), [(1, 0), (2, 1), (64, 1), (65, 1), (66, 2), (512, 8), (4096, 64)])
def test_window_blocks(window: int, blocks: int) -> None:
    assert LayerGroup(GroupKind.SLIDING, (0,), 1, 1, 1, "int8", window_tokens=window).window_blocks(64) == blocks


def test_groups_of_equal_shape_are_joined() -> None:
    odd = LayerGroup(GroupKind.FULL, (1, 3), 2, 8, 8, "float16")
    even = LayerGroup(GroupKind.FULL, (0, 2), 2, 8, 8, "float16")
    assert Layout.of(odd, even).groups == (LayerGroup(GroupKind.FULL, (0, 1, 2, 3), 2, 8, 8, "float16"),)
    with pytest.raises(LayoutError, match="one group"):
        Layout((even, odd))
    with pytest.raises(LayoutError, match="ordered"):
        Layout((GLOBAL, SLIDING))


@given(layout=layouts, block_tokens=st.integers(1, 256))
def test_parts_add_up_and_number_in_order(layout: Layout, block_tokens: int) -> None:
    parts = layout.parts(block_tokens)
    assert [part.index for part in parts] == list(range(len(parts)))
    assert sum(part.bytes for part in parts) == layout.block_bytes(block_tokens)
    for number, group in enumerate(layout.groups):
        mine = [part for part in parts if part.group == number]
        covered = [layer for part in mine for layer in range(part.first_layer, part.first_layer + part.layer_count)]
        assert covered == list(range(len(group.layers)))
        assert all(part.kv_heads == group.kv_heads for part in mine)
        for part in mine:
            split = [part.head_range(head, 1) for head in range(part.kv_heads)]
            assert [offset for offset, _ in split] == [head * part.head_bytes for head in range(part.kv_heads)]


@given(layout=layouts)
def test_a_layout_survives_its_map(layout: Layout) -> None:
    assert Layout.from_map(unpack(pack(layout.to_map()))) == layout


@pytest.mark.parametrize(
    "change",
    [
        {"kv_heads": 0}, {"kv_heads": 1 << 40}, {"k_dim": 0}, {"k_dim": 1 << 40}, {"v_dim": -1}, {"scale_bytes": -1},
        {"dtype": "bf16"}, {"layers": ()}, {"layers": (1, 0)}, {"layers": (0, 0)}, {"layers": (-1,)},
        {"layers": (4096,)}, {"window_tokens": 1}, {"kind": GroupKind.SLIDING},
        {"kind": GroupKind.SLIDING, "window_tokens": 1 << 40},
    ],
)  # fmt: skip
def test_a_group_no_model_has_is_refused(change: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "kind": GroupKind.FULL, "layers": (0,), "kv_heads": 1, "k_dim": 64, "v_dim": 64, "dtype": "float32",
    }  # fmt: skip
    with pytest.raises(LayoutError):
        LayerGroup(**{**fields, **change})  # type: ignore[arg-type]  # bad input is the point


def test_sizes_that_overflow_are_refused() -> None:
    huge = LayerGroup(GroupKind.FULL, tuple(range(4096)), 65536, 1 << 24, 1 << 24, "float64")
    with pytest.raises(LayoutError, match="part 0 would be"):
        Layout.of(huge).parts(65536)
    many = [LayerGroup(GroupKind.FULL, (layer,), 1, 1 << 19, layer, "float64") for layer in range(40)]
    with pytest.raises(LayoutError, match="a block would be"):
        Layout.of(*many).parts(1000)
    with pytest.raises(LayoutError, match="block_tokens"):
        Layout.of(FULL).parts(0)


def test_int4_must_fill_bytes() -> None:
    odd = LayerGroup(GroupKind.FULL, (0,), 1, 3, 4, "int4")
    assert odd.layer_bytes(2) == 3 + 4
    with pytest.raises(LayoutError, match="whole bytes"):
        odd.layer_bytes(1)


@pytest.mark.parametrize("packing", ["", "native", "native:vllm", "native:vllm:amx:2", "native:VLLM:amx", "raw"])
def test_an_unknown_packing_is_refused(packing: str) -> None:
    assert Layout.of(FULL, packing="native:vllm:amx").packing == "native:vllm:amx"
    with pytest.raises(LayoutError, match="packing"):
        Layout.of(FULL, packing=packing)


@pytest.mark.parametrize("stages", [(0,), (2, 1), (3, 3), (5000,)])
def test_bad_stages_are_refused(stages: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="stages"):
        Layout.of(FULL, stages=stages)


@pytest.mark.parametrize(
    "change", [{"groups": 1}, {"groups": []}, {"packing": 1}, {"stages": ["1"]}, {"more": 1}, {"groups": [{}]}]
)
def test_a_map_that_is_no_layout_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(LayoutError):
        Layout.from_map({**Layout.of(FULL).to_map(), **change})  # type: ignore[dict-item]  # bad input is the point


@pytest.mark.parametrize("change", [{"kind": "half"}, {"layers": [True]}, {"kv_heads": "1"}, {"dtype": None}])
def test_a_map_that_is_no_group_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(LayoutError):
        LayerGroup.from_map({**FULL.to_map(), **change})  # type: ignore[dict-item]  # bad input is the point


def test_a_part_has_only_its_heads() -> None:
    (part,) = Layout.of(FULL).parts(64)
    for first, count in ((-1, 1), (0, 0), (2, 2), (3, 1)):
        with pytest.raises(LayoutError):
            part.head_range(first, count)
