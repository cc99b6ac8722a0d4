"""Continuous batching of transformers 5.x over stored prefixes: the engine's own tokens, whatever was reused."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", minversion="5.0", reason="4.57's continuous batching dies without CUDA")

from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
from transformers.generation.continuous_batching.scheduler import Scheduler

from prefixcache_transformers.block_store import BlockLease, BlockStore, PartBlocks
from prefixcache_transformers.continuous import UNKNOWN_FORM, _left_alone

from .tiny_models import BLOCK, VOCAB, Opener, cached, tiny_model

SHARED = 5 * BLOCK
NEW = 12
PAGE = 32  # tokens of a page: two blocks, so that a reused prefix may end inside one


def prompts(own: Sequence[int], seed: int = 1) -> list[list[int]]:
    """One prompt per entry: a common beginning, then so many tokens of its own."""
    random = np.random.default_rng(seed)
    shared = random.integers(3, VOCAB, SHARED).tolist()
    return [shared + random.integers(3, VOCAB, count).tolist() for count in own]


def settings(**more: Any) -> dict[str, Any]:
    config = ContinuousBatchingConfig(page_size=PAGE, num_blocks=64, max_batch_tokens=64, **more)
    return {"continuous_batching_config": config, "max_new_tokens": NEW}


def said(results: Any) -> list[list[int]]:
    assert all(each.error is None for each in results.values())
    return [each.generated_tokens for each in results.values()]


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


def test_tokens_are_those_of_a_run_without(llama: Any) -> None:
    first, second = prompts((7, 20, 33)), prompts((9, 40, 16))
    assert first[0][:SHARED] == second[0][:SHARED]
    expected = [said(llama.generate_batch(batch, **settings())) for batch in (first, second)]
    assert len({tuple(tokens) for batch in expected for tokens in batch}) > 3, "or else equal outputs prove nothing"
    cache, opener = cached(llama)
    assert said(cache.generate_batch(first, **settings())) == expected[0]
    assert cache.stats.reused == 0
    assert len(opener.store) > SHARED // BLOCK
    other, _ = cached(tiny_model("llama"), opener)
    assert said(other.generate_batch(second, **settings())) == expected[1]
    assert other.stats.reused >= SHARED
    assert not other.stats.reasons + cache.stats.reasons


def test_prompts_that_are_all_there(llama: Any) -> None:
    lengths = (2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK)
    batch = [prompts((0,), seed)[0][:length] for seed, length in enumerate(lengths)]
    cache, opener = cached(llama)
    expected = said(cache.generate_batch(batch, **settings()))
    again, _ = cached(llama, opener)
    assert said(again.generate_batch(batch, **settings())) == expected
    assert again.stats.reused == sum(min(length // BLOCK * BLOCK, length - 1) for length in lengths)


def test_generate_and_generate_batch_share(llama: Any) -> None:
    (prompt,) = prompts((25,))
    cache, opener = cached(llama)
    one = cache.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
    cache.flush()
    assert said(cache.generate_batch([prompt], **settings())) == [one]
    assert cache.stats.reused == SHARED + BLOCK
    later, _ = cached(llama)
    batched = said(later.generate_batch([prompt], **settings()))[0]
    turn = [*prompt, *batched, 5, 6, 7]
    alone = llama.generate(torch.tensor([turn]), max_new_tokens=NEW, do_sample=False)
    assert torch.equal(later.generate(torch.tensor([turn]), max_new_tokens=NEW, do_sample=False), alone)
    assert later.stats.reused == (len(turn) - 4) // BLOCK * BLOCK, "generated tokens are stored too"
    assert len(opener.stores) == 1


def test_prompt_only(llama: Any) -> None:
    (prompt,) = prompts((BLOCK - 1,))
    cache, opener = cached(llama, prompt_only=True)
    cache.generate_batch([prompt], **settings())
    assert len(opener.store) == SHARED // BLOCK


def test_a_cache_too_small_for_all(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for pages, lose them and begin anew; what is reused must not make that different."""
    many = prompts([30 + 3 * each for each in range(4)])
    small = {
        "continuous_batching_config": ContinuousBatchingConfig(page_size=PAGE, num_blocks=10),
        "max_new_tokens": 20,
    }
    expected = said(llama.generate_batch(many, **small))
    begun_anew: list[str] = []
    monkeypatch.setattr(Scheduler, "add_waiting_request", _noting(Scheduler.add_waiting_request, begun_anew))
    cache, opener = cached(llama)
    assert said(cache.generate_batch(many, **small)) == expected
    assert len(begun_anew) > len(many), "some request had to make room"
    again, _ = cached(llama, opener)
    assert said(again.generate_batch(many, **small)) == expected
    assert again.stats.reused > 0


def _noting(original: Callable[..., None], names: list[str]) -> Callable[..., None]:
    def noting(scheduler: Any, state: Any) -> None:
        names.append(state.request_id)
        original(scheduler, state)

    return noting


def test_several_answers(llama: Any) -> None:
    (prompt,) = prompts((25,))
    cache, opener = cached(llama)
    cache.generate_batch([prompt], **settings())
    generation = llama.generation_config.__class__(num_return_sequences=3, do_sample=True, max_new_tokens=NEW)
    results = cache.generate_batch([prompt], generation_config=generation, **settings())
    assert len(results) == 3
    assert cache.stats.reused >= SHARED + BLOCK
    stored = opener.store.digest()
    assert said(cache.generate_batch([prompt], **settings()))
    assert opener.store.digest() == stored or len(opener.store)


def test_windows_are_left_alone() -> None:
    model = tiny_model("gemma3")
    batch = prompts((20,))
    expected = said(model.generate_batch(batch, **settings()))
    cache, _ = cached(model)
    assert said(cache.generate_batch(batch, **settings())) == expected
    assert cache.stats.reasons == {"continuous_batching_windows": 1}


def test_sharing_switched_off_is_left_alone(llama: Any) -> None:
    cache, opener = cached(llama)
    cache.generate_batch(prompts((20,)), **settings(allow_block_sharing=False))
    assert cache.stats.reasons == {"block_sharing_off": 1}
    assert not len(opener.store)


def test_an_engine_that_cannot_be_read_is_left_alone(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version's: pages in another form, or a manager that makes no batch processor of this kind."""
    cache, _ = cached(llama)
    for engine, reason in (
        ({"cache": SimpleNamespace(cache_allocators={}), "use_async_batching": False}, UNKNOWN_FORM),
        ({"cache": SimpleNamespace(), "use_async_batching": False}, UNKNOWN_FORM),
        ({"cache": SimpleNamespace(), "use_async_batching": True}, "async_batching"),
    ):
        assert _left_alone(SimpleNamespace(**engine), cache.shape) == reason
    with monkeypatch.context() as changed:
        changed.setattr(ContinuousMixin, "init_continuous_batching", lambda *_, **__: SimpleNamespace())
        with cache.continuous_batching():
            llama.init_continuous_batching()
    assert cache.stats.reasons == {UNKNOWN_FORM: 1}
    with monkeypatch.context() as changed:
        changed.delattr(ContinuousMixin, "init_continuous_batching")
        with cache.continuous_batching():
            pass
    assert cache.stats.reasons == {UNKNOWN_FORM: 2}


class _Failing:
    """A store that breaks in one of its calls."""

    def __init__(self, store: BlockStore, fault: str) -> None:
        self._store, self._fault = store, fault

    def acquire(self, keys: bytes, prompt_tokens: int) -> Any:
        if self._fault == "acquire":
            raise OSError("gone")
        lease = self._store.acquire(keys, prompt_tokens)
        return _Lost(lease) if self._fault == "copy" else lease

    def store(self, keys: bytes, parts: Sequence[PartBlocks]) -> int:
        if self._fault == "store":
            raise RuntimeError("full")
        return self._store.store(keys, parts)


class _Lost:
    """A lease whose bytes change while they are copied."""

    def __init__(self, lease: BlockLease) -> None:
        self.blocks, self.release, self.first_block = lease.blocks, lease.release, lease.first_block
        self._lease = lease

    def copy_to(self, targets: Sequence[PartBlocks]) -> bool:
        for target in targets:
            target.tensor.fill_(3.0)
        return False


@pytest.mark.parametrize(
    ("fault", "reason"), [("acquire", "store_failed"), ("copy", "lease_lost"), ("store", "store_failed")]
)
def test_a_failing_store_changes_nothing(llama: Any, fault: str, reason: str) -> None:
    batch = prompts((20,))
    plain, opener = cached(llama)
    expected = said(plain.generate_batch(batch, **settings()))
    broken = Opener(lambda store: _Failing(store, fault))
    broken.stores = opener.stores if fault != "store" else {}
    cache, _ = cached(llama, broken)
    assert said(cache.generate_batch(batch, **settings())) == expected
    assert cache.stats.reused == 0
    assert cache.stats.reasons == {reason: 1}


def test_engines_are_left_as_they_were(llama: Any) -> None:
    cache, _ = cached(llama)
    with cache.continuous_batching(), _manager(llama) as manager:
        manager.add_request(prompts((20,))[0], max_new_tokens=2)
        assert manager.get_result(timeout=60) is not None
        assert "search_prefix_match" in vars(manager.batch_processor.cache)
        processor = manager.batch_processor
    assert cache.stats.blocks_stored > 0
    for owner in (llama, manager, processor.cache, processor.scheduler):
        assert not {"init_continuous_batching", "search_prefix_match", "finish_request"} & set(vars(owner))


@contextmanager
def _manager(model: Any) -> Iterator[Any]:
    config = settings()["continuous_batching_config"]
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        yield manager
