"""Which calls of `generate` the cache takes part in, and why not in the others.

What belongs here: arguments of one call. A call that is not understood completely is left alone: the answer is then the
model's own, only slower. Reasons are short fixed words, counted by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

__all__ = ["Settings", "bypass_reason", "other_inputs"]

# Arguments that change what a prompt's states are, or bring a cache of their own.
_REFUSED = {
    "cache": "own_cache",
    "past_key_values": "own_cache",
    "inputs_embeds": "inputs_embeds",
    "position_ids": "position_ids",
    "assistant_model": "assisted_decoding",
    "prompt_lookup_num_tokens": "assisted_decoding",
    "custom_generate": "custom_generate",
    "cache_implementation": "cache_implementation",
    "penalty_alpha": "contrastive_search",
    "dola_layers": "dola",
}
# Older Gemma checkpoints ask for it; `generate` takes its default cache instead.
_UNSET_BY_GENERATE = ("cache_implementation", "hybrid")
_MODEL_INPUTS = ("past_key_values", "inputs_embeds", "position_ids")
_KNOWN_TENSORS = {"input_ids", "attention_mask"}


class Settings:
    """What one call of `generate` runs with: its keywords, its generation config, the model's, in that order."""

    def __init__(self, model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
        self._sources = [arguments.get("generation_config"), getattr(model, "generation_config", None)]
        self._arguments = arguments

    def get(self, name: str) -> Any:
        """The value in force, or None."""
        if self._arguments.get(name) is not None:
            return self._arguments[name]
        if self._sources[0] is not None:
            return getattr(self._sources[0], name, None)
        return getattr(self._sources[1], name, None)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        value = self.get("eos_token_id")
        if value is None:
            return ()
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        return tuple(value) if isinstance(value, list | tuple) else (int(value),)

    @property
    def pad_id(self) -> int | None:
        """The padding token, where there is one."""
        value = self.get("pad_token_id")
        return None if value is None else int(value)

    @property
    def beams(self) -> int:
        """Beams per prompt; 1 for greedy search and sampling."""
        return int(self.get("num_beams") or 1)

    @property
    def rows_per_prompt(self) -> int:
        """Rows of the model's batch for each prompt."""
        return max(self.beams, int(self.get("num_return_sequences") or 1))


def bypass_reason(model: PreTrainedModel, input_ids: torch.Tensor | None, arguments: Mapping[str, Any]) -> str | None:
    """Why this call must run without the cache; None when it may use it."""
    settings = Settings(model, arguments)
    for name, reason in _REFUSED.items():
        if settings.get(name) is not None and (name, settings.get(name)) != _UNSET_BY_GENERATE:
            return reason
    if model.training:
        return "training_mode"
    if input_ids is None or input_ids.ndim != 2:
        return "no_input_ids"
    if settings.get("use_cache") is False:
        return "use_cache_off"
    return other_inputs(arguments)


def other_inputs(arguments: Mapping[str, Any]) -> str | None:
    """Why what a model is given beside its token ids makes other KV of them (images); None where it does not."""
    for name in _MODEL_INPUTS:
        if arguments.get(name) is not None:
            return _REFUSED[name]
    holders = {name for name, value in arguments.items() if _holds_tensor(value)}
    return None if holders <= _KNOWN_TENSORS else "other_model_inputs"


def _holds_tensor(value: object) -> bool:
    """Processors give tensors, arrays, or lists of either."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensor(part) for part in value)
    return isinstance(value, torch.Tensor | np.ndarray)
