"""States to blocks and back, against a plain loop over the canonical order; also where K and V differ in size."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_transformers import compat
from prefixcache_transformers.block_store import MemoryBlockStore, split_keys
from prefixcache_transformers.cache_io import RestoredRow, needed_from, restore, take_snapshot
from prefixcache_transformers.probe import CacheShape

SIZE = 4
CPU = torch.device("cpu")
shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))


def shape_of(full: tuple[int, int, int], sliding: tuple[int, int, int] | None, window: int) -> CacheShape:
    """Two full layers around one sliding one, each with (KV heads, dims of K, dims of V)."""
    groups = [LayerGroup(GroupKind.FULL, (0, 2), *full, "float32")]
    if sliding:
        groups.append(LayerGroup(GroupKind.SLIDING, (1,), *sliding, "float32", window))
    layout = Layout.of(*groups)
    return CacheShape(layout, torch.float32, (CPU,) * len(layout.groups))


def empty_cache(shape: CacheShape) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [compat.DynamicLayer() for _ in range(3)]
    for group in shape.layout.groups:
        for layer in group.layers:
            if group.window_tokens:
                cache.layers[layer] = compat.RecordingSlidingLayer(group.window_tokens)
    return cache


def filled_cache(shape: CacheShape, rows: int, columns: int) -> tuple[DynamicCache, dict[int, list[torch.Tensor]]]:
    """A cache that has seen two updates, and all its states by layer: [k, v] of [row, head, column, dim]."""
    cache, states = empty_cache(shape), {}
    for group in shape.layout.groups:
        for layer in group.layers:
            states[layer] = [
                torch.randn(rows, group.kv_heads, columns, dim) for dim in (group.k_dim, group.v_dim)
            ]  # fmt: skip
            for span in (slice(0, columns // 2), slice(columns // 2, columns)):
                cache.layers[layer].update(*(state[:, :, span] for state in states[layer]))
    return cache, states


def canonical(shape: CacheShape, part: int, states: dict[int, list[torch.Tensor]], row: int, first: int) -> bytes:
    """One part of the block that begins at column `first`, value by value in the order the design names."""
    group, values = shape.layout.groups[part], []
    for head in range(group.kv_heads):
        for layer in group.layers:
            for state in states[layer]:
                values += [state[row, head, token] for token in range(first, first + SIZE)]
    return torch.cat(values).numpy().tobytes()


@settings(deadline=None, max_examples=60)
@given(shapes, st.none() | shapes, st.integers(2, 14), st.lists(st.integers(0, 9), min_size=1, max_size=3), st.data())
def test_blocks_and_back(
    full: tuple[int, int, int],
    sliding: tuple[int, int, int] | None,
    window: int,
    pads: list[int],
    data: st.DataObject,
) -> None:
    shape = shape_of(full, sliding, window)
    columns = 24
    cache, states = filled_cache(shape, len(pads), columns)
    snapshot = take_snapshot(cache, shape, SIZE, 0)
    store = MemoryBlockStore(shape.layout, SIZE)
    keys = [bytes([row, block]).ljust(32) for row in range(len(pads)) for block in range(columns // SIZE)]
    row_keys = [b"".join(keys[row * 6 : row * 6 + (columns - pad) // SIZE]) for row, pad in enumerate(pads)]
    for row, pad in enumerate(pads):
        blocks = len(row_keys[row]) // 32
        for parts in snapshot.parts(row, pad, range(blocks)):
            store.store(row_keys[row], parts)
        for number, key in enumerate(split_keys(row_keys[row])):
            for part in range(len(shape.layout.groups)):
                expected = canonical(shape, part, states, row, pad + number * SIZE)
                assert store.part(key, part) == expected
    # Any cut that whole blocks of every row reach.
    column = data.draw(st.integers(1, min(pad + len(k) // 32 * SIZE for pad, k in zip(pads, row_keys, strict=True))))
    rows = [
        RestoredRow(pad, max(0, column - pad), tuple(covering(store, k, max(0, column - pad))))
        for pad, k in zip(pads, row_keys, strict=True)
    ]
    restored = empty_cache(shape)
    assert restore(restored, shape, SIZE, rows, column)
    for group in shape.layout.groups:
        for layer in group.layers:
            check_layer(restored.layers[layer], group, states[layer], rows, column)


def covering(store: MemoryBlockStore, keys: bytes, tokens: int) -> list[object]:
    """Leases that end around the cut, as restoring takes them where a window needs it."""
    return [store.acquire(keys[: blocks * 32], tokens) for blocks in (-(-tokens // SIZE), tokens // SIZE)]


def check_layer(
    layer: compat.DynamicLayer, group: LayerGroup, states: list[torch.Tensor], rows: list[RestoredRow], column: int
) -> None:
    assert layer.get_seq_length() == column
    kept = min(column, group.window_tokens - 1) if group.window_tokens else column
    for restored, state in zip((layer.keys, layer.values), states, strict=True):
        assert restored.shape[2] == kept
        for number, row in enumerate(rows):
            seen = row.pad + needed_from(group, row.tokens)  # columns that the next query may look at
            first = max(seen, column - kept)
            assert torch.equal(restored[number, :, first - column + kept :], state[number, :, first:column])
            hidden = restored[number, :, : max(0, min(row.pad, column) - column + kept)]
            assert not hidden.any(), "padding must be finite, and here it is zero"


def test_a_lost_copy_leaves_the_cache_empty() -> None:
    shape = shape_of((2, 4, 4), None, 0)
    cache, _ = filled_cache(shape, 1, 8)
    store = MemoryBlockStore(shape.layout, SIZE)
    keys = b"a".ljust(32) + b"b".ljust(32)
    for parts in take_snapshot(cache, shape, SIZE, 0).parts(0, 0, range(2)):
        assert store.store(keys, parts) == 2

    class Lost:
        """A lease whose slots were taken while it copied."""

        blocks = 2

        def first_block(self, part: int) -> int:
            return 0

        def copy_to(self, targets: object) -> bool:
            return False

        def release(self, used_blocks: int) -> None:
            """Nothing held."""

    restored = empty_cache(shape)
    assert not restore(restored, shape, SIZE, [RestoredRow(0, 8, (Lost(),))], 8)
    assert restored.get_seq_length() == 0


def test_snapshots_come_in_bounded_pieces() -> None:
    group = LayerGroup(GroupKind.FULL, (0,), 8, 128, 128, "float32")
    layout = Layout.of(group)
    cache = DynamicCache()
    cache.update(torch.zeros(1, 8, 20480, 128), torch.zeros(1, 8, 20480, 128), 0)
    snapshot = take_snapshot(cache, CacheShape(layout, torch.float32, (CPU,)), 64, 0)
    pieces = [parts[0] for parts in snapshot.parts(0, 0, range(320))]
    assert [piece.first_block for piece in pieces] == [0, 128, 256]
    assert [len(piece.tensor) for piece in pieces] == [128, 128, 64]
    assert pieces[0].tensor.nbytes == 64 << 20
