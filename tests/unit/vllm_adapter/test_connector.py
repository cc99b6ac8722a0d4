"""The connector as vLLM calls it, both sides, against a real daemon: the order of calls of a new version and of an old
one, with KV caches in the form GPUs have."""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import save_file

from prefixcache.v1 import admin_pb2, admin_pb2_grpc
from prefixcache_client import acquire
from tests.e2e.processes import DaemonProcess, wait_until
from tests.unit.vllm_adapter import stub_vllm
from tests.unit.vllm_adapter.fakes import FakeRequest, step
from tests.unit.vllm_adapter.test_identity import CONFIG, config_of, kv_config

PAGES, PAGE_TOKENS, HEADS, DIM = 40, 32, 2, 16


@pytest.fixture(params=[True, False], ids=["new", "old"])
def new(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Which vLLM."""
    stub_vllm.install(monkeypatch, new=request.param)
    return bool(request.param)


class Engine:
    """What vLLM does around its connectors, a step at a time."""

    def __init__(self, folder: Path, daemon: DaemonProcess, *, new: bool, **settings: Any) -> None:
        """settings: of the connector."""
        from prefixcache_vllm import PrefixCacheConnector

        save_file({"model.weight": torch.ones(4, 4)}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(CONFIG))
        config = config_of(folder)
        config.device_config = SimpleNamespace(device_type="cuda")
        config.kv_events_config = SimpleNamespace(enable_kv_cache_events=True)
        config.kv_transfer_config = SimpleNamespace(
            kv_connector_extra_config={
                "prefixcache.address": f"unix://{daemon.socket}", "prefixcache.recompute_s_per_token": 0.002,
                **{f"prefixcache.{name}": value for name, value in settings.items()},
            },
            is_kv_consumer=True,
            is_kv_producer=True, kv_load_failure_policy="fail",
        )  # fmt: skip
        roles = sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.base"].KVConnectorRole
        self.new = new
        self.worker = PrefixCacheConnector(config, roles.WORKER, kv_config())
        self.scheduler = PrefixCacheConnector(config, roles.SCHEDULER, kv_config())
        self.policy = config.kv_transfer_config.kv_load_failure_policy
        shape = (2, PAGES, PAGE_TOKENS, HEADS, DIM)
        self.caches = {f"model.layers.{i}.self_attn.attn": torch.zeros(shape, dtype=torch.bfloat16) for i in range(2)}
        self.worker.register_kv_caches(self.caches)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def matched(self, request: FakeRequest) -> tuple[int, bool]:
        """The answer, once there is one."""
        found: list[tuple[int, bool]] = []

        def asked() -> bool:
            tokens, later = self.scheduler.get_num_new_matched_tokens(request, 0)
            if tokens is not None:
                found.append((tokens, later))
            return tokens is not None

        assert wait_until(asked)
        return found[0]

    def place(self, request: FakeRequest, pages: list[int], external: int) -> None:
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (pages,)), external)

    def step(self, scheduled: dict[str, int], tables: dict[str, tuple[list[int], ...]], **more: Any) -> Any:
        """One step; what the workers reported."""
        meta = self.scheduler.build_connector_meta(step(scheduled, tables, **more))
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv(None)
        if self.new or scheduled:
            self.worker.wait_for_save()
        output = SimpleNamespace()
        if self.new:
            results = self.worker.get_transfer_results(set())
            output.__dict__.update(results.__dict__)
        else:
            output.finished_sending, output.finished_recving = self.worker.get_finished(set())
        output.invalid_block_ids = self.worker.get_block_ids_with_load_errors()
        output.kv_cache_events = self.worker.get_kv_connector_kv_cache_events()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(output)
        return output

    def step_until(self, field: str, name: str) -> Any:
        """Empty steps until a request is reported."""
        outputs: list[Any] = []

        def stepped() -> bool:
            outputs.append(self.step({}, {}))
            return name in getattr(outputs[-1], field)

        assert wait_until(stepped)
        return outputs[-1]


@pytest.fixture
def engine(tmp_path: Path, daemon: DaemonProcess, new: bool) -> Iterator[Engine]:
    made = Engine(tmp_path, daemon, new=new)
    yield made
    made.close()


def compute(engine: Engine, name: str, pages: list[int]) -> FakeRequest:
    """A request that is computed, stored and over."""
    request = FakeRequest(name, list(range(1, 201)))
    assert engine.matched(request) == (0, False)
    engine.place(request, pages, 0)
    for tensor in engine.caches.values():
        tensor[:, pages] = torch.rand(2, len(pages), PAGE_TOKENS, HEADS, DIM).to(torch.bfloat16)
    engine.step({name: 200}, {name: (pages,)})
    request.num_computed_tokens, request.output = 200, [9]
    assert engine.scheduler.request_finished_all_groups(request, (pages,)) == (True, None)
    engine.step_until("finished_sending", name)
    return request


def test_stored_and_loaded(engine: Engine) -> None:
    assert engine.policy == "recompute"
    first = list(range(1, 8))
    compute(engine, "a", first)
    again = FakeRequest("b", list(range(1, 201)))
    assert engine.matched(again) == (192, True)
    second = list(range(30, 37))
    engine.place(again, second, 192)
    assert engine.step_until("finished_recving", "b").invalid_block_ids == set()
    for tensor in engine.caches.values():
        assert torch.equal(tensor[:, second[:6]], tensor[:, first[:6]])
        assert not tensor[:, second[6]].any(), "tokens behind the last block are the engine's own"
    numbers = engine.scheduler.get_kv_connector_stats()
    assert numbers is not None
    assert numbers.data["loaded_tokens"] == 192
    assert engine.worker.get_kv_connector_stats().data["saved_blocks"] == 3  # type: ignore[union-attr] # it moved some
    events = list(engine.scheduler.take_events())
    assert [len(event.block_hashes) for event in events] == ([3] if engine.new else [])


def test_what_the_daemon_drops_is_told(engine: Engine, daemon: DaemonProcess) -> None:
    if not engine.new:
        return  # without confirmations nothing of ours is announced
    compute(engine, "a", list(range(1, 8)))
    told: list[Any] = []

    def followed() -> bool:
        told.extend(engine.scheduler.take_events())
        return bool(engine.scheduler._removals._watch.connected)

    assert wait_until(followed)
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        admin_pb2_grpc.AdminServiceStub(channel).Evict(admin_pb2.EvictRequest(), timeout=20)

    def dropped() -> set[bytes]:
        told.extend(engine.scheduler.take_events())
        return {key for event in told if hasattr(event, "medium") for key in event.block_hashes}

    stored = {key for event in told if hasattr(event, "token_ids") for key in event.block_hashes}
    assert len(stored) == 3
    assert wait_until(lambda: dropped() == stored)


def test_int8_is_loaded_nearly_as_it_was_stored(tmp_path: Path, daemon: DaemonProcess, new: bool) -> None:
    engine = Engine(tmp_path, daemon, new=new, codec="int8")
    first, second = list(range(1, 8)), list(range(30, 37))
    compute(engine, "a", first)
    again = FakeRequest("b", list(range(1, 201)))
    assert engine.matched(again) == (192, True)
    engine.place(again, second, 192)
    assert engine.step_until("finished_recving", "b").invalid_block_ids == set()
    for tensor in engine.caches.values():
        assert torch.allclose(tensor[:, second[:6]], tensor[:, first[:6]], atol=1 / 128)
        assert not torch.equal(tensor[:, second[:6]], tensor[:, first[:6]])
        assert not tensor[:, second[6]].any(), "tokens behind the last block are the engine's own"
    engine.close()


def test_the_daemon_is_told_what_a_token_costs_to_compute(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    ask = acquire.acquire

    def listen(link: Any, ns: Any, prompt: Any, wish: acquire.Wish) -> Any:
        told.append(wish[3])
        return ask(link, ns, prompt, wish)

    monkeypatch.setattr(acquire, "acquire", listen)
    engine.matched(FakeRequest("a", list(range(1, 201))))
    assert told == [0.002]


def test_what_a_token_costs_is_learnt_where_nobody_says_it(
    tmp_path: Path, daemon: DaemonProcess, new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    ask = acquire.acquire

    def listen(link: Any, ns: Any, prompt: Any, wish: acquire.Wish) -> Any:
        told.append(wish[3])
        return ask(link, ns, prompt, wish)

    monkeypatch.setattr(acquire, "acquire", listen)
    engine = Engine(tmp_path, daemon, new=new, recompute_s_per_token=0.0)
    assert engine.matched(FakeRequest("a", list(range(1, 201)))) == (0, False)
    seconds = itertools.count()
    engine.scheduler._cost.__init__(lambda: float(next(seconds)))
    for number in range(4):
        engine.scheduler.build_connector_meta(step({f"b{number}": 500}, {}))
        engine.scheduler.take_events()
    assert engine.matched(FakeRequest("c", list(range(1, 201)))) == (0, False)
    engine.close()
    assert told[0] == 0.0, "not known yet"
    assert told[1] == 1.0 / 500


def test_a_load_without_its_daemon_is_reported(engine: Engine, daemon: DaemonProcess) -> None:
    compute(engine, "a", list(range(1, 8)))
    again = FakeRequest("b", list(range(1, 201)))
    external, _ = engine.matched(again)
    pages = list(range(30, 37))
    engine.place(again, pages, external)
    daemon.kill()
    worker_session = engine.worker._worker._client._link  # type: ignore[union-attr] # the worker's side
    assert wait_until(lambda: worker_session.session is None or not worker_session.session.alive)
    output = engine.step_until("finished_recving", "b")
    if engine.new:
        assert (output.failed_recving, output.invalid_block_ids) == ({"b"}, set())
    else:
        assert output.invalid_block_ids == set(pages[:6])
    assert engine.matched(again) == (0, False), "it is computed"


def test_a_preempted_request_is_let_go_before_the_step(engine: Engine) -> None:
    request = FakeRequest("a", list(range(1, 201)))
    assert engine.matched(request) == (0, False)
    pages = list(range(1, 8))
    engine.place(request, pages, 0)
    transfers = engine.worker._worker._transfers  # type: ignore[union-attr] # the worker's side
    let_go: list[str] = []
    transfers.let_go = let_go.append  # type: ignore[method-assign] # seen, not done
    engine.step({"a": 200}, {"a": (pages,)})
    request.status = SimpleNamespace(name="PREEMPTED")
    engine.step({}, {})
    assert set(let_go) == {"a"}


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("prefill_context_parallel_size", "prefill_context_parallel"),
        ("decode_context_parallel_size", "decode_context_parallel"),
    ],
)
def test_an_engine_that_cannot_share_computes_and_says_why(
    tmp_path: Path, new: bool, caplog: pytest.LogCaptureFixture, setting: str, reason: str
) -> None:
    from prefixcache_vllm import PrefixCacheConnector

    save_file({"model.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    config = config_of(tmp_path)
    setattr(config.parallel_config, setting, 2)
    config.device_config = SimpleNamespace(device_type="cuda")
    config.kv_transfer_config = SimpleNamespace(
        kv_connector_extra_config={}, is_kv_consumer=True, is_kv_producer=True, kv_load_failure_policy="fail"
    )
    roles = sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.base"].KVConnectorRole
    worker = PrefixCacheConnector(config, roles.WORKER, kv_config())
    scheduler = PrefixCacheConnector(config, roles.SCHEDULER, kv_config())
    worker.register_kv_caches({})
    for name in "ab":
        request = FakeRequest(name, list(range(1, 201)))
        scheduler.on_new_request(request)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1],)), 0)
    meta = scheduler.build_connector_meta(step({"a": 200}, {"a": ([1],)}))
    worker.bind_connector_metadata(meta)
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert worker.get_finished(set()) == (None, None)
    assert scheduler.request_finished_all_groups(FakeRequest("a", [1]), ([1],)) == (False, None)
    numbers = scheduler.get_kv_connector_stats()
    assert numbers is not None
    assert numbers.data == {f"left_alone.{reason}": 2}
    assert scheduler.get_kv_connector_stats() is None
    assert reason in caplog.text
    worker.shutdown()
    scheduler.shutdown()
