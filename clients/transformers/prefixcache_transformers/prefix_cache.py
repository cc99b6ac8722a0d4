"""`PrefixCache`: `generate` and `prefill` that reuse the stored prefix of a prompt.

Rules:
1. The output is the model's own, with or without a hit: what cannot be reused is computed, whatever the store does.
2. At least one token of every prompt is computed, and the whole prompt is passed to `generate`, so that positions are
   those of a run without cache.
3. Storing happens after the output exists, on another thread.

What belongs here: the life of one request. Tensors are cache_io's, integers of a batch batch's, storing is storing's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from prefixcache.identity.epochs import new_epoch
from prefixcache.identity.keychain import KeyChain
from prefixcache.identity.keys import DEFAULT_BLOCK_TOKENS
from prefixcache_transformers import compat
from prefixcache_transformers.batch import Prompt, infer_mask, read_prompts
from prefixcache_transformers.block_store import BlockStore, StoreOpener
from prefixcache_transformers.cache_io import take_snapshot
from prefixcache_transformers.continuous import UNKNOWN_FORM, Batching, batching
from prefixcache_transformers.model_identity import AdapterState, adapter_state, model_identity
from prefixcache_transformers.probe import probe
from prefixcache_transformers.requests import Settings, bypass_reason, other_inputs
from prefixcache_transformers.restoring import restore_prompts
from prefixcache_transformers.storing import Stats, StoreJob, StoreThread, until_end

__all__ = ["CacheOptions", "CachedPrefix", "PrefixCache"]


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """`block_tokens`: tokens of a block. `prompt_only`: generated tokens are not stored. `tenant`: a name that
    separates; a secret separates better (see `daemon`). `codec`: "raw", or "int8" or "int4", which lose a little and
    let every tier hold twice or three times the tokens; they share nothing with raw blocks."""

    block_tokens: int = DEFAULT_BLOCK_TOKENS
    prompt_only: bool = False
    tenant: str = ""
    codec: str = "raw"


@dataclass(slots=True)
class CachedPrefix:
    """What `lookup` found: `cache` holds the first `columns` columns of the batch, `tokens` of each row.

    `cache` is always usable, empty (columns 0) after a miss. It belongs to the caller.
    """

    cache: DynamicCache
    columns: int
    tokens: tuple[int, ...]
    prompts: list[Prompt]
    chains: list[KeyChain]


class PrefixCache:
    """Prefix reuse for one model. Not safe for two threads at once."""

    def __init__(self, model: PreTrainedModel, open_store: StoreOpener, options: CacheOptions | None = None) -> None:
        """`model`: of transformers, or an engine around one (DeepSpeed's), which is then left out of all calls.
        `open_store`: where blocks are kept, see `prefixcache_transformers.daemon`.

        Runs one token through `model` to learn its cache's shape. Raises UnsupportedModelError or ConfigError for a
        model whose states cannot be shared.
        """
        model = compat.unwrapped(model)
        self.model = model
        self.options = options or CacheOptions()
        self.shape = probe(model)
        self.stats = Stats()
        self._open_store = open_store
        self._epoch = 0
        self._adapters: AdapterState = ((), ())
        self._root, self._store = self._open()
        self._generate_keyword = compat.generate_cache_keyword()
        self._forward_keyword = compat.forward_cache_keyword(model)
        self._thread = StoreThread(self.stats)

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **arguments: Any) -> Any:
        """`model.generate` with the same arguments and the same result; input_ids is i64[rows, columns].

        Rows must be left-padded. Calls that the cache does not understand go straight to the model, counted in
        `stats.reasons`.
        """
        if attention_mask is not None:
            arguments["attention_mask"] = attention_mask
        settings = Settings(self.model, arguments)
        reason = bypass_reason(self.model, input_ids, arguments)
        found = None
        if reason:
            self.stats.reasons[reason] += 1
        else:
            inferred = attention_mask is None
            found = self.lookup(
                input_ids, infer_mask(input_ids, settings.pad_id, settings.eos_ids) if inferred else attention_mask
            )
        if found is None:
            return self.model.generate(input_ids, **arguments)
        rows = settings.rows_per_prompt
        store_generated = not self.options.prompt_only and settings.beams == 1
        if store_generated:
            compat.record_until(found.cache, None)
        if rows > 1 and found.columns:
            found.cache.batch_repeat_interleave(rows)
        output = self.model.generate(input_ids, **arguments, **{self._generate_keyword: found.cache})
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        generated = sequences[:, input_ids.shape[1] :] if store_generated else None
        self._store_later(found, rows, generated, settings.eos_ids)
        if not isinstance(output, torch.Tensor):
            self.flush()  # the caller holds the cache from here on and may change it
        return output

    @torch.no_grad()
    def prefill(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **arguments: Any
    ) -> tuple[Any, CachedPrefix | None]:
        """One forward over what is not cached, for callers with their own decoding loop; stores the prompt.

        Returns the model's output (logits of the computed columns only) and the prefix, whose `cache` now holds the
        whole prompt; None where the batch is not left-padded or the model is given more than token ids (images), and
        then everything was computed without a cache. The prompt is stored when this returns, so the caller may change
        the cache.
        """
        reason = other_inputs(arguments)
        if reason:
            self.stats.reasons[reason] += 1
        found = None if reason else self.lookup(input_ids, attention_mask)
        if found is None:
            return self.model(input_ids=input_ids, attention_mask=attention_mask, **arguments), None
        if attention_mask is not None:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
            arguments |= {"attention_mask": attention_mask, "position_ids": positions[:, found.columns :]}
        arguments |= {self._forward_keyword: found.cache, "use_cache": True}
        output = self.model(input_ids=input_ids[:, found.columns :], **arguments)
        self._store_later(found, 1, None, ())
        self.flush()
        return output, found

    def lookup(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> CachedPrefix | None:
        """The longest stored prefix of a batch [rows, columns] as a filled cache; None for rows not left-padded."""
        self.stats.requests += 1
        prompts = read_prompts(input_ids, attention_mask)
        if prompts is None:
            self.stats.reasons["not_left_padded"] += 1
            return None
        root, store = self._namespace()
        chains = [KeyChain(root, self.options.block_tokens) for _ in prompts]
        for chain, prompt in zip(chains, prompts, strict=True):
            chain.append(prompt.tokens)
        cache = compat.new_cache(self.model)
        compat.record_until(cache, input_ids.shape[1])
        restored = restore_prompts(store, self.shape, cache, prompts, chains)
        if restored.reason:
            self.stats.reasons[restored.reason] += 1
        self.stats.looked_up += sum(len(prompt.tokens) for prompt in prompts)
        self.stats.reused += sum(restored.tokens)
        return CachedPrefix(cache, restored.columns, restored.tokens, prompts, chains)

    def generate_batch(self, inputs: list[list[int]], **arguments: Any) -> Any:
        """`model.generate_batch` with the same arguments and the same result: continuous batching (transformers 5.x)
        in which prompts go on from their stored prefix. `inputs`: token ids of each prompt."""
        with self.continuous_batching():
            return self.model.generate_batch(inputs, **arguments)

    @contextmanager
    def continuous_batching(self) -> Iterator[None]:
        """While this is entered, everything that the model batches continuously (`generate_batch`, managers of
        `continuous_batching_context_manager`) reuses and stores prefixes; at its end all is stored or refused."""
        if not hasattr(self.model, "init_continuous_batching"):
            self.stats.reasons[UNKNOWN_FORM] += 1
            yield
            return
        options = self.options
        over = Batching(
            self.shape, options.block_tokens, self._namespace, self.stats, self._thread, prompt_only=options.prompt_only
        )
        with batching(self.model, over):
            yield
        self.flush()

    def invalidate(self) -> None:
        """The weights were changed in place: what was stored before is not found any more, here or in any process."""
        self.flush()
        self._epoch = new_epoch()
        self._root, self._store = self._open()

    def flush(self) -> None:
        """Wait until everything computed so far is stored or refused."""
        self._thread.flush()

    def close(self) -> None:
        """Store what is waiting and stop the thread."""
        self._thread.close()

    def _namespace(self) -> tuple[bytes, BlockStore]:
        """The root key and the store for the model as it is now."""
        if adapter_state(self.model) != self._adapters:
            self._root, self._store = self._open()
        return self._root, self._store

    def _open(self) -> tuple[bytes, BlockStore]:
        self._adapters = adapter_state(self.model)
        identity = model_identity(
            self.model,
            self.shape,
            block_tokens=self.options.block_tokens,
            epoch=self._epoch,
            tenant=self.options.tenant,
            codec=self.options.codec,
        )
        return self._open_store(identity)

    def _store_later(
        self, found: CachedPrefix, rows_per_prompt: int, generated: torch.Tensor | None, eos_ids: Sequence[int]
    ) -> None:
        snapshot = take_snapshot(found.cache, self.shape, self.options.block_tokens, found.columns)
        held = found.cache.get_seq_length()
        jobs = []
        for number, prompt in enumerate(found.prompts):
            for repeat in range(rows_per_prompt if generated is not None else 1):
                row = number * rows_per_prompt + repeat
                tail = None if generated is None else until_end(generated[row], eos_ids)
                jobs.append(StoreJob(row, prompt, found.chains[number], tail, held - prompt.pad))
        self._thread.add(self._store, snapshot, jobs)
