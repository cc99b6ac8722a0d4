"""`prefill` and `lookup`: bit for bit what a cache kept in memory gives, through the fast attention kernels."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from prefixcache_transformers import compat

from .tiny_models import BLOCK, STYLES, cached, left_padded, prompt, tiny_model

SHARED = 12 * BLOCK


def states_of(model: Any, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """All keys and values of a prompt computed in one call, from a cache that forgets nothing."""
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=ids, **{compat.forward_cache_keyword(model): cache, "use_cache": True})
    return [(layer.keys, layer.values) for layer in cache.layers]


def go_on(model: Any, states: list[tuple[torch.Tensor, torch.Tensor]], cut: int, suffix: torch.Tensor) -> torch.Tensor:
    """Logits of `suffix` behind the first `cut` tokens of a cache in memory, in one call, without this package."""
    cache = DynamicCache(
        [(keys[..., :cut, :].clone(), values[..., :cut, :].clone()) for keys, values in states], config=model.config
    )
    with torch.no_grad():
        output = model(input_ids=suffix, **{compat.forward_cache_keyword(model): cache, "use_cache": True})
    assert isinstance(output.logits, torch.Tensor)
    return output.logits


@pytest.mark.parametrize("style", sorted(STYLES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("own", [0, 1, BLOCK, 37])
def test_logits_are_those_of_a_cache_in_memory(style: str, dtype: torch.dtype, own: int) -> None:
    model = tiny_model(style, dtype)
    shared = prompt(SHARED, 1)
    first = torch.cat([shared, prompt(50, 2)], dim=1)
    second = torch.cat([shared, prompt(own, 3)], dim=1)
    cut = min(SHARED, second.shape[1] - 1)
    expected = go_on(model, states_of(model, first), cut, second[:, cut:])
    cache, _ = cached(model)
    with torch.no_grad():
        cache.prefill(first)
        cache.flush()
        output, found = cache.prefill(second)
    assert found is not None
    assert found.columns == cut
    assert output.logits.dtype is dtype
    assert torch.equal(output.logits, expected)


@pytest.mark.parametrize("style", ["llama", "gemma3"])
def test_prefilled_cache_can_be_decoded_from(style: str) -> None:
    model = tiny_model(style)
    cache, _ = cached(model)
    ids = prompt(SHARED + 5, 4)
    for _ in range(2):
        with torch.no_grad():
            output, found = cache.prefill(ids)
            said = [int(output.logits[0, -1].argmax())]
            while len(said) < 8:
                step = model(input_ids=torch.tensor([said[-1:]]), **{compat.forward_cache_keyword(model): found.cache})
                said.append(int(step.logits[0, -1].argmax()))
        cache.flush()
        assert said == model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    assert cache.stats.reused == SHARED


def test_prefill_of_a_padded_batch() -> None:
    model = tiny_model("gemma3")
    cache, _ = cached(model)
    ids, mask = left_padded([prompt(90, 5), prompt(70, 6)])
    with torch.no_grad():
        cold, _ = cache.prefill(ids, mask)
        cache.flush()
        warm, found = cache.prefill(ids, mask)
    assert found is not None
    assert found.columns > 70
    torch.testing.assert_close(warm.logits, cold.logits[:, found.columns :])


def test_rows_that_are_not_left_padded_are_computed() -> None:
    model = tiny_model("llama")
    cache, _ = cached(model)
    ids = torch.nn.functional.pad(prompt(40, 7), (0, 8))
    with torch.no_grad():
        output, found = cache.prefill(ids, (ids != 0).long())
    assert found is None
    assert output.logits.shape[1] == 48


def kernels(model: Any, cache: Any, ids: torch.Tensor) -> list[str]:
    """Names of the attention operators that a prefill runs."""
    with profile(activities=[ProfilerActivity.CPU]) as trace, torch.no_grad():
        cache.prefill(ids)
    return sorted({event.key for event in trace.key_averages() if "scaled_dot_product" in event.key})


@pytest.mark.parametrize("style", sorted(STYLES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_suffix_goes_through_the_fused_kernel(style: str, dtype: torch.dtype) -> None:
    """Queries shorter than keys: still flash attention, never scores and softmax in separate steps."""
    model = tiny_model(style, dtype)
    cache, _ = cached(model)
    shared = prompt(SHARED, 8)
    fused = ["aten::_scaled_dot_product_flash_attention_for_cpu", "aten::scaled_dot_product_attention"]
    assert kernels(model, cache, torch.cat([shared, prompt(20, 9)], dim=1)) == fused
    cache.flush()
    assert kernels(model, cache, torch.cat([shared, prompt(30, 10)], dim=1)) == fused
    assert cache.stats.reused == SHARED
