"""Small random models in the styles that matter to a KV cache: GQA, sliding windows everywhere, sliding and full mixed.

Embeddings are untied and weights large (0.08): tied or timid random models emit one token for ever, and then every
comparison of outputs passes.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prefixcache.identity.fingerprint import NamespaceIdentity
from prefixcache.identity.keys import root_key
from prefixcache_transformers.block_store import BlockStore, MemoryBlockStore
from prefixcache_transformers.prefix_cache import CacheOptions, PrefixCache

# Models this small gain nothing from a second thread, and on a busy machine each would wait for the other.
torch.set_num_threads(1)

VOCAB = 512
BLOCK = 16
WINDOW = 40  # no multiple of the block, so that windows begin inside blocks

COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "initializer_range": 0.08, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

STYLES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
}


def tiny_model(style: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of one of STYLES, the same at every call."""
    kind, more = STYLES[style]
    torch.manual_seed(1234)
    config = AutoConfig.for_model(kind, **(COMMON | more))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).eval()
    model.generation_config.eos_token_id = None  # random models meet it anywhere, and tests want every token
    model.generation_config.pad_token_id = 0
    return model


class Opener:
    """Opens memory stores, one per fingerprint, and keeps them for a test to look at."""

    def __init__(self, wrap: Callable[[BlockStore], BlockStore] = lambda store: store) -> None:
        self.stores: dict[bytes, MemoryBlockStore] = {}
        self.wrap = wrap

    def __call__(self, identity: NamespaceIdentity) -> tuple[bytes, BlockStore]:
        fingerprint = identity.fingerprint()
        if fingerprint not in self.stores:
            self.stores[fingerprint] = MemoryBlockStore(identity.layout, BLOCK)
        return root_key(fingerprint), self.wrap(self.stores[fingerprint])

    @property
    def store(self) -> MemoryBlockStore:
        """The store that was opened last."""
        return list(self.stores.values())[-1]


def cached(model: Any, opener: Opener | None = None, **options: Any) -> tuple[PrefixCache, Opener]:
    """A PrefixCache over memory with small blocks."""
    opener = opener or Opener()
    return PrefixCache(model, opener, CacheOptions(block_tokens=BLOCK, **options)), opener


def prompt(length: int, seed: int) -> torch.Tensor:
    """Random token ids i64[1, length], special tokens left out."""
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def left_padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) of a batch, each i64[rows, longest]."""
    longest = max(ids.shape[1] for ids in prompts)
    ids = torch.cat([torch.nn.functional.pad(ids, (longest - ids.shape[1], 0)) for ids in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(ids), (longest - ids.shape[1], 0)) for ids in prompts])
    return ids, mask


def plain(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, tokens: int = 12, **more: Any) -> Any:
    """What the model says without a cache, greedy."""
    return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **more)
