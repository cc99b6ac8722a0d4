"""The connector of an engine with a draft model, both sides, against a real daemon, in the order of calls of a vLLM
that has a step saved when its draft model has run; and one that has not."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefixcache_client import CopyResult
from tests.e2e.processes import DaemonProcess, wait_until
from tests.unit.vllm_adapter import stub_vllm
from tests.unit.vllm_adapter.fakes import FakeRequest, step
from tests.unit.vllm_adapter.test_draft_identity import SMALL, checkpoint, kv_with_draft, speculating
from tests.unit.vllm_adapter.test_identity import CONFIG

PAGES, PAGE_TOKENS, DIM = 60, 32, 16
TOKENS, LOADED = 200, 192
Pages = list[int]


class Engine:
    """What vLLM does around its connectors, a step at a time: the model, the connector, the draft model, the rest of
    the connector."""

    def __init__(self, folder: Path, address: str) -> None:
        from prefixcache_vllm import PrefixCacheConnector

        config = speculating((folder / "model", folder / "draft"))
        config.device_config = SimpleNamespace(device_type="cuda")
        extra = {"prefixcache.address": address, "prefixcache.ask_timeout_s": 30.0}  # draft: 2% of it
        config.kv_transfer_config = SimpleNamespace(
            kv_connector_extra_config=extra, is_kv_consumer=True, is_kv_producer=True, kv_load_failure_policy="fail"
        )
        roles = sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.base"].KVConnectorRole
        self.worker = PrefixCacheConnector(config, roles.WORKER, kv_with_draft())
        self.scheduler = PrefixCacheConnector(config, roles.SCHEDULER, kv_with_draft())
        self.model, self.draft = self.caches("model.", 2), self.caches("draft_model.model.", 1)
        self.worker.register_kv_caches(self.model | self.draft)

    @staticmethod
    def caches(prefix: str, heads: int) -> dict[str, torch.Tensor]:
        shape = (2, PAGES, PAGE_TOKENS, heads, DIM)
        return {f"{prefix}layers.{i}.self_attn.attn": torch.zeros(shape, dtype=torch.bfloat16) for i in range(2)}

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def admit(self, request: FakeRequest, pages: Pages) -> int:
        """Tokens that are loaded into these pages."""
        found: list[int] = []

        def asked() -> bool:
            tokens, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
            found.extend([] if tokens is None else [tokens])
            return bool(found)

        assert wait_until(asked)
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (pages,)), found[0])
        return found[0]

    def step(self, scheduled: dict[str, int], pages: Pages, propose: Callable[[], object] = lambda: None) -> Any:
        """One step; `propose`: what the draft model does in it."""
        meta = self.scheduler.build_connector_meta(step(scheduled, dict.fromkeys(scheduled, (pages,))))
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv(None)
        results = self.worker.get_transfer_results(set())
        output = SimpleNamespace(**results.__dict__, invalid_block_ids=set())
        output.kv_cache_events = self.worker.get_kv_connector_kv_cache_events()
        propose()
        self.worker.wait_for_save()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(output)
        return output

    def step_until(self, field: str, name: str) -> Any:
        outputs: list[Any] = []

        def stepped() -> bool:
            outputs.append(self.step({}, []))
            return name in getattr(outputs[-1], field)

        assert wait_until(stepped)
        return outputs[-1]

    def compute(self, name: str, pages: Pages) -> FakeRequest:
        """A request that is computed by both models, stored and over."""
        request = FakeRequest(name, list(range(1, TOKENS + 1)))
        assert self.admit(request, pages) == 0
        self.fill(self.model, pages)
        self.step({name: TOKENS}, pages, lambda: self.fill(self.draft, pages))
        self.finish(request, pages)
        return request

    def finish(self, request: FakeRequest, pages: Pages) -> None:
        request.num_computed_tokens, request.output = TOKENS, [9]
        assert self.scheduler.request_finished_all_groups(request, (pages,)) == (True, None)
        self.step_until("finished_sending", request.request_id)

    @staticmethod
    def fill(caches: dict[str, torch.Tensor], pages: Pages) -> None:
        for tensor in caches.values():
            tensor[:, pages] = torch.rand(2, len(pages), *tensor.shape[2:]).to(torch.bfloat16)

    def numbers(self) -> dict[str, Any]:
        """What both sides have counted since the last call."""
        found = [side.get_kv_connector_stats() for side in (self.scheduler, self.worker)]
        return {name: value for stats in found if stats is not None for name, value in stats.data.items()}


def same(caches: dict[str, torch.Tensor], pages: Pages, others: Pages) -> bool:
    full = LOADED // PAGE_TOKENS
    return all(torch.equal(tensor[:, pages[:full]], tensor[:, others[:full]]) for tensor in caches.values())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint(tmp_path / "model", CONFIG, 1.0)
    checkpoint(tmp_path / "draft", SMALL, 2.0)
    return tmp_path


@pytest.fixture
def engine(folder: Path, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    stub_vllm.install(monkeypatch, new=True)
    made = Engine(folder, f"unix://{daemon.socket}")
    yield made
    made.close()


FIRST, SECOND, THIRD = list(range(1, 8)), list(range(20, 27)), list(range(40, 47))


def test_both_models_kv_is_stored_and_loaded(engine: Engine) -> None:
    engine.compute("a", FIRST)
    again = FakeRequest("b", list(range(1, TOKENS + 1)))
    assert engine.admit(again, SECOND) == LOADED
    engine.step_until("finished_recving", "b")
    assert same(engine.model, SECOND, FIRST)
    assert same(engine.draft, SECOND, FIRST)
    for tensor in (engine.model | engine.draft).values():
        assert not tensor[:, SECOND[-1]].any(), "tokens behind the last block are the engine's own"
    numbers = engine.numbers()
    assert numbers["loaded_tokens"] == numbers["draft_loaded_tokens"] == LOADED
    assert numbers["saved_blocks"] == numbers["draft_saved_blocks"] == 3
    assert 0 < numbers["draft_save_bytes"] < numbers["save_bytes"]


def test_the_draft_models_failure_is_not_the_requests(engine: Engine) -> None:
    engine.compute("a", FIRST)
    client = engine.worker._worker._client  # type: ignore[union-attr] # the worker's side
    copy, draft = client.copy_by_ticket, engine.scheduler._sides._draft._identity.fingerprint()  # type: ignore[union-attr]

    def failing(namespace: Any, ticket: Any, span: Any) -> CopyResult:
        if namespace.epoch.fingerprint == draft:
            return CopyResult(ok=False, tokens=0, size_bytes=0, reason="lease_lost")
        return copy(namespace, ticket, span)

    client.copy_by_ticket = failing  # type: ignore[method-assign] # one of two
    again = FakeRequest("b", list(range(1, TOKENS + 1)))
    assert engine.admit(again, SECOND) == LOADED
    output = engine.step_until("finished_recving", "b")
    assert not output.failed_recving
    assert same(engine.model, SECOND, FIRST)
    assert not same(engine.draft, SECOND, FIRST)
    again.num_computed_tokens, again.output = LOADED, list(range(500, 600))
    engine.step({"b": 80}, [*SECOND, 50, 51], lambda: engine.fill(engine.draft, SECOND))
    again.num_computed_tokens = 272
    assert engine.scheduler.request_finished_all_groups(again, ([*SECOND, 50, 51],))[0]
    engine.step_until("finished_sending", "b")
    numbers = engine.numbers()
    assert numbers["hits"] == 1
    assert numbers["draft_not_loaded.load_failed"] == numbers["draft_load_failed.lease_lost"] == 1
    assert (numbers["saved_blocks"], numbers["draft_saved_blocks"]) == (4, 3)


def test_the_models_failure_is_the_requests(engine: Engine, daemon: DaemonProcess) -> None:
    engine.compute("a", FIRST)
    again = FakeRequest("b", list(range(1, TOKENS + 1)))
    assert engine.admit(again, SECOND) == LOADED
    daemon.kill()
    link = engine.worker._worker._client._link  # type: ignore[union-attr] # the worker's side
    assert wait_until(lambda: link.session is None or not link.session.alive)
    assert engine.step_until("finished_recving", "b").failed_recving == {"b"}
    assert engine.scheduler.get_num_new_matched_tokens(again, 0) == (0, False), "it is computed"


def test_a_vllm_that_saves_before_its_draft_model_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stub_vllm.install(monkeypatch, new=False)
    made = Engine(folder, f"unix://{folder}/nobody")
    try:
        assert made.scheduler._scheduler is made.scheduler._sides
        assert made.scheduler._scheduler._engine.draft_off == "engine_saves_before_drafts"  # type: ignore[union-attr]
        assert "engine_saves_before_drafts" in caplog.text
    finally:
        made.close()
