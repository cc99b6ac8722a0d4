"""Nothing raises and nothing is left uncounted: holes, wrong indices, full daemons, none at all, pools that change."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefixcache.server.app import Daemon
from tests.contract.conftest import start_daemon, stop_daemon
from tests.e2e.test_disk import flush
from tests.unit.sglang_adapter.conftest import MakeBackend, write_checkpoint
from tests.unit.sglang_adapter.stub_sglang import ExtraInfo, Pool, RunsPool, Shape, fill, indices, keys, raw


def test_a_hole_ends_what_exists_and_costs_only_itself(make: MakeBackend) -> None:
    pool, names = Pool("page_first", Shape()), keys(5)
    fill(pool, 1)
    wanted = raw(pool.page(3))
    backend = make(pool)
    assert backend.batch_set_v1([names[i] for i in (0, 1, 3)], indices(pool, [0, 1, 3])) == [True] * 3
    assert backend.batch_exists(names) == 2
    fill(pool, 2)
    assert backend.batch_get_v1(names, indices(pool, range(5))) == [True, True, False, True, False]
    assert raw(pool.page(3)) == wanted
    assert backend.numbers.not_found == {"not_cached": 2}
    assert backend.numbers.not_loaded == {"not_cached": 2}


def test_what_is_stored_already_is_success(make: MakeBackend) -> None:
    pool = Pool("page_first", Shape())
    backend = make(pool)
    assert backend.batch_set_v1(keys(2), indices(pool, [0, 1])) == [True, True]
    assert backend.batch_set_v1(keys(3), indices(pool, [0, 1, 2])) == [True] * 3
    assert (backend.numbers.stored, backend.numbers.not_stored) == (3, {"already_stored": 2})


@pytest.mark.parametrize("bad", [None, torch.arange(3), torch.arange(8) + 1, torch.arange(12), torch.arange(4)])
def test_indices_that_are_no_pages_are_refused(make: MakeBackend, bad: Any) -> None:
    pool = Pool("page_first", Shape())
    fill(pool, 1)
    before = raw(pool.kv_buffer)
    backend = make(pool)
    assert backend.batch_set_v1(keys(2), bad) == [False, False]
    assert backend.batch_get_v1(keys(2), bad) == [False, False]
    assert backend.numbers.not_stored == backend.numbers.not_loaded == {"bad_indices": 2}
    assert raw(pool.kv_buffer) == before


def test_pages_outside_of_the_pool_are_refused(make: MakeBackend) -> None:
    pool = Pool("page_first", Shape())
    backend = make(pool)
    backend.batch_set_v1(keys(1), indices(pool, [0]))
    assert backend.batch_get_v1(keys(1), indices(pool, [99])) == [False]
    assert backend.batch_set_v1(keys(2), indices(pool, [0, 99])) == [False, False]
    assert backend.numbers.not_loaded == {"internal": 1}
    assert backend.numbers.not_stored == {"internal": 2}


def test_a_pool_that_raises_costs_pages(make: MakeBackend) -> None:
    pool = RunsPool()
    backend = make(pool)
    backend.batch_set_v1(keys(1), indices(pool, [0]))
    pool.get_page_buffer_meta = lambda _: ([1, 2], [7, 9])  # type: ignore[method-assign] # it changed
    assert backend.batch_get_v1(keys(1), indices(pool, [0])) == [False]
    assert backend.batch_set_v1(keys(2), indices(pool, [0, 1])) == [False, False]
    assert backend.numbers.not_loaded == {"internal": 1}


@pytest.mark.parametrize("change", [{"layout": "page_sideways"}, {"size_per_token": 99}, {"dtype": torch.complex64}])
def test_a_pool_that_is_not_as_it_says_is_not_cached(make: MakeBackend, change: dict[str, Any]) -> None:
    pool = Pool("page_first", Shape())
    vars(pool).update(change)
    pool.get_data_page = pool.get_dummy_flat_data_page = None  # type: ignore[method-assign,assignment] # none either
    backend = make(pool)
    assert backend.batch_set_v1(keys(2), indices(pool, [0, 1])) == [False, False]
    assert backend.batch_exists(keys(2)) == 0
    assert backend.batch_get(keys(2), [torch.zeros(1)] * 2) == [None, None]
    assert not backend.batch_set(keys(2), [torch.zeros(1)] * 2)
    assert backend.numbers.not_stored == {"pool_unknown": 4}


def test_a_pool_that_says_nothing_of_itself_is_not_cached(make: MakeBackend) -> None:
    """Registering it must not end the engine's start."""
    backend = make(SimpleNamespace(layout="page_first"))
    backend.register_mem_host_pool_v2(object(), "beside")
    assert backend.batch_exists(keys(1)) == 0
    assert backend.batch_set_v1(keys(1), None) == [False]
    assert backend.numbers.not_stored == {"pool_unknown": 1}


def test_rows_in_an_order_of_the_devices_own_are_not_taken_for_known(make: MakeBackend) -> None:
    pool, plain = Pool("page_first", Shape()), Pool("page_first", Shape())
    vars(pool)["_buffer_infos"] = (SimpleNamespace(buffers=SimpleNamespace(layout="hnd")),)
    backend = make(pool)
    assert backend._shelves["kv"].form.detail["form"] == "flat"
    make(plain).batch_set_v1(keys(1), indices(plain, [0]))
    assert backend.batch_exists(keys(1)) == 0


def test_no_daemon_costs_pages_and_little_time(settings: Any, tmp_path: Path) -> None:
    from prefixcache_sglang.storage import PrefixCacheStorage
    from tests.unit.sglang_adapter.stub_sglang import Config

    pool = Pool("page_first", Shape())
    began = time.monotonic()
    backend = PrefixCacheStorage(Config(extra_config={"prefixcache.address": f"unix://{tmp_path}/none.sock"}))
    backend.register_mem_pool_host(pool)
    for _ in range(20):
        assert backend.batch_exists(keys(3)) == 0
        assert backend.batch_get_v1(keys(3), indices(pool, [0, 1, 2])) == [False] * 3
        assert backend.batch_set_v1(keys(3), indices(pool, [0, 1, 2])) == [False] * 3
    assert time.monotonic() - began < 5
    for counted in (backend.numbers.not_found, backend.numbers.not_loaded, backend.numbers.not_stored):
        assert set(counted) <= {"server_unavailable", "circuit_open"}
        assert sum(counted.values()) == 60
    backend.close()
    assert backend.batch_exists(keys(1)) == 0


def test_a_daemon_that_is_full_takes_what_it_can(settings: Any, tmp_path: Path) -> None:
    """Everything that is in it is held by a lease, so there is no room for more."""
    from prefixcache_sglang.storage import PrefixCacheStorage
    from tests.unit.sglang_adapter.stub_sglang import Config

    small = start_daemon(tmp_path, host_bytes="4MiB")
    pool = Pool("page_first", Shape(layers=16, heads=8, dim=32, v_dim=32, page=32, pages=6))  # 512 KiB a page
    fill(pool, 1)
    backend = PrefixCacheStorage(Config(extra_config={"prefixcache.address": f"unix://{small.config.socket}"}))
    backend.register_mem_pool_host(pool)
    try:
        assert backend.batch_set_v1(keys(6, "a"), indices(pool, range(6))) == [True] * 6
        shelf = backend._shelves["kv"]
        with shelf._cache.acquire(shelf._names(keys(6, "a"))) as lease:
            assert lease.present.all()
            told = backend.batch_set_v1(keys(6, "b"), indices(pool, range(6)))
            assert not all(told)
            assert told == [bool(each) for each in shelf.present(keys(6, "b"), prefix=False)]
        assert backend.numbers.not_stored["pool_full"] >= 1
        assert backend.batch_set_v1(keys(6, "b"), indices(pool, range(6))) == [True] * 6, "room came back"
    finally:
        backend.close()
        stop_daemon(small)


def test_pages_that_left_memory_come_back_from_disk(settings: Any, tmp_path: Path) -> None:
    from prefixcache_sglang.storage import PrefixCacheStorage
    from tests.unit.sglang_adapter.stub_sglang import Config

    small = start_daemon(tmp_path, host_bytes="4MiB", disk=str(tmp_path / "disk"), disk_bytes="64MiB")
    pool = Pool("page_first", Shape(layers=16, heads=8, dim=32, v_dim=32, page=32, pages=6))  # 512 KiB a page
    said = {"prefixcache.address": f"unix://{small.config.socket}", "prefixcache.load_timeout_s": 20.0}
    backend = PrefixCacheStorage(Config(extra_config=said))
    backend.register_mem_pool_host(pool)
    try:
        wanted = []
        for batch in range(5):
            fill(pool, batch)
            wanted.append([raw(pool.page(page)) for page in range(6)])
            assert backend.batch_set_v1(keys(6, f"{batch}"), indices(pool, range(6))) == [True] * 6
            flush(SimpleNamespace(socket=small.config.socket))  # else what is stored this fast is dropped unwritten
        for batch in range(5):
            fill(pool, 99)
            assert backend.batch_get_v1(keys(6, f"{batch}"), indices(pool, range(6))) == [True] * 6, batch
            assert [raw(pool.page(page)) for page in range(6)] == wanted[batch]
        fast = PrefixCacheStorage(Config(extra_config=said | {"prefixcache.recompute_s_per_token": 1e-9}))
        fast.register_mem_pool_host(pool)
        assert fast.batch_get_v1(keys(6, "0"), indices(pool, range(6))) == [False] * 6, "it computes them sooner"
        assert fast.numbers.not_loaded == {"slower_than_recompute": 6}
        fast.close()
    finally:
        backend.close()
        stop_daemon(small)


def test_a_page_is_stored_although_the_one_in_front_of_it_is_not(make: MakeBackend, daemon: Daemon) -> None:
    """It is in the engine's own memory, as SGLang asks only for what lies behind that."""
    pool = Pool("page_first", Shape())
    backend = make(pool)
    assert backend.batch_set_v1(keys(2), indices(pool, [0, 1]), ExtraInfo(["ff" * 32])) == [True, True]
    assert backend.batch_exists(keys(2)) == 2
    more = keys(4)[2:]
    assert backend.batch_set_v1(more, indices(pool, [2, 3]), ExtraInfo(keys(2))) == [True, True]
    assert "orphaned" not in backend.numbers.not_stored


@pytest.mark.parametrize(
    "change",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"json_model_override_args": "{}"},
        {"quantization": "fp8"},
        {"model_path": "other"},
    ],
)
def test_servers_that_differ_in_what_kv_depends_on_share_nothing(
    make: MakeBackend, settings: Any, tmp_path: Path, change: dict[str, Any]
) -> None:
    pool = Pool("page_first", Shape())
    make(pool).batch_set_v1(keys(1), indices(pool, [0]))
    assert make(pool).batch_exists(keys(1)) == 1
    if "model_path" in change:
        change = {"model_path": str(write_checkpoint(tmp_path / "other", -1.0))}
    vars(settings).update(change)
    assert make(pool).batch_exists(keys(1)) == 0


@pytest.mark.parametrize("shape", [Shape(page=8), Shape(dtype=torch.float16), Shape(dim=16, v_dim=16), Shape(layers=2)])
def test_pools_of_another_shape_share_nothing(make: MakeBackend, shape: Shape) -> None:
    pool, other = Pool("page_first", Shape()), Pool("page_first", shape)
    make(pool).batch_set_v1(keys(1), indices(pool, [0]))
    assert make(other).batch_exists(keys(1)) == 0


def test_a_model_that_is_not_known_is_not_cached(make: MakeBackend, settings: Any, tmp_path: Path) -> None:
    pool = Pool("page_first", Shape())
    for change, reason in (
        ({"model_path": str(tmp_path / "nowhere")}, "weights_unknown"),
        ({"model_path": ""}, "weights_unknown"),
        ({"load_format": "dummy"}, "weights_unknown"),
    ):
        kept = dict(vars(settings))
        vars(settings).update(change)
        backend = make(pool)
        assert backend.reason_off == reason
        assert backend.batch_set_v1(keys(1), indices(pool, [0])) == [False]
        assert backend.batch_exists_v2(keys(1), []).kv_hit_pages == 0
        assert backend.numbers.not_stored == {reason: 1}
        vars(settings).update(kept)


def test_a_tenants_secret_separates(make: MakeBackend, tmp_path: Path) -> None:
    pool, secret = Pool("page_first", Shape()), tmp_path / "key"
    secret.write_text("ab" * 32)
    mine = {"prefixcache.tenant_key_file": str(secret)}
    make(pool, mine).batch_set_v1(keys(1), indices(pool, [0]))
    assert make(pool, mine).batch_exists(keys(1)) == 1
    assert make(pool).batch_exists(keys(1)) == make(pool, {"prefixcache.tenant": "x"}).batch_exists(keys(1)) == 0
