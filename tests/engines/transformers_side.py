"""Transformers in the test's own process, over the same daemon as an engine: the other engine, and a reference.

What it stores is its own prefill's, and what it finds is held against its own prefill, so a block that holds anything
but the model's KV of its tokens shows as a moved distribution.
"""

from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM

from prefixcache_client import Client
from prefixcache_transformers import CacheOptions, Daemon, PrefixCache
from prefixcache_transformers.model_identity import model_identity

MAX_KL = 1e-3
"""In nats; what rounding in another engine's kernels may move a next-token distribution by, in the mean."""


class TransformersSide:
    """One model; use it in a `with`."""

    def __init__(self, folder: Path, address: str, dtype: torch.dtype = torch.bfloat16, codec: str = "raw") -> None:
        self._begin(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), address, codec)

    @classmethod
    def of(cls, engine: Any, address: str) -> Self:
        """A model that is there already, or what wraps one."""
        side = cls.__new__(cls)
        side._begin(engine, address)
        return side

    def _begin(self, engine: Any, address: str, codec: str = "raw") -> None:
        self._client = Client(address)
        self.cache = PrefixCache(engine, Daemon(self._client), CacheOptions(codec=codec))
        self.model: Any = self.cache.model
        self.model.generation_config.eos_token_id = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()
        self._client.close()

    @property
    def fingerprint(self) -> str:
        """Of the namespace its blocks are in."""
        options = self.cache.options
        identity = model_identity(
            self.model, self.cache.shape, block_tokens=options.block_tokens, epoch=0, tenant="", codec=options.codec
        )
        return identity.fingerprint().hex()

    def write(self, tokens: list[int]) -> int:
        """Computes and stores them; how many were there already."""
        _, found = self.cache.prefill(torch.tensor([tokens]))
        assert found is not None
        return found.columns

    def says(self, tokens: list[int], count: int = 16) -> tuple[list[int], int]:
        """What follows greedily, and how many tokens were reused; stores all blocks."""
        before = self.cache.stats.reused
        said = self.cache.generate(
            torch.tensor([tokens]), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )  # fmt: skip
        self.cache.flush()
        return said[0, len(tokens) :].tolist(), self.cache.stats.reused - before

    def says_alone(self, tokens: list[int], count: int = 16) -> list[int]:
        """What follows without a cache of ours."""
        said = self.model.generate(
            torch.tensor([tokens]), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )  # fmt: skip
        following: list[int] = said[0, len(tokens) :].tolist()
        return following

    def moved(self, tokens: list[int]) -> tuple[int, float]:
        """How many tokens are found, and how far the distributions after them are from those of an own prefill: the
        mean KL divergence in nats over the tokens that had to be computed."""
        ids = torch.tensor([tokens])
        output, found = self.cache.prefill(ids)
        assert found is not None
        with torch.no_grad():
            own = self.model(input_ids=ids).logits[0, found.columns :]
        return found.columns, divergence(own, output.logits[0])


def divergence(own: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL divergence in nats of distributions given as logits [positions, vocabulary]."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (own, other))
    return float((p.exp() * (p - q)).sum(-1).mean())
