"""`PrefixCache.generate` says what `model.generate` says, in float32 and greedy, whatever was stored before."""

from typing import Any

import pytest
import torch

from prefixcache_transformers import cache_io
from prefixcache_transformers.block_store import BlockStore

from .tiny_models import BLOCK, STYLES, WINDOW, Opener, cached, left_padded, plain, prompt, tiny_model

STYLE_NAMES = sorted(STYLES)


@pytest.fixture(scope="module", params=STYLE_NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


def generate(cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, tokens: int = 12, **more: Any) -> Any:
    output = cache.generate(ids, mask, max_new_tokens=tokens, do_sample=False, **more)
    cache.flush()
    return output


def test_random_models_emit_different_tokens(model: Any) -> None:
    ids = prompt(50, 1)
    assert len(set(plain(model, ids, tokens=24)[0, 50:].tolist())) >= 8
    assert not torch.equal(plain(model, ids)[0, 50:], plain(model, prompt(50, 2))[0, 50:])


@pytest.mark.parametrize("own", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_shared_prefix(model: Any, own: int) -> None:
    shared = prompt(10 * BLOCK, 3)
    cache, _ = cached(model)
    generate(cache, torch.cat([shared, prompt(7, 4)], dim=1))
    assert cache.stats.reused == 0
    ids = torch.cat([shared, prompt(own, 5)], dim=1)
    assert torch.equal(generate(cache, ids), plain(model, ids))
    assert cache.stats.reused == 10 * BLOCK


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 3])
def test_same_prompt_again(model: Any, length: int) -> None:
    ids = prompt(length, 6)
    cache, _ = cached(model, prompt_only=True)
    expected = plain(model, ids)
    assert torch.equal(generate(cache, ids), expected)
    assert torch.equal(generate(cache, ids), expected)
    whole = length // BLOCK * BLOCK
    # A prompt of whole blocks is cached to its last token, which is computed again.
    assert cache.stats.reused == min(whole, length - 1)
    assert cache.stats.computed >= 2


def test_window_in_the_middle_of_a_long_prompt() -> None:
    """A prompt that shares less than the stored one hits at the shared end, although the window has moved on."""
    model = tiny_model("gemma3")
    shared = prompt(2000, 7)
    cache, _ = cached(model)
    generate(cache, torch.cat([shared, prompt(100, 8)], dim=1))
    ids = torch.cat([shared, prompt(100, 9)], dim=1)
    assert torch.equal(generate(cache, ids), plain(model, ids))
    assert cache.stats.reused == 2000 // BLOCK * BLOCK


def test_generated_tokens_are_stored(model: Any) -> None:
    ids = prompt(2 * BLOCK + 3, 10)
    cache, opener = cached(model)
    said = generate(cache, ids, tokens=3 * BLOCK)
    assert len(opener.store) == (said.shape[1] - 1) // BLOCK
    longer = torch.cat([said, prompt(5, 11)], dim=1)
    assert torch.equal(generate(cache, longer), plain(model, longer))
    assert cache.stats.reused == (said.shape[1] - 1) // BLOCK * BLOCK


def test_prompt_only_stores_no_generated_token(llama: Any) -> None:
    cache, opener = cached(llama, prompt_only=True)
    generate(cache, prompt(2 * BLOCK + 3, 12), tokens=3 * BLOCK)
    assert len(opener.store) == 2


@pytest.mark.parametrize("lengths", [(90, 70, 50), (64, 64), (33, 100), (17, 16, 80, 41)])
def test_left_padded_batch(model: Any, lengths: tuple[int, ...]) -> None:
    shared = prompt(3 * BLOCK, 13)
    cache, _ = cached(model)
    # The stored prompt and each row share what they have of `shared`.
    generate(cache, torch.cat([shared, prompt(40, 14)], dim=1))
    rows = [torch.cat([shared, prompt(100, 15 + i)], dim=1)[:, :length] for i, length in enumerate(lengths)]
    ids, mask = left_padded(rows)
    expected = plain(model, ids, mask)
    assert torch.equal(generate(cache, ids, mask), expected)
    assert torch.equal(generate(cache, ids, mask), expected)
    # The second time every row is cached to its last whole block, and the shortest tail of them decides.
    column = min(ids.shape[1] - 1, *(ids.shape[1] - length % BLOCK for length in lengths))
    again = sum(max(0, column - (ids.shape[1] - length)) for length in lengths)
    assert cache.stats.reused >= again


def test_batch_of_different_prompts_hits(model: Any) -> None:
    rows = [prompt(5 * BLOCK + 3, 30), prompt(6 * BLOCK + 1, 31), prompt(4 * BLOCK + 9, 32)]
    cache, _ = cached(model, prompt_only=True)
    for row in rows:
        generate(cache, row)
    ids, mask = left_padded(rows)
    before = cache.stats.reused
    assert torch.equal(generate(cache, ids, mask), plain(model, ids, mask))
    column = ids.shape[1] - 9
    assert cache.stats.reused - before == sum(column - (ids.shape[1] - row.shape[1]) for row in rows)


def test_mask_is_inferred_as_generate_does(llama: Any) -> None:
    ids, mask = left_padded([prompt(70, 33), prompt(50, 34)])
    cache, _ = cached(llama)
    expected = plain(llama, ids, mask)
    for _ in range(2):
        assert torch.equal(generate(cache, ids), expected)
    assert cache.stats.reused > 0


def test_right_padding_goes_past_the_cache(llama: Any) -> None:
    ids = torch.nn.functional.pad(prompt(40, 35), (0, 8))
    mask = (ids != 0).long()
    cache, opener = cached(llama)
    assert torch.equal(generate(cache, ids, mask), plain(llama, ids, mask))
    assert cache.stats.reasons == {"not_left_padded": 1}
    assert len(opener.store) == 0


def test_several_answers_per_prompt(model: Any) -> None:
    ids, mask = left_padded([prompt(70, 36), prompt(50, 37)])
    cache, _ = cached(model)
    expected = plain(model, ids, mask, num_beams=3, num_return_sequences=2)
    for _ in range(2):
        assert torch.equal(generate(cache, ids, mask, num_beams=3, num_return_sequences=2), expected)
    assert cache.stats.reused > 0
    before = cache.stats.reused
    torch.manual_seed(5)
    sampled = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=True, num_return_sequences=3)
    torch.manual_seed(5)
    again = cache.generate(ids, mask, max_new_tokens=20, do_sample=True, num_return_sequences=3)
    assert torch.equal(again, sampled)
    assert cache.stats.reused > before
    cache.flush()
    for number, row in enumerate(sampled):  # every answer is stored, each under its own key
        whole = row[None, (0, 20)[number // 3] :]
        ones = torch.ones_like(whole)  # random models say the padding token too
        before = cache.stats.reused
        assert torch.equal(generate(cache, whole, ones), plain(model, whole, ones))
        assert cache.stats.reused - before == (whole.shape[1] - 1) // BLOCK * BLOCK


def test_returned_dict(llama: Any) -> None:
    ids = prompt(50, 38)
    cache, opener = cached(llama)
    for _ in range(2):
        output = generate(cache, ids, return_dict_in_generate=True, output_scores=True)
        assert torch.equal(output.sequences, plain(llama, ids))
    assert len(opener.store) == (50 + 12 - 1) // BLOCK


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"use_cache": False}, "use_cache_off"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"prompt_lookup_num_tokens": 2, "eos_token_id": 2}, "assisted_decoding"),
    ],
)
def test_calls_left_alone(llama: Any, arguments: dict[str, Any], reason: str) -> None:
    ids = prompt(50, 39)
    cache, opener = cached(llama)
    mask = torch.ones_like(ids)
    assert torch.equal(generate(cache, ids, mask, **arguments), plain(llama, ids, mask, **arguments))
    assert cache.stats.reasons == {reason: 1}
    assert len(opener.store) == 0


def test_training_mode_is_left_alone(llama: Any) -> None:
    cache, opener = cached(llama)
    llama.train()
    try:
        generate(cache, prompt(50, 40))
    finally:
        llama.eval()
    assert cache.stats.reasons == {"training_mode": 1}
    assert len(opener.store) == 0


def test_invalidate_forgets(llama: Any) -> None:
    ids = prompt(50, 41)
    cache, opener = cached(llama)
    generate(cache, ids)
    cache.invalidate()
    assert torch.equal(generate(cache, ids), plain(llama, ids))
    assert cache.stats.reused == 0
    first, second = opener.stores.values()
    assert len(first) == len(second) > 0


def test_stored_bytes_never_change(model: Any) -> None:
    """A model updates its cache in place; what is stored must not notice."""
    ids = prompt(6 * BLOCK + 5, 42)
    cache, opener = cached(model, prompt_only=True)
    generate(cache, ids)
    before = opener.store.digest()
    found = cache.lookup(ids, None)
    assert found is not None
    for layer in found.cache.layers:
        layer.keys.fill_(7)
        layer.values.fill_(7)
    assert opener.store.digest() == before
    assert torch.equal(generate(cache, ids), plain(model, ids))
    assert opener.store.digest() == before


class Broken:
    """A store that fails: in `acquire`, `copy_to` (raises), `lost` (copy_to answers False), `release` or `store`."""

    def __init__(self, inner: BlockStore, fault: str) -> None:
        self._inner, self._fault = inner, fault

    def acquire(self, keys: bytes, prompt_tokens: int) -> Any:
        self._fail("acquire")
        return BrokenLease(self._inner.acquire(keys, prompt_tokens), self._fault)

    def store(self, keys: bytes, parts: Any) -> int:
        self._fail("store")
        return self._inner.store(keys, parts)

    def _fail(self, call: str) -> None:
        if call == self._fault:
            raise ConnectionResetError("the daemon is gone")


class BrokenLease:
    """A lease of Broken."""

    def __init__(self, inner: Any, fault: str) -> None:
        self._inner, self._fault = inner, fault
        self.blocks = inner.blocks
        self.first_block = inner.first_block

    def copy_to(self, targets: Any) -> bool:
        if self._fault == "copy_to":
            raise TimeoutError("deadline exceeded")
        return bool(self._inner.copy_to(targets)) and self._fault != "lost"

    def release(self, used_blocks: int) -> None:
        if self._fault == "release":
            raise ConnectionResetError("the daemon is gone")
        self._inner.release(used_blocks)


@pytest.mark.parametrize("fault", ["acquire", "copy_to", "lost", "release", "store"])
def test_failing_store_changes_no_output(model: Any, fault: str) -> None:
    ids = prompt(4 * BLOCK + 5, 43)
    good, opener = cached(model)
    generate(good, ids)
    broken, _ = cached(model, Opener(lambda store: Broken(opener.store, fault)))
    assert torch.equal(generate(broken, ids), plain(model, ids))
    assert broken.stats.reused == (0 if fault in ("acquire", "copy_to", "lost") else 4 * BLOCK)
    assert sum(broken.stats.reasons.values()) == 1 or fault == "store"


def test_no_room_for_the_last_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that runs out of memory half-way through a restore: everything is computed, nothing half restored."""
    model = tiny_model("gemma3")
    ids = prompt(4 * BLOCK + 5, 48)
    cache, _ = cached(model)
    generate(cache, ids)
    states = cache_io._GroupBuffer.states

    def full(self: Any, device: torch.device) -> Any:
        if self.group.window_tokens == 0:
            raise torch.OutOfMemoryError("out of memory")
        return states(self, device)

    monkeypatch.setattr(cache_io._GroupBuffer, "states", full)
    assert torch.equal(generate(cache, ids), plain(model, ids))
    assert cache.stats.reasons == {"store_failed": 1}
    assert cache.stats.reused == 0


def test_evicted_blocks_are_misses(model: Any) -> None:
    ids = prompt(6 * BLOCK + 5, 44)
    cache, opener = cached(model, prompt_only=True)
    generate(cache, ids)
    found = cache.lookup(ids, None)
    assert found is not None
    opener.store.drop(found.chains[0].keys[3 * 32 :])
    before = cache.stats.reused
    assert torch.equal(generate(cache, ids), plain(model, ids))
    assert cache.stats.reused - before == 3 * BLOCK
    assert WINDOW > 2 * BLOCK  # so the sliding groups needed blocks before the hole


def test_prompt_only_remembers_no_generated_states() -> None:
    """A long answer must not keep what a sliding layer has forgotten."""
    model = tiny_model("gemma3")
    ids = prompt(50, 45)
    for prompt_only, held in ((True, 50), (False, 50 + 30 - 1)):
        cache, _ = cached(model, prompt_only=prompt_only)
        output = generate(cache, ids, tokens=30, return_dict_in_generate=True)
        states = getattr(output, cache._generate_keyword)
        assert sum(keys.shape[2] for keys, _ in states.layers[0].recorded) == held
        assert states.layers[0].keys.shape[2] == WINDOW - 1


def test_older_gemma_checkpoints_ask_for_a_cache_they_do_not_get() -> None:
    model = tiny_model("gemma3")
    model.generation_config.cache_implementation = "hybrid"
    ids = prompt(4 * BLOCK + 3, 46)
    cache, _ = cached(model)
    for _ in range(2):
        assert torch.equal(generate(cache, ids), plain(model, ids))
    assert cache.stats.reused == 4 * BLOCK


def test_a_defect_in_storing_is_told_and_no_request_fails(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Defective:
        """A store that breaks its contract."""

        def __init__(self, inner: BlockStore) -> None:
            self.acquire = inner.acquire

        def store(self, keys: bytes, parts: Any) -> int:
            raise KeyError("not among the failures a store may have")

    cache, _ = cached(llama, Opener(Defective))
    ids = prompt(50, 47)
    assert torch.equal(generate(cache, ids), plain(llama, ids))
    assert cache.stats.reasons == {"store_defect": 1}
    assert "storing failed" in caplog.text
