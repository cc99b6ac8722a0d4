"""All differences between transformers 4.57 and 5.x, found by looking at what is there, never at version numbers.

What belongs here: how a cache is made, filled and handed to a model. It must not know blocks, keys or the daemon.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

__all__ = [
    "DynamicLayer",
    "RecordingSlidingLayer",
    "fill_layer",
    "forward_cache_keyword",
    "generate_cache_keyword",
    "new_cache",
    "record_until",
    "sliding_window",
    "unwrapped",
]

_CACHE_KEYWORDS = ("cache", "past_key_values")
# 5.x prepares a layer by its first keys and values, 4.57 by its keys.
_PREPARED_BY_VALUES = "value_states" in inspect.signature(DynamicLayer.lazy_initialization).parameters


class RecordingSlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]  # a base without types
    """A sliding layer that computes exactly what its base does and also remembers every state it was given.

    The base keeps the last window only, so what a later, shorter common prefix needs would be gone by the end of the
    prompt. A cache without windows would keep everything too, but then every decoded token attends over all of it.
    """

    def __init__(self, window: int) -> None:
        """`window`: tokens a query sees, itself included."""
        super().__init__(sliding_window=window)
        self.recorded: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.record_until: int | None = None  # tokens seen after which nothing is remembered any more; None for never

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add states [batch, kv_heads, new tokens, head_dim]; returns what attention has to look at."""
        if self.record_until is None or self.cumulative_length < self.record_until:
            self.recorded.append((key_states, value_states))
        states = super().update(key_states, value_states, *args, **kwargs)
        return cast("tuple[torch.Tensor, torch.Tensor]", states)


def record_until(cache: DynamicCache, tokens: int | None) -> None:
    """Let the recording layers of a cache stop at this many tokens; None lets them go on for ever."""
    for layer in cache.layers:
        if isinstance(layer, RecordingSlidingLayer):
            layer.record_until = tokens


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """The cache that `generate` itself would make for this model, its sliding layers replaced by recording ones."""
    cache = DynamicCache(config=model.config)
    cache.layers = [
        RecordingSlidingLayer(sliding_window(layer)) if type(layer) is DynamicSlidingWindowLayer else layer
        for layer in cache.layers
    ]
    return cache


def sliding_window(layer: CacheLayerMixin) -> int:
    """Tokens a query of this layer sees, itself included; 0 for a layer without window."""
    return int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else 0


def fill_layer(layer: CacheLayerMixin, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
    """Make an empty layer hold these states, as if it had seen `tokens` tokens of which these are the last.

    Shapes [batch, kv_heads, kept tokens, dim]. The tensors become the layer's own; `update` would copy them once more.
    """
    layer.lazy_initialization(*((keys, values) if _PREPARED_BY_VALUES else (keys,)))
    layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = tokens  # what positions and masks are counted from


def generate_cache_keyword() -> str:
    """The name under which `generate` takes a cache: `cache` in late 5.x, `past_key_values` before."""
    return _first_of(GenerationMixin.prepare_inputs_for_generation)


def forward_cache_keyword(model: PreTrainedModel) -> str:
    """The name under which this model's `forward` takes a cache. Raises TypeError for a model that takes none."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft's wrapper takes anything
    return _first_of(plain.forward)


def unwrapped(model: Any) -> PreTrainedModel:
    """The model inside an engine that wraps one as its `module`, such as DeepSpeed's InferenceEngine; else itself."""
    inner = getattr(model, "module", None)
    found = inner if isinstance(inner, PreTrainedModel) and not isinstance(model, PreTrainedModel) else model
    return cast("PreTrainedModel", found)


def _first_of(function: Any) -> str:
    names = inspect.signature(function).parameters
    for keyword in _CACHE_KEYWORDS:
        if keyword in names:
            return keyword
    raise TypeError(f"{getattr(function, '__qualname__', function)} takes no key/value cache")
