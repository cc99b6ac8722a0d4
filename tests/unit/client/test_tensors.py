"""Tensors of every shape hold the right bytes after a trip through slots, checked against a plain loop."""

from typing import Any

import numpy as np
import pytest
import torch

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import Blocks, Layers, Pages, Rows
from prefixcache_client.blocks import BlockFormat
from prefixcache_client.tensors import Several, as_tensors
from prefixcache_offload import transfer
from prefixcache_offload.memory import Memory

HEADS, DIM, SIZE = 2, 8, 16
FORM = BlockFormat(Layout.of(LayerGroup(GroupKind.FULL, (0, 1, 2), HEADS, DIM, DIM, "float32")), SIZE)
HYBRID = BlockFormat(
    Layout.of(
        LayerGroup(GroupKind.FULL, (0, 2), HEADS, DIM, DIM, "float32"),
        LayerGroup(GroupKind.SLIDING, (1,), HEADS, DIM, DIM, "float32", 33),
    ),
    SIZE,
)
SLOTS = np.array([9, 3, 4, 5, 1], np.uint32) * 3


def canonical(layers: list[tuple[np.ndarray, np.ndarray]], token: int) -> bytes:
    """The block that begins at `token`, by the definition: [head][layer][k tokens | v tokens]."""
    out = b""
    for head in range(HEADS):
        for k, v in layers:
            out += k[head, token : token + SIZE].tobytes() + v[head, token : token + SIZE].tobytes()
    return out


def kv(tokens: int, layers: int = 3, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    shape = (HEADS, tokens, DIM)
    return [(rng.random(shape, np.float32), rng.random(shape, np.float32)) for _ in range(layers)]


def put(tensors: Any, blocks: list[int], form: BlockFormat = FORM, part: int = 0) -> np.ndarray:
    """Store into an empty pool; u8[blocks, part bytes]."""
    pool = np.zeros(64 * 4096, np.uint8)
    slots = SLOTS[: len(blocks)]
    transfer.store(Memory.of_bytes(pool), as_tensors(tensors).jobs(form, part, np.array(blocks), slots))
    size = form.parts[part].bytes
    return np.stack([pool[slot * 4096 : slot * 4096 + size] for slot in slots.tolist()])


def get(tensors: Any, data: np.ndarray, blocks: list[int], form: BlockFormat = FORM, part: int = 0) -> None:
    """Load u8[blocks, part bytes] out of a pool."""
    pool = np.zeros(64 * 4096, np.uint8)
    slots = SLOTS[: len(blocks)]
    for slot, row in zip(slots.tolist(), data, strict=True):
        pool[slot * 4096 : slot * 4096 + row.size] = row
    pool.flags.writeable = False
    transfer.load(Memory.of_bytes(pool), as_tensors(tensors).jobs(form, part, np.array(blocks), slots))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_layers_of_a_transformers_cache(kind: str) -> None:
    layers = kv(80)
    batch = [(np.stack([k * 0, k]), np.stack([v * 0, v])) for k, v in layers]
    tensors: Any = batch if kind == "numpy" else [(torch.from_numpy(k), torch.from_numpy(v)) for k, v in batch]
    data = put(Layers(tensors, row=1), [0, 2, 4])
    for row, block in zip(data, [0, 2, 4], strict=True):
        assert row.tobytes() == canonical(layers, block * SIZE)
    empty: Any = [(k * 0, v * 0) for k, v in tensors]
    get(Layers(empty, row=1), data, [0, 2, 4])
    for (k, v), (k0, v0) in zip(empty, layers, strict=True):
        for block in (0, 2, 4):
            at = slice(block * SIZE, block * SIZE + SIZE)
            assert np.array_equal(k[1][:, at], k0[:, at])
            assert np.array_equal(v[1][:, at], v0[:, at])
        assert not np.asarray(k[1][:, SIZE : 2 * SIZE]).any(), "block 1 was not asked for"
        assert not np.asarray(k[0]).any(), "the other row is another prompt's"


def test_layers_that_begin_later() -> None:
    layers = kv(80)
    late = [(k[:, 24:], v[:, 24:]) for k, v in layers]
    tensors = Layers(late, row=None, first_tokens=24)
    assert tensors.covers(FORM, 0) == range(2, 5)
    assert put(tensors, [3])[0].tobytes() == canonical(layers, 48)
    assert Layers(late, row=None, first_tokens=24, tokens=30).covers(FORM, 0) == range(2, 3)


def test_layers_of_two_groups_cover_what_each_has() -> None:
    layers = kv(80)
    cut = [layers[0], (layers[1][0][:, 40:], layers[1][1][:, 40:]), layers[2]]
    tensors = Layers(cut, row=None, first_tokens={1: 40})
    assert tensors.covers(HYBRID, 0) == range(5)
    assert tensors.covers(HYBRID, 1) == range(3, 5)
    data = put(tensors, [3], HYBRID, part=1)[0].tobytes()
    assert data == canonical([layers[1]], 48)
    assert Layers({0: layers[0]}, row=None).covers(HYBRID, 1) == range(0), "a layer that is not passed is not there"


def test_blocks_in_one_array_and_in_many() -> None:
    data = np.random.default_rng(1).integers(0, 256, (5, FORM.parts[0].bytes), dtype=np.uint8)
    assert np.array_equal(put(data, [0, 1, 4]), data[[0, 1, 4]])
    assert np.array_equal(put(list(data), [1, 3]), data[[1, 3]])
    assert np.array_equal(put(Blocks(data, first_block=7), [8, 9, 11]), data[[1, 2, 4]])
    target = np.zeros_like(data)
    get(target, data[:3], [0, 2, 4])
    assert np.array_equal(target[[0, 2, 4]], data[:3])
    assert not target[[1, 3]].any()


def test_rows_in_any_order() -> None:
    data = np.random.default_rng(1).integers(0, 256, (7, FORM.parts[0].bytes), dtype=np.uint8)
    for rows in ([5, 0, 3, 6, 1], [6, 5, 4, 3, 2], [2, 2, 0, 1, 6], [1, 2, 3, 4, 5]):
        assert np.array_equal(put(Rows(data, rows), [0, 1, 2, 4]), data[rows][[0, 1, 2, 4]])
        if len(set(rows)) == len(rows):
            target = np.zeros_like(data)
            get(Rows(target, rows), data[:3], [0, 2, 4])
            assert np.array_equal(target[[rows[0], rows[2], rows[4]]], data[:3])
            assert np.count_nonzero(target.any(axis=1)) == 3
    with pytest.raises(ValueError, match="rows must be from 0 to 6"):
        put(Rows(data, [0, 7]), [0, 1])
    assert Rows(data, [0, 7]).covers(FORM, 1) == range(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_blocks_with_strides_are_read_in_c_order(dtype: torch.dtype) -> None:
    itemsize = torch.empty((), dtype=dtype).element_size()
    state = torch.randn(3, 2, HEADS, 5 * SIZE, DIM * 4 // itemsize).to(dtype)
    blocks = [state[:, :, :, b * SIZE : b * SIZE + SIZE].permute(2, 0, 1, 3, 4) for b in range(5)]
    data = put(blocks, [0, 1, 2, 4])
    for row, block in zip(data, [0, 1, 2, 4], strict=True):
        assert row.tobytes() == blocks[block].contiguous().view(torch.uint8).numpy().tobytes()
    empty = torch.zeros_like(state)
    get([empty[:, :, :, b * SIZE : b * SIZE + SIZE].permute(2, 0, 1, 3, 4) for b in range(5)], data, [0, 1, 2, 4])
    assert torch.equal(empty[:, :, :, : 3 * SIZE], state[:, :, :, : 3 * SIZE])
    assert not empty[:, :, :, 3 * SIZE : 4 * SIZE].any()


@pytest.mark.parametrize("page", [4, 16, 32])
@pytest.mark.parametrize("fused", [True, False])
def test_pages_of_an_engine(page: int, fused: bool) -> None:
    layers, tokens = kv(64), 64
    count = tokens // page
    ids = np.random.default_rng(page).permutation(count + 3)[:count]
    caches: list[Any] = []
    for k, v in layers:
        cache = np.zeros((2, count + 3, page, HEADS, DIM), np.float32)
        for index, number in enumerate(ids):
            cache[0, number] = k[:, index * page : index * page + page].transpose(1, 0, 2)
            cache[1, number] = v[:, index * page : index * page + page].transpose(1, 0, 2)
        caches.append(cache if fused else (cache[0], cache[1]))
    tensors = Pages(caches, ids, "cbthd" if fused else "bthd")
    assert tensors.covers(FORM, 0) == range(4)
    data = put(tensors, [0, 1, 3])
    for row, block in zip(data, [0, 1, 3], strict=True):
        assert row.tobytes() == canonical(layers, block * SIZE)


def test_pages_that_are_not_there_end_what_is_covered() -> None:
    cache = [np.zeros((2, 9, 8, HEADS, DIM), np.float32)] * 3
    assert Pages(cache, [1, -1, 3, 4, 5, 6]).covers(FORM, 0) == range(1, 3)
    assert Pages(cache, [1, 2, -1]).covers(FORM, 0) == range(2, 1)


def test_several_take_the_first_that_has_the_part() -> None:
    first = np.zeros((2, HYBRID.parts[0].bytes), np.uint8)
    second = np.ones((4, HYBRID.parts[1].bytes), np.uint8)
    both = as_tensors([Blocks(first, 0), Blocks(second, 1, 5)])
    assert isinstance(both, Several)
    assert (both.covers(HYBRID, 0), both.covers(HYBRID, 1)) == (range(2), range(5, 9))
    assert put(both, [6], HYBRID, 1).all()


def test_int4_and_mla() -> None:
    int4 = BlockFormat(Layout.of(LayerGroup(GroupKind.FULL, (0,), 1, 8, 8, "int4")), SIZE)
    k, v = (np.random.default_rng(i).integers(0, 256, (1, SIZE, 4), np.uint8) for i in range(2))
    assert put(Layers([(k, v)], row=None), [0], int4)[0].tobytes() == k.tobytes() + v.tobytes()
    mla = BlockFormat(Layout.of(LayerGroup(GroupKind.FULL, (0,), 1, 24, 0, "bfloat16")), SIZE)
    latent = np.random.default_rng(2).integers(0, 999, (1, SIZE, 24), np.uint16)
    assert put(Layers([(latent, None)], row=None), [0], mla)[0].tobytes() == latent.tobytes()


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((5, 10), np.uint8),
        [np.zeros(10, np.uint8)] * 5,
        [(np.zeros((1, HEADS + 1, 80, DIM), np.float32),) * 2] * 3,
        [(np.zeros((1, HEADS, 80, DIM + 1), np.float32),) * 2] * 3,
        Pages([np.zeros((2, 9, 12, HEADS, DIM), np.float32)] * 3, [0, 1, 2, 3]),
        Layers([(np.zeros((HEADS, 80), np.float32),) * 2] * 3, row=None),
        [np.zeros(FORM.parts[0].bytes // 16, np.complex128)] * 5,
    ],
)
def test_wrong_sizes_raise(bad: Any) -> None:
    with pytest.raises(ValueError):
        put(bad, [0, 1])


@pytest.mark.parametrize("bad", [None, 7, [], [1, 2], "text", [(1,)]])
def test_what_is_no_tensor(bad: Any) -> None:
    with pytest.raises(TypeError):
        as_tensors(bad)


def test_opaque_parts_go_as_blocks_only() -> None:
    native = BlockFormat(
        Layout.of(LayerGroup(GroupKind.FULL, (0,), 1, 8, 8, "float32"), packing="native:engine:avx2"), SIZE
    )
    data = np.arange(native.parts[0].bytes, dtype=np.uint8)[None]
    assert np.array_equal(put(data, [0], native), data)
    with pytest.raises(ValueError, match="opaque"):
        put(kv(16, 1), [0], native)
