"""Pages through every layout and back, whoever wrote them, and the bytes they have in the cache."""

from typing import Any

import numpy as np
import pytest
import torch

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import Blocks, Layers
from tests.unit.sglang_adapter.conftest import MakeBackend
from tests.unit.sglang_adapter.stub_sglang import (
    FlatPool,
    MlaPool,
    Pool,
    RunsPool,
    Shape,
    fill,
    indices,
    keys,
    raw,
)

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_unified")
PAGES, ELSEWHERE = [3, 1, 7, 2], [9, 4, 0, 11]


def contents(pool: Any, pages: list[int]) -> list[bytes]:
    return [raw(pool.page(page)) for page in pages]


@pytest.mark.parametrize("written", LAYOUTS)
def test_a_page_written_in_one_layout_is_read_in_every_other(make: MakeBackend, written: str) -> None:
    groups = 2 if written == "page_unified" else 1
    source = Pool(written, Shape(groups=groups))
    fill(source, 1)
    wanted, names = [raw(source.page(page).reshape(2, 3, 4, 4, 8)) for page in PAGES], keys(4)
    assert make(source).batch_set_v1(names, indices(source, PAGES)) == [True] * 4
    for read in LAYOUTS:
        target = Pool(read, Shape())
        fill(target, 2)
        before = contents(target, list(range(16)))
        backend = make(target)
        assert backend.batch_exists(names) == 4
        assert backend.batch_get_v1(names, indices(target, ELSEWHERE)) == [True] * 4
        assert contents(target, ELSEWHERE) == wanted, f"{written} read in {read}"
        others = [page for page in range(16) if page not in ELSEWHERE]
        assert contents(target, others) == [before[page] for page in others], "other pages were touched"


@pytest.mark.parametrize("written", MLA_LAYOUTS)
def test_latents_written_in_one_layout_are_read_in_every_other(make: MakeBackend, written: str) -> None:
    source = MlaPool(written, Shape())
    fill(source, 1)
    make(source, is_mla_model=True).batch_set_v1(keys(4), indices(source, PAGES))
    for read in MLA_LAYOUTS:
        target = MlaPool(read, Shape())
        assert make(target, is_mla_model=True).batch_get_v1(keys(4), indices(target, ELSEWHERE)) == [True] * 4
        assert contents(target, ELSEWHERE) == contents(source, PAGES)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_heads_of_k_and_v_that_differ_in_size(make: MakeBackend, layout: str) -> None:
    source, target = Pool(layout, Shape(v_dim=4)), Pool(layout, Shape(v_dim=4))
    fill(source, 1)
    make(source).batch_set_v1(keys(4), indices(source, PAGES))
    assert make(target).batch_get_v1(keys(4), indices(target, PAGES)) == [True] * 4
    for there, here in zip(source.kv_buffer, target.kv_buffer, strict=True):
        pages = [each.unflatten(0, (16, 4)) if layout == "page_first" else each for each in (there, here)]
        assert raw(pages[0][PAGES]) == raw(pages[1][PAGES])


@pytest.mark.parametrize("kind", [RunsPool, FlatPool])
def test_bytes_nobody_understands_come_back_as_they_were(make: MakeBackend, kind: Any) -> None:
    source, target = kind(), kind()
    fill(source, 1)
    assert make(source).batch_set_v1(keys(4), indices(source, PAGES)) == [True] * 4
    assert make(target).batch_get_v1(keys(4), indices(target, ELSEWHERE)) == [True] * 4
    assert contents(target, ELSEWHERE) == contents(source, PAGES)
    assert not target.page(5).any()


@pytest.mark.parametrize("other", [RunsPool((20, 48)), RunsPool((68,)), RunsPool(layout="other"), FlatPool()])
def test_bytes_nobody_understands_are_not_found_by_a_pool_that_differs(make: MakeBackend, other: Any) -> None:
    source = RunsPool()
    fill(source, 1)
    make(source).batch_set_v1(keys(4), indices(source, PAGES))
    assert make(RunsPool()).batch_exists(keys(4)) == 4
    assert make(other).batch_exists(keys(4)) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_in_the_cache_are_the_canonical_ones_of_every_engine(make: MakeBackend, layout: str) -> None:
    """SGLang's keys are its own, so no block is shared with another engine; the bytes are the same nevertheless."""
    pool = Pool(layout, Shape())
    fill(pool, 3)
    backend = make(pool)
    backend.batch_set_v1(keys(1), indices(pool, [5]))
    shelf = backend._shelves["kv"]
    block_bytes = shelf._cache.ns.block_bytes
    ours = np.zeros((1, block_bytes), np.uint8)
    with shelf._cache.acquire(shelf._names(keys(1))) as lease:
        assert lease.copy_to(Blocks(ours)).ok
    kv = pool.page(5).reshape(2, 3, 4, 4, 8)  # K or V, layer, token, head, value
    by_hand = kv.permute(3, 1, 0, 2, 4).contiguous()  # head, layer, K or V, token, value
    assert ours.tobytes() == raw(by_hand)
    # The block another engine writes, by way of the layout Transformers keeps KV in.
    client, group = backend._client, LayerGroup(GroupKind.FULL, (0, 1, 2), 4, 8, 8, "bfloat16")
    tokens = client.namespace(Layout.of(group), layout.encode().ljust(32, b"."), block_tokens=4)
    layers = [tuple(kv[part, i].transpose(0, 1)[None].contiguous() for part in (0, 1)) for i in range(3)]
    assert client.store(tokens, [1, 2, 3, 4], Layers(layers)).stored_blocks == 1
    theirs = np.zeros((1, block_bytes), np.uint8)
    with client.acquire(tokens, [1, 2, 3, 4]) as lease:
        assert lease.copy_to(Blocks(theirs)).ok
    assert theirs.tobytes() == ours.tobytes()


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "page_unified"])
def test_flat_pages_and_pages_in_place_are_the_same_pages(make: MakeBackend, layout: str) -> None:
    pool = Pool(layout, Shape())
    fill(pool, 4)
    backend, names = make(pool), keys(4)
    assert backend.batch_set(names[:2], [pool.get_data_page(page * 4) for page in PAGES[:2]])
    assert backend.set(names[2], pool.get_data_page(PAGES[2] * 4))
    assert [backend.exists(name) for name in names] == [True, True, True, False]
    target = Pool("page_head", Shape())
    assert make(target).batch_get_v1(names[:3], indices(target, PAGES[:3])) == [True] * 3
    assert contents(target, PAGES[:3]) == contents(pool, PAGES[:3])
    wanted = [pool.get_data_page(page * 4).clone() for page in PAGES]
    got = backend.batch_get(names, [pool.get_dummy_flat_data_page() for _ in names])
    assert [None if each is None else raw(each) for each in got] == [*map(raw, wanted[:3]), None]
    assert raw(backend.get(names[0], pool.get_dummy_flat_data_page())) == raw(wanted[0])
    assert backend.get(names[3], pool.get_dummy_flat_data_page()) is None


def test_flat_pages_of_bytes_nobody_understands(make: MakeBackend) -> None:
    pool = FlatPool()
    fill(pool, 1)
    backend = make(pool)
    assert backend.batch_set(keys(2), [pool.get_data_page(5), pool.get_data_page(6)])
    got = backend.batch_get(keys(2), [pool.get_dummy_flat_data_page() for _ in range(2)])
    assert [raw(each) for each in got] == contents(pool, [5, 6])


def test_quantised_values_move_as_bytes(make: MakeBackend) -> None:
    for dtype in (torch.float8_e4m3fn, torch.uint8):
        source, target = Pool("page_first", Shape(dtype=dtype)), Pool("layer_first", Shape(dtype=dtype))
        fill(source, 1)
        make(source).batch_set_v1(keys(2), indices(source, [1, 2]))
        assert make(target).batch_get_v1(keys(2), indices(target, [1, 2])) == [True, True]
        assert contents(target, [1, 2]) == contents(source, [1, 2])
