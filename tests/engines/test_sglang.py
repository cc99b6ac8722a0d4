"""The backend under SGLang's own classes: its factory, its host pools in every layout, its file backend beside it, and
its injection of delays and failures. The contract suite its wheel does not ship."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.processes import DaemonProcess
from tests.engines import sglang_pools as sgl
from tests.engines.sglang_pools import Shape, fill, indices, page_of, raw

Make = Callable[..., Any]

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_unified")
PAGES, ELSEWHERE = [3, 1, 7, 2], [9, 4, 0, 11]
_serial = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def sglang() -> None:
    sgl.prepare()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", random.random())


def write_checkpoint(folder: Path, value: float) -> Path:
    """Weights of a test's own, so that it sees nobody else's pages."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({"model.weight": torch.full((4, 4), value)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def serving(checkpoint: Path) -> Iterator[Any]:
    """SGLang's server arguments, set for this process as its scheduler sets them."""
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path=str(checkpoint))
    override = get_context().override_server_args()
    override.install()
    get_context()._server_args = arguments
    yield arguments
    override.restore()


@pytest.fixture
def make(shared_daemon: DaemonProcess, serving: Any) -> Iterator[Make]:
    made: list[Any] = []

    def build(pool: Any, daemon: DaemonProcess = shared_daemon, **said: Any) -> Any:
        extra = {
            "prefixcache.address": f"unix://{daemon.socket}",
            "prefixcache.ask_timeout_s": 5.0,
            "prefixcache.store_timeout_s": 5.0,
            **said.pop("extra", {}),
        }
        made.append(sgl.backend(pool, extra, **said))
        return made[-1]

    yield build
    for backend in made:
        backend.close()


def contents(pool: Any, pages: list[int]) -> list[bytes]:
    return [page_of(pool, page) for page in pages]


def check_round_trip(make: Make, source: Any, target: Any, **said: Any) -> None:
    """What `source` holds is stored, and read into other pages of `target`, and nothing else there changes."""
    names = sgl.keys(5, f"round trip {next(_serial)}")
    fill(source, 1)
    fill(target, 2)
    wanted, before = contents(source, PAGES), contents(target, list(range(target.page_num)))
    assert make(source, **said).batch_set_v1(names[:4], indices(source, PAGES)) == [True] * 4
    backend = make(target, **said)
    assert backend.batch_exists(names) == 4
    assert backend.batch_get_v1(names, indices(target, [*ELSEWHERE, 5]))[:4] == [True] * 4
    assert contents(target, ELSEWHERE) == wanted, f"{source.layout} read in {target.layout}"
    others = [page for page in range(target.page_num) if page not in ELSEWHERE]
    assert contents(target, others) == [before[page] for page in others], "other pages were touched"


@pytest.mark.parametrize("written", LAYOUTS)
def test_a_page_written_in_one_layout_is_read_in_every_other(make: Make, written: str) -> None:
    for read in LAYOUTS:
        check_round_trip(make, sgl.mha_pool(written), sgl.mha_pool(read))


@pytest.mark.parametrize("written", MLA_LAYOUTS)
def test_latents_written_in_one_layout_are_read_in_every_other(make: Make, written: str) -> None:
    for read in MLA_LAYOUTS:
        check_round_trip(make, sgl.mla_pool(written), sgl.mla_pool(read), is_mla_model=True)


def test_pools_of_other_kinds(make: Make) -> None:
    """Heads of K and V that differ in size, groups of heads, packed draft layers, fp8."""
    for layout in ("page_first", "page_first_direct"):
        pools = [sgl.mha_pool(layout, Shape(v_dim=8)) for _ in range(2)]
        check_round_trip(make, *pools)
    check_round_trip(make, sgl.mha_pool("page_unified", head_groups=2), sgl.mha_pool("page_head"))
    check_round_trip(make, sgl.mha_pool("layer_first", drafts=1), sgl.mha_pool("page_first", drafts=1))
    fp8 = Shape(dtype="float8_e4m3fn")
    check_round_trip(make, sgl.mha_pool("layer_first", fp8), sgl.mha_pool("page_first_direct", fp8))


@pytest.mark.parametrize("side_state", [False, True])
def test_states_come_back_as_they_were(make: Make, side_state: bool) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    main = sgl.mha_pool("page_first")
    source, target = (sgl.mamba_pool(side_state=side_state) for _ in range(2))
    fill(source, 1)
    names = sgl.keys(3)
    for pool, places, done in ((source, [4, 2, 6], "batch_set_v2"), (target, [1, 3, 5], "batch_get_v2")):
        backend = make(main)
        backend.register_mem_host_pool_v2(pool, PoolName.MAMBA)
        transfer = PoolTransfer(PoolName.MAMBA, indices(pool, places), None, names, PoolHitPolicy.TRAILING_PAGES)
        assert getattr(backend, done)([transfer]) == {PoolName.MAMBA: [True] * 3}
    assert [raw(target.get_data_page(i)) for i in (1, 3, 5)] == [raw(source.get_data_page(i)) for i in (4, 2, 6)]


def test_same_key_in_another_layout_gave_wrong_bytes_with_hicache_file(make: Make, tmp_path: Path) -> None:
    """SGLang's file backend keys pages by hash, model and rank: written in one layout and read in another they come
    back as other numbers, without an error. This shows that it does so still, and that ours does not."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    source, target = sgl.mha_pool("layer_first"), sgl.mha_pool("page_first")
    fill(source, 1)
    name, wanted = sgl.keys(1), page_of(source, 3)
    files = [HiCacheFile(sgl.config(), str(tmp_path / "files")) for _ in range(2)]
    assert files[0].set(name[0], source.get_data_page(3 * source.page_size))
    page = files[1].get(name[0], target.get_dummy_flat_data_page())
    target.set_from_flat_data_page(5 * target.page_size, page)
    assert page_of(target, 5) != wanted, "HiCacheFile is mended: this test shows nothing any more"
    for flat in (False, True):  # the same call as theirs, and the zero-copy one
        fill(target, 2)
        if flat:
            assert make(source).set(name[0], source.get_data_page(3 * source.page_size))
            page = make(target).get(name[0], target.get_dummy_flat_data_page())
            target.set_from_flat_data_page(5 * target.page_size, page)
        else:
            assert make(source).batch_set_v1(name, indices(source, [3])) == [True]
            assert make(target).batch_get_v1(name, indices(target, [5])) == [True]
        assert page_of(target, 5) == wanted


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "page_unified"])
def test_copies_of_pages_and_pages_in_place_are_the_same(make: Make, layout: str) -> None:
    pool, target, names = sgl.mha_pool(layout), sgl.mha_pool("page_first"), sgl.keys(3)
    fill(pool, 1)
    backend = make(pool)
    assert backend.batch_set(names[:2], [pool.get_data_page(page * pool.page_size) for page in (3, 1)])
    assert [backend.exists(name) for name in names] == [True, True, False]
    assert make(target).batch_get_v1(names[:2], indices(target, [5, 6])) == [True, True]
    assert contents(target, [5, 6]) == contents(pool, [3, 1])
    got = backend.batch_get(names, [pool.get_dummy_flat_data_page() for _ in names])
    assert [each if each is None else raw(each) for each in got] == [
        *(raw(pool.get_data_page(page * pool.page_size)) for page in (3, 1)), None
    ]  # fmt: skip


def test_prefixes_over_several_pools_are_as_sglangs_own_file_backend_finds_them(make: Make, tmp_path: Path) -> None:
    """A hundred random states of three pools: the same lengths, pool by pool."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer

    rng = random.Random(7)
    pools = {
        PoolName.KV: sgl.mha_pool("page_first"),
        PoolName.SWA: sgl.mha_pool("page_first", Shape(layers=2)),
        PoolName.MAMBA: sgl.mamba_pool(),
    }
    ours, theirs = make(pools[PoolName.KV]), HiCacheFile(sgl.config(), str(tmp_path / "files"))
    theirs.register_mem_pool_host(pools[PoolName.KV])
    for name, pool in pools.items():
        ours.register_mem_host_pool_v2(pool, name)
        theirs.register_mem_host_pool_v2(pool, name)
    for case in range(100):
        names = sgl.keys(rng.randint(1, 8), f"case {case}")
        share = rng.choice((0.5, 0.8, 1.0))
        for name, pool in pools.items():
            kept = [key for key in names if rng.random() < share]
            if kept:
                transfer = PoolTransfer(name, indices(pool, range(len(kept))), None, kept)
                assert ours.batch_set_v2([transfer]) == theirs.batch_set_v2([transfer])
        window = PoolTransfer(PoolName.SWA, None, None, names[: rng.randint(1, 3)], PoolHitPolicy.TRAILING_PAGES)
        state = PoolTransfer(PoolName.MAMBA, None, None, names[:1], PoolHitPolicy.TRAILING_PAGES)
        every = PoolTransfer(PoolName.SWA, None, None, names, PoolHitPolicy.ALL_PAGES)
        for asked in ([window], [window, state], [every], [every, state], None):
            assert ours.batch_exists_v2(names, asked) == theirs.batch_exists_v2(names, asked), (case, asked)


def test_ranks_of_another_number_read_what_one_rank_wrote(make: Make) -> None:
    one, names = sgl.mha_pool("page_head", Shape(heads=4)), sgl.keys(2)
    fill(one, 1)
    make(one, tp_lcm_size=2).batch_set_v1(names, indices(one, [3, 1]))
    for rank in (0, 1):
        half = sgl.mha_pool("layer_first", Shape(heads=2))
        backend = make(half, tp_lcm_size=2, tp_rank=rank, tp_size=2)
        assert backend.batch_get_v1(names, indices(half, [5, 6])) == [True, True]
        for there, here in ((3, 5), (1, 6)):
            both = np.frombuffer(page_of(one, there), np.uint16).reshape(2, 3, 8, 4, 16)
            mine = np.ascontiguousarray(both[:, :, :, 2 * rank : 2 * rank + 2])
            assert page_of(half, here) == mine.tobytes()


def test_nothing_is_found_by_another_dtype_setting_model_or_page(make: Make, serving: Any, tmp_path: Path) -> None:
    from sglang.srt.runtime_context import get_context

    pool, names = sgl.mha_pool("page_first"), sgl.keys(1)
    make(pool).batch_set_v1(names, indices(pool, [0]))
    assert make(sgl.mha_pool("layer_first")).batch_exists(names) == 1
    for shape in (Shape(dtype="float16"), Shape(page=16, pages=12), Shape(layers=2), Shape(first_layer=1)):
        assert make(sgl.mha_pool("page_first", shape)).batch_exists(names) == 0
    other = write_checkpoint(tmp_path / "other", -1.0)
    for change in ({"kv_cache_dtype": "fp8_e5m2"}, {"model_path": str(other)}, {"load_format": "dummy"}):
        changed = type(serving)(**{"model_path": serving.model_path, **change})
        get_context()._server_args = changed
        assert make(pool).batch_exists(names) == 0, change
    get_context()._server_args = serving
    assert make(pool).batch_exists(names) == 1


def test_under_injected_delays_and_failures_every_page_told_is_right(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own injector around the backend, as its factory puts it there: pages fall short, and none is wrong."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    source, target = sgl.mha_pool("page_first"), sgl.mha_pool("layer_first")
    writer, reader = make(source), make(target)
    assert type(writer).__name__ == "HiCacheStorageFailureInjector"
    right = short = 0
    for turn in range(60):
        fill(source, turn)
        names = sgl.keys(4, f"turn {turn}")
        stored = writer.batch_set_v1(names, indices(source, PAGES))
        found = reader.batch_exists(names)
        fill(target, 1000 + turn)
        loaded = reader.batch_get_v1(names, indices(target, ELSEWHERE))
        assert found <= sum(stored)
        for page, place, told in zip(PAGES, ELSEWHERE, loaded, strict=True):
            assert not told or page_of(target, place) == page_of(source, page)
            right, short = right + told, short + (not told)
    assert right > 30
    assert short > 30


def test_weights_changed_by_sglangs_own_updater_hide_what_was_stored(make: Make) -> None:
    from types import SimpleNamespace

    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    pool, names = sgl.mha_pool("page_first"), sgl.keys(1)
    engine, rank = make(pool), make(pool)
    engine.batch_set_v1(names, indices(pool, [0]))
    flushing = SimpleNamespace(flush_cache=lambda empty_cache: True)
    request = SimpleNamespace(flush_cache=True, torch_empty_cache=False)
    told = SchedulerWeightUpdaterManager.flush_cache_after_weight_update(flushing, request, True, "done")
    assert told == (True, "done")
    assert engine.batch_exists(names) == rank.batch_exists(names) == 0
    assert engine.batch_set_v1(names, indices(pool, [0])) == [True]
    assert rank.batch_exists(names) == 1


def test_a_daemon_that_dies_freezes_and_returns(make: Make, tmp_path: Path) -> None:
    """Killed, frozen and started again under one backend: pages fall short in time, and come back by themselves."""
    import os
    import signal

    folder = tmp_path / "daemon"
    folder.mkdir()
    pool, names = sgl.mha_pool("page_first"), sgl.keys(4)
    fill(pool, 1)
    wanted = contents(pool, PAGES)
    daemon = DaemonProcess(folder, host_bytes="16MiB")
    quick = {"prefixcache.ask_timeout_s": 0.5, "prefixcache.store_timeout_s": 0.5}
    backend = make(pool, daemon=daemon, extra=quick)

    def serve() -> bool:
        """One prefix stored, found and loaded; whether all of it was. Bounded in time whatever the daemon does."""
        began = time.monotonic()
        fill(pool, 1)
        stored = backend.batch_set_v1(names, indices(pool, PAGES))
        found = backend.batch_exists(names)
        fill(pool, 2)
        loaded = backend.batch_get_v1(names, indices(pool, ELSEWHERE))
        assert time.monotonic() - began < 10
        for place, page, told in zip(ELSEWHERE, wanted, loaded, strict=True):
            assert not told or page_of(pool, place) == page
        return all(stored) and found == 4 and all(loaded)

    try:
        assert serve()
        os.kill(daemon.pid, signal.SIGSTOP)
        assert not serve()
        began = time.monotonic()
        assert not any(serve() for _ in range(3))
        assert time.monotonic() - began < 10
        os.kill(daemon.pid, signal.SIGCONT)
        wait_for(serve)
        daemon.kill()
        assert not serve()
        daemon = DaemonProcess(folder, host_bytes="16MiB")
        wait_for(serve)
        numbers = backend.numbers
        assert set(numbers.not_found) <= {"deadline", "circuit_open", "server_unavailable", "not_cached"}
        assert "internal" not in {*numbers.not_loaded, *numbers.not_stored}
    finally:
        daemon.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; each try takes its own time."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until


def test_a_daemon_that_never_was(make: Make, tmp_path: Path) -> None:
    pool, names = sgl.mha_pool("page_first"), sgl.keys(4)
    began = time.monotonic()
    backend = make(pool, extra={"prefixcache.address": f"unix://{tmp_path}/none.sock"})
    for _ in range(50):
        assert backend.batch_set_v1(names, indices(pool, PAGES)) == [False] * 4
        assert backend.batch_exists(names) == 0
        assert backend.batch_get_v1(names, indices(pool, PAGES)) == [False] * 4
    assert time.monotonic() - began < 5


class Controller:
    """SGLang's HiCacheController with its storage threads, over a host pool of its own; no device is involved."""

    def __init__(self, daemon: DaemonProcess, layout: str) -> None:
        from types import SimpleNamespace

        from sglang.srt.managers.cache_controller import HiCacheController

        shape = Shape()
        self.pool = sgl.mha_pool(layout, shape)
        device = SimpleNamespace(get_kvcache=lambda: sgl.mha_device(shape))
        extra = {
            "backend_name": "prefixcache", "module_path": "prefixcache_sglang", "class_name": "PrefixCacheStorage",
            "interface_v1": 1, "prefixcache.address": f"unix://{daemon.socket}",
        }  # fmt: skip
        self.controller = HiCacheController(
            device, self.pool, shape.page, None, threading.Event(), write_policy="write_through", io_backend="direct",
            storage_backend="dynamic", prefetch_threshold=1, model_name="served", storage_backend_extra_config=extra,
        )  # fmt: skip

    def back_up(self, tokens: list[int]) -> tuple[int, Any]:
        """(tokens stored, where they are in the pool)"""
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        places = self.pool.alloc(len(tokens))
        hashes = get_storage_hash_str(tokens, None, page_size=self.pool.page_size)
        self.controller.write_storage(places, tokens, hash_value=hashes)
        return self.controller.ack_backup_queue.get(timeout=60).completed_tokens, places

    def prefetch(self, tokens: list[int]) -> tuple[int, Any]:
        """(tokens loaded, where they are in the pool); what its scheduler does between its threads."""
        self.controller.prefetch("request", tokens)
        operation = self.controller.prefetch_hit_queue.get(timeout=60)
        hit = operation.storage_hit_count
        operation.host_indices = self.controller.alloc_prefetch_host_buffers(operation, hit)
        self.controller.prefetch_buffer.put(operation)
        loaded = 0
        while not (told := self.controller.ack_prefetch_queue.get(timeout=60)).completed_req:
            loaded = told.completed_tokens
        return loaded, operation.host_indices

    def pages(self, places: Any, tokens: int) -> list[bytes]:
        size = self.pool.page_size
        return [page_of(self.pool, int(places[at]) // size) for at in range(0, tokens, size)]


@pytest.fixture
def controllers(serving: Any) -> Iterator[Callable[..., Controller]]:
    from sglang.srt.runtime_context import get_parallel

    made: list[Controller] = []

    def make(daemon: DaemonProcess, layout: str) -> Controller:
        made.append(Controller(daemon, layout))
        return made[-1]

    ranks = dict.fromkeys(("tp_rank", "pp_rank", "attn_tp_rank", "attn_dp_rank", "attn_dcp_rank"), 0)
    with get_parallel().override(**ranks):
        yield make
        for each in made:
            each.controller.detach_storage_backend()


def test_sglangs_own_controller_stores_and_prefetches(
    controllers: Callable[..., Controller], shared_daemon: DaemonProcess
) -> None:
    """Threads, batches, hashes and queues are SGLang's; another server, with another layout, gets the prefix."""
    first, second = controllers(shared_daemon, "page_first"), controllers(shared_daemon, "layer_first")
    fill(first.pool, 1)
    tokens = list(range(100, 196))
    stored, there = first.back_up(tokens)
    assert stored == 96
    loaded, here = second.prefetch([*tokens, *range(8)])
    assert loaded == 96
    assert second.pages(here, 96) == first.pages(there, 96)
    assert second.prefetch([*range(8), *tokens])[0] == 0
    loaded, _ = second.prefetch([*tokens[:48], *range(48)])
    assert loaded == 48, "up to where the prompts part"


def test_sglangs_own_controller_under_its_injected_delays_and_failures(
    controllers: Callable[..., Controller], shared_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    first, second = controllers(shared_daemon, "page_head"), controllers(shared_daemon, "page_first_direct")
    whole = short = 0
    for turn in range(40):
        fill(first.pool, turn)
        tokens = [turn, *range(1000, 1047)]
        stored, there = first.back_up(tokens)
        loaded, here = second.prefetch(tokens)
        assert loaded <= stored == (48 if stored else 0)
        assert second.pages(here, loaded) == first.pages(there, loaded)
        whole, short = whole + (loaded == 48), short + (loaded == 0)
        first.pool.free(there)
        second.pool.free(here)
    assert whole > 3
    assert short > 3


def test_sglangs_own_controller_goes_on_without_its_daemon(
    controllers: Callable[..., Controller], tmp_path: Path
) -> None:
    folder = tmp_path / "daemon"
    folder.mkdir()
    daemon = DaemonProcess(folder, host_bytes="16MiB")
    try:
        server, tokens = controllers(daemon, "page_first"), list(range(48))

        def stores() -> bool:
            stored, places = server.back_up(tokens)
            server.pool.free(places)
            return stored == 48

        assert stores()
        daemon.kill()
        began = time.monotonic()
        assert server.prefetch(tokens)[0] == 0
        assert not stores()
        assert time.monotonic() - began < 10
        daemon = DaemonProcess(folder, host_bytes="16MiB")
        wait_for(stores)
        assert server.prefetch(tokens)[0] == 48
    finally:
        daemon.kill()


def test_the_command_of_the_documents_is_what_sglang_takes(shared_daemon: DaemonProcess, serving: Any) -> None:
    """Its flags through SGLang's own parser, its extra config through SGLang's own reader, factory and attach."""
    import argparse
    import shlex

    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.storage import StorageBackendFactory
    from sglang.srt.server_args import ServerArgs

    text = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
    command = next(line for line in text.splitlines() if line.startswith("python -m sglang.launch_server"))
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    said = parser.parse_args(shlex.split(command)[3:])
    assert (said.hicache_storage_backend, said.enable_hierarchical_cache, said.page_size) == ("dynamic", True, 64)
    extra, *_ = HybridCacheController.parse_storage_backend_extra_config(said.hicache_storage_backend_extra_config)
    assert extra["prefixcache.address"] == "unix:///run/prefixcache/daemon.sock"
    extra["prefixcache.address"] = f"unix://{shared_daemon.socket}"
    pool = sgl.mha_pool("page_first")
    backend = StorageBackendFactory.create_backend("dynamic", sgl.config(extra_config=extra), pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    assert backend.batch_set_v1(sgl.keys(2), indices(pool, [0, 1])) == [True, True]
    assert backend.batch_exists(sgl.keys(2)) == 2
    assert backend.get_stats() is None
    backend.close()
