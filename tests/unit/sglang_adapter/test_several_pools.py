"""The interface for several pools: windows, states, drafts; and pools without bytes."""

from typing import Any

import pytest

from tests.unit.sglang_adapter.conftest import MakeBackend, write_checkpoint
from tests.unit.sglang_adapter.stub_sglang import (
    ExtraInfo,
    LogicalPool,
    Pool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    RunsPool,
    Shape,
    fill,
    indices,
    keys,
    raw,
)

ALL, TRAILING = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES


@pytest.fixture
def pools() -> dict[Any, Any]:
    made: dict[Any, Any] = {
        PoolName.KV: Pool("page_first", Shape()),
        PoolName.SWA: Pool("page_first", Shape(layers=2)),
        PoolName.MAMBA: RunsPool(),
    }
    for seed, pool in enumerate(made.values()):
        fill(pool, seed)
    return made


def registered(make: MakeBackend, pools: dict[Any, Any]) -> Any:
    backend = make(pools[PoolName.KV])
    for name, pool in pools.items():
        backend.register_mem_host_pool_v2(pool, name)
    return backend


def test_what_each_pool_stored_comes_back_to_it(make: MakeBackend, pools: dict[Any, Any]) -> None:
    backend, names = registered(make, pools), keys(4)
    transfers = [PoolTransfer(name, indices(pool, [1, 2, 3, 4]), names, ALL) for name, pool in pools.items()]
    assert backend.batch_set_v2(transfers, ExtraInfo()) == {name: [True] * 4 for name in pools}
    assert backend.batch_exists(names) == 4, "the main pool's pages are the same through both interfaces"
    before = {name: [raw(pool.page(page)) for page in (1, 2, 3, 4)] for name, pool in pools.items()}
    back = [PoolTransfer(name, indices(pool, [8, 7, 6, 5]), names, ALL) for name, pool in pools.items()]
    assert backend.batch_get_v2(back) == {name: [True] * 4 for name in pools}
    assert {name: [raw(pool.page(page)) for page in (8, 7, 6, 5)] for name, pool in pools.items()} == before


def test_a_prefix_ends_where_every_pool_lets_it(make: MakeBackend, pools: dict[Any, Any]) -> None:
    backend, names = registered(make, pools), keys(8)
    backend.batch_set_v1(names[:7], indices(pools[PoolName.KV], range(7)))
    store = backend._store
    store("swa", [names[i] for i in (1, 2, 4, 5, 6)], indices(pools[PoolName.SWA], range(5)), [None] * 5)
    store("mamba", [names[i] for i in (2, 5)], indices(pools[PoolName.MAMBA], range(2)), [None] * 2)
    window = PoolTransfer(PoolName.SWA, None, names[:2], TRAILING)
    state = PoolTransfer(PoolName.MAMBA, None, names[:1], TRAILING)
    found = backend.batch_exists_v2(names, [window])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (7, [3, 6, 7])
    found = backend.batch_exists_v2(names, [window, state])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [3, 6])
    assert found.extra_pool_hit_pages == {PoolName.KV: 7, PoolName.SWA: 7, PoolName.MAMBA: 6}
    every = PoolTransfer(PoolName.SWA, None, names, ALL)
    assert backend.batch_exists_v2(names, [every]).kv_hit_pages == 0, "its first page is missing"
    unlimited = PoolTransfer(PoolName.SWA, None, names, PoolHitPolicy.BLOCK_GROUPS)
    assert backend.batch_exists_v2(names, [unlimited]).kv_hit_pages == 7
    assert backend.batch_exists_v2(names, None).kv_hit_pages == 7
    assert backend.batch_exists_v2([], [window]).kv_hit_pages == 0


def test_a_pool_nobody_registered_is_missing(make: MakeBackend, pools: dict[Any, Any]) -> None:
    backend, names = make(pools[PoolName.KV]), keys(2)
    backend.batch_set_v1(names, indices(pools[PoolName.KV], [0, 1]))
    transfer = PoolTransfer(PoolName.SWA, indices(pools[PoolName.SWA], [0, 1]), names, ALL)
    assert backend.batch_set_v2([transfer]) == {PoolName.SWA: [False, False]}
    assert backend.batch_get_v2([transfer]) == {PoolName.SWA: [False, False]}
    assert backend.batch_exists_v2(names, [transfer]).kv_hit_pages == 0
    numbers = backend.numbers
    assert numbers.not_stored == numbers.not_loaded == numbers.not_found == {"pool_unregistered": 2}


def test_a_pool_of_page_numbers_is_as_full_as_the_pools_beside_it(make: MakeBackend) -> None:
    backend, beside = make(LogicalPool()), RunsPool()
    backend.register_mem_host_pool_v2(beside, "c4")
    assert backend.batch_set_v1(keys(3), None) == backend.batch_get_v1(keys(3), None) == [True] * 3
    assert backend.batch_exists(keys(3)) == 0, "nothing vouches for a page"
    backend.batch_set_v2([PoolTransfer("c4", indices(beside, [1, 2]), keys(2), ALL)])
    assert backend.batch_exists_v2(keys(3), [PoolTransfer("c4", None, keys(3), ALL)]).kv_hit_pages == 2
    assert backend.batch_exists_v2(keys(3), [PoolTransfer("c4", None, keys(1), TRAILING)]).kv_hit_pages == 0


def test_a_draft_model_is_part_of_what_its_pages_are(make: MakeBackend, settings: Any, tmp_path: Any) -> None:
    pool, names = Pool("page_first", Shape(layers=1)), keys(1)

    def drafting(model: Any) -> Any:
        settings.speculative_draft_model_path = model and str(model)
        backend = make(Pool("page_first", Shape()))
        backend.register_mem_host_pool_v2(pool, PoolName.DRAFT)
        return backend

    one, two = (write_checkpoint(tmp_path / name, value) for name, value in (("one", 901.0), ("two", 902.0)))
    assert drafting(one)._store("draft", names, indices(pool, [0]), [None]) == [True]
    assert drafting(one)._present("draft", names, prefix=True).all()
    assert not drafting(two)._present("draft", names, prefix=True).any()
    assert not drafting(None)._present("draft", names, prefix=True).any()
    lost = drafting(tmp_path / "nowhere")
    assert not lost._present("draft", names, prefix=True).any()
    assert lost.numbers.not_found == {"weights_unknown": 1}
    assert lost.batch_set_v1(names, indices(lost.mem_pool_host, [0])) == [True], (
        "the model itself is cached all the same"
    )


def test_draft_layers_packed_behind_the_models_own_are_told_apart(make: MakeBackend) -> None:
    plain, packed = Pool("page_first", Shape(layers=3)), Pool("page_first", Shape(layers=3))
    packed.target_layer_num = 2
    make(plain).batch_set_v1(keys(1), indices(plain, [0]))
    assert make(packed).batch_exists(keys(1)) == 0
