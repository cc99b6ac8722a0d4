"""`PrefixCache`: `generate` and `prefill` that reuse the stored prefix of a prompt.

Rules:
1. The output is the model's own, with or without a hit; a store that fails, lies about nothing and answers late costs
   time at most. What cannot be reused is computed.
2. At least one token of every prompt is computed, and the whole prompt is passed to `generate`, so that positions are
   those of a run without cache.
3. Storing happens after the output exists, on one thread of its own, whole blocks only.

What belongs here: the life of one request. Tensors are cache_io's, integers of a batch batch's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from prefixcache.identity.keychain import KeyChain
from prefixcache.identity.keys import KEY_BYTES
from prefixcache_transformers import compat
from prefixcache_transformers.batch import Prompt, common_column, infer_mask, read_prompts
from prefixcache_transformers.block_store import BlockLease, BlockStore
from prefixcache_transformers.cache_io import RestoredRow, Snapshot, needed_from, restore, take_snapshot
from prefixcache_transformers.probe import CacheShape, probe
from prefixcache_transformers.requests import Settings, bypass_reason

__all__ = ["CachedPrefix", "PrefixCache", "Stats", "StoreOpener"]

# Failures of a store that mean "recompute". Anything else is a defect of this package and is raised.
STORE_FAILURES = (OSError, RuntimeError)
MAX_WAITING_STORES = 4

StoreOpener = Callable[[CacheShape, int], tuple[bytes, BlockStore]]
"""(shape of the cache, weights epoch) -> (root key, store) of the namespace that fits."""


@dataclass(slots=True)
class Stats:
    """Counts since the start, in tokens where not said otherwise. `reused` + `computed` = `looked_up`."""

    requests: int = 0
    looked_up: int = 0
    reused: int = 0
    blocks_stored: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def computed(self) -> int:
        """Prompt tokens that the model had to compute."""
        return self.looked_up - self.reused


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
    """Prefix reuse for one model. Not safe for two threads at once; `flush` and `stats` are."""

    def __init__(
        self,
        model: PreTrainedModel,
        open_store: StoreOpener,
        *,
        block_tokens: int = 64,
        prompt_only: bool = False,
    ) -> None:
        """Runs one token through `model` to learn its cache's shape. Raises UnsupportedModelError.

        `prompt_only`: do not store generated tokens.
        """
        self.model = model
        self.block_tokens = block_tokens
        self.prompt_only = prompt_only
        self.shape = probe(model)
        self.stats = Stats()
        self._open_store = open_store
        self._epoch = 0
        self._root, self._store = open_store(self.shape, 0)
        self._generate_keyword = compat.generate_cache_keyword()
        self._forward_keyword = compat.forward_cache_keyword(model)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefixcache-store")
        self._waiting: list[Future[None]] = []
        self._lock = threading.Lock()

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **arguments: Any) -> Any:
        """`model.generate` with the same arguments and the same result; input_ids is [rows, columns].

        Rows must be left-padded. Calls that the cache does not understand go straight to the model, counted in
        `stats.reasons`.
        """
        if attention_mask is not None:
            arguments["attention_mask"] = attention_mask
        settings = Settings(self.model, arguments)
        mask = infer_mask(input_ids, settings.pad_id, settings.eos_ids) if attention_mask is None else attention_mask
        reason = bypass_reason(self.model, input_ids, arguments)
        found = None if reason else self.lookup(input_ids, mask)
        if found is None:
            if reason:
                self.stats.reasons[reason] += 1
            return self.model.generate(input_ids, **arguments)
        rows = settings.rows_per_prompt
        if rows > 1 and found.columns:
            found.cache.batch_repeat_interleave(rows)
        output = self.model.generate(input_ids, **arguments, **{self._generate_keyword: found.cache})
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        generated = None if self.prompt_only or settings.beams > 1 else sequences[:, input_ids.shape[1] :]
        self._store_later(found, rows, generated, settings.eos_ids)
        if not isinstance(output, torch.Tensor):
            self.flush()  # the caller holds the cache from here on and may change it
        return output

    def prefill(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **arguments: Any
    ) -> tuple[Any, CachedPrefix | None]:
        """One forward over what is not cached, for callers with their own decoding loop; stores the prompt.

        Returns the model's output (logits of the computed columns only) and the prefix, whose `cache` now holds the
        whole prompt; None where the batch is not left-padded, and then everything was computed without a cache.
        """
        found = self.lookup(input_ids, attention_mask)
        if found is None:
            return self.model(input_ids=input_ids, attention_mask=attention_mask, **arguments), None
        if attention_mask is not None:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
            arguments |= {"attention_mask": attention_mask, "position_ids": positions[:, found.columns :]}
        arguments |= {self._forward_keyword: found.cache, "use_cache": True}
        output = self.model(input_ids=input_ids[:, found.columns :], **arguments)
        self._store_later(found, 1, None, ())
        return output, found

    def lookup(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> CachedPrefix | None:
        """The longest stored prefix of a batch [rows, columns] as a filled cache; None for rows not left-padded."""
        prompts = read_prompts(input_ids, attention_mask)
        self.stats.requests += 1
        if prompts is None:
            self.stats.reasons["not_left_padded"] += 1
            return None
        chains = [KeyChain(self._root, self.block_tokens) for _ in prompts]
        for chain, prompt in zip(chains, prompts, strict=True):
            chain.append(prompt.tokens)
        cache = compat.new_cache(self.model)
        tokens = self._restore(cache, prompts, [chain.keys for chain in chains])
        self.stats.looked_up += sum(len(prompt.tokens) for prompt in prompts)
        self.stats.reused += sum(tokens)
        columns = max((prompt.pad + count for prompt, count in zip(prompts, tokens, strict=True) if count), default=0)
        return CachedPrefix(cache, columns, tokens, prompts, chains)

    def invalidate(self) -> None:
        """The weights were changed in place: what was stored before is not found any more."""
        self.flush()
        self._epoch += 1
        self._root, self._store = self._open_store(self.shape, self._epoch)

    def flush(self) -> None:
        """Wait until everything handed over so far is stored or refused."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.result()

    def close(self) -> None:
        """Store what is waiting and stop the thread."""
        self._thread.shutdown(wait=True)

    def _restore(self, cache: DynamicCache, prompts: Sequence[Prompt], keys: Sequence[bytes]) -> tuple[int, ...]:
        """Fill `cache`; returns the restored tokens of each row, all 0 after a miss."""
        leases: list[list[BlockLease]] = []
        nothing = (0,) * len(prompts)
        tokens = nothing
        try:
            for prompt, row_keys in zip(prompts, keys, strict=True):
                leases.append([self._store.acquire(row_keys, len(prompt.tokens))])
            column = common_column(prompts, [row[0].blocks * self.block_tokens for row in leases])
            wanted = tuple(max(0, column - prompt.pad) for prompt in prompts)
            if column and all(map(self._cover_windows, wanted, keys, leases)):
                rows = [
                    RestoredRow(prompt.pad, count, tuple(row))
                    for prompt, count, row in zip(prompts, wanted, leases, strict=True)
                ]
                if restore(cache, self.shape, self.block_tokens, rows, column):
                    tokens = wanted
                else:
                    self.stats.reasons["lease_lost"] += 1
        except STORE_FAILURES:
            self.stats.reasons["store_failed"] += 1
        self._release(leases, tokens)
        return tokens

    def _cover_windows(self, tokens: int, keys: bytes, leases: list[BlockLease]) -> bool:
        """Make sure that the leases of a row hold the window before `tokens`, which need not end where they end.

        A lease holds the window before its own end only. The two whole-block lengths around `tokens` cover it together.
        """
        for blocks in (None, -(-tokens // self.block_tokens), tokens // self.block_tokens):
            if blocks is not None:
                leases.append(self._store.acquire(keys[: blocks * KEY_BYTES], tokens))
                if leases[-1].blocks != blocks:
                    return False
            if self._windows_covered(tokens, leases):
                return True
        return False

    def _windows_covered(self, tokens: int, leases: Sequence[BlockLease]) -> bool:
        last = -(-tokens // self.block_tokens)
        for part, group in enumerate(self.shape.layout.groups):
            uncovered = last
            for lease in leases:
                if lease.blocks >= uncovered:
                    uncovered = min(uncovered, lease.first_block(part))
            if uncovered > needed_from(group, tokens) // self.block_tokens:
                return False
        return True

    def _release(self, leases: Sequence[Sequence[BlockLease]], tokens: Sequence[int]) -> None:
        for row, count in zip(leases, tokens, strict=False):
            for lease in row:
                try:
                    lease.release(min(lease.blocks, -(-count // self.block_tokens)))
                except STORE_FAILURES:
                    self.stats.reasons["release_failed"] += 1

    def _store_later(
        self, found: CachedPrefix, rows_per_prompt: int, generated: torch.Tensor | None, eos_ids: Sequence[int]
    ) -> None:
        snapshot = take_snapshot(found.cache, self.shape, self.block_tokens, found.columns)
        held = found.cache.get_seq_length()
        jobs = []
        for number, prompt in enumerate(found.prompts):
            for repeat in range(rows_per_prompt if generated is not None else 1):
                row = number * rows_per_prompt + repeat
                limit = held - prompt.pad
                tail = None if generated is None else _until_end(generated[row], eos_ids)
                jobs.append(_StoreJob(row, prompt, found.chains[number], tail, limit))
        with self._lock:
            self._waiting = [future for future in self._waiting if not future.done()]
            if len(self._waiting) >= MAX_WAITING_STORES:
                self.stats.reasons["store_backlog"] += 1
                return
            self._waiting.append(self._thread.submit(self._store_now, self._root, self._store, snapshot, jobs))

    def _store_now(self, root: bytes, store: BlockStore, snapshot: Snapshot, jobs: Sequence[_StoreJob]) -> None:
        for job in jobs:
            keys = job.keys(self.block_tokens)
            first = snapshot.first_block(job.prompt.pad)
            last = min(len(keys) // KEY_BYTES, job.limit // self.block_tokens)
            try:
                for parts in snapshot.parts(job.row, job.prompt.pad, range(first, last)):
                    self.stats.blocks_stored += store.store(keys[: last * KEY_BYTES], parts)
            except STORE_FAILURES:
                self.stats.reasons["store_failed"] += 1


@dataclass(frozen=True, slots=True)
class _StoreJob:
    """One row to store: its states reach `limit` tokens; `tail` are generated ids or None."""

    row: int
    prompt: Prompt
    chain: KeyChain
    tail: torch.Tensor | None
    limit: int

    def keys(self, block_tokens: int) -> bytes:
        """Keys of the prompt's and the generated tokens' whole blocks; the prompt's chain is left as it is."""
        if self.tail is None:
            return self.chain.keys
        going_on = KeyChain.import_state(self.chain.export_state())
        return self.chain.keys + going_on.append(self.tail.cpu().numpy().astype("uint32"))


def _until_end(generated: torch.Tensor, eos_ids: Sequence[int]) -> torch.Tensor:
    """Generated ids up to the first end token; what follows is padding."""
    if not eos_ids:
        return generated
    ends = torch.isin(generated, torch.tensor(eos_ids, device=generated.device)).nonzero()
    return generated[: int(ends[0]) + 1] if len(ends) else generated
