"""Continuous batching (`generate_batch`, transformers 5.x): prefixes in and out of its paged cache.

Rules:
1. The engine decides: its own prefix match comes first, pages come from its allocators, and where there is no room for
   a whole prompt nothing is loaded. What is asked of it is looked at once, when a batch processor is made; a form that
   is not known is left alone, with a counted reason.
2. A request's pages are copied out when it ends and before they are given away; storing happens on the store thread.
3. A failure of the store is a miss. Nothing is allocated before all bytes are here.

Transformers has no place for this, so two methods of the engine's own objects are stood in for while `batching` is
entered. What belongs here: tokens to pages and back. It must not know how namespaces are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel

from prefixcache.identity.keychain import KeyChain
from prefixcache_transformers.batch import Prompt
from prefixcache_transformers.block_store import STORE_FAILURES, BlockStore, PartBlocks
from prefixcache_transformers.cache_io import Snapshot
from prefixcache_transformers.probe import CacheShape
from prefixcache_transformers.storing import Stats, StoreJob, StoreThread

__all__ = ["UNKNOWN_FORM", "Batching", "batching"]

UNKNOWN_FORM: Final = "continuous_batching_unknown"
MAX_WAITING: Final = 64
"""Requests whose pages wait to be stored; a batch may end many at once."""
_ASKED_KEPT: Final = 4096
_FINISHED: Final = "FINISHED"


class Batching:
    """One model's continuous batching over one store."""

    def __init__(
        self,
        shape: CacheShape,
        block_tokens: int,
        namespace: Callable[[], tuple[bytes, BlockStore]],
        stats: Stats,
        thread: StoreThread,
        *,
        prompt_only: bool = False,
    ) -> None:
        """`namespace`: the root key and the store of the moment."""
        self._shape = shape
        self._size = block_tokens
        self._namespace = namespace
        self._stats = stats
        self._thread = thread
        self._prompt_only = prompt_only
        self._attached: list[tuple[Any, str]] = []
        self._seen: list[Any] = []

    def attach(self, processor: Any) -> None:
        """Stand in for two methods of a batch processor, once; count why where it cannot be."""
        if any(each is processor for each in self._seen):
            return  # a manager that warms up asks twice for the same one
        self._seen.append(processor)
        reason = _left_alone(processor, self._shape)
        if reason:
            self.leave_alone(reason)
            return
        requests = _Requests(self, processor.cache, processor.scheduler)
        self.stand_in(processor.cache, "search_prefix_match", requests.match)
        self.stand_in(processor.scheduler, "finish_request", requests.finish)

    def leave_alone(self, reason: str) -> None:
        """An engine's requests go without the cache; count why."""
        self._stats.reasons[reason] += 1

    def stand_in(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Put a method before that of the object's class, until `detach`."""
        setattr(owner, name, method)
        self._attached.append((owner, name))

    def detach(self) -> None:
        """Leave every object as it was."""
        for owner, name in self._attached:
            delattr(owner, name)
        self._attached.clear()
        self._seen.clear()


class _Requests:
    """The requests of one batch processor; all calls come from its thread."""

    def __init__(self, batching: Batching, cache: Any, scheduler: Any) -> None:
        self._to = batching
        self._cache = cache
        self._scheduler = scheduler
        self._own_match = cache.search_prefix_match
        self._own_finish = scheduler.finish_request
        self._asked: dict[str, int] = {}  # blocks that came from the store, by request

    def match(self, request_id: str, prompt_ids: list[int]) -> int:
        """How many tokens of a waiting request's prompt are in its pages now; at least one is left to compute."""
        own = int(self._own_match(request_id, prompt_ids))
        # A request that found nothing and has to wait is looked at again in every step.
        if request_id in self._asked or not self._room(request_id, own, len(prompt_ids)):
            return own
        while len(self._asked) >= _ASKED_KEPT:
            self._asked.pop(next(iter(self._asked)))
        self._asked[request_id] = 0
        stats = self._to._stats
        stats.requests += 1
        stats.looked_up += len(prompt_ids) - own
        try:
            tokens = self._load(request_id, prompt_ids, own)
        except STORE_FAILURES:
            stats.reasons["store_failed"] += 1
            return own
        stats.reused += tokens - own
        return tokens

    def finish(self, request_id: str) -> None:
        """A request is over, well or badly: what it computed is copied out, then its pages are the engine's again."""
        state = self._scheduler.active_requests.get(request_id)
        # One that had to make room for others ends as well, to begin anew; its pages are gone.
        there = all(request_id in each.block_table for each in self._cache.cache_allocators.values())
        if state is not None and there and state.status.name == _FINISHED:
            self._save(state)
        self._asked.pop(request_id, None)
        self._own_finish(request_id)

    def _room(self, request_id: str, own: int, tokens: int) -> bool:
        needed = sum(
            each.needs_new_sectors(request_id, own, tokens - own) for each in self._cache.cache_allocators.values()
        )
        return bool(self._cache.pool.num_free_sectors >= needed)

    def _load(self, request_id: str, prompt_ids: Sequence[int], own: int) -> int:
        root, store = self._to._namespace()
        size = self._to._size
        chain = KeyChain(root, size)
        chain.append(np.asarray(prompt_ids, np.uint32))
        lease = store.acquire(chain.keys, len(prompt_ids))
        used = 0
        try:
            tokens = min(lease.blocks * size, len(prompt_ids) - 1)
            if tokens <= own:
                return own
            blocks = range(own // size, -(-tokens // size))
            parts = [self._staging(number, blocks) for number in range(len(self._to._shape.layout.groups))]
            if not lease.copy_to(parts):
                self._to._stats.reasons["lease_lost"] += 1
                return own
            self._place(request_id, parts, own, tokens)
            # The engine shares its full pages among requests by their tokens; these are as good as computed.
            for allocator in self._cache.cache_allocators.values():
                pages = tokens // allocator.tokens_per_page - own // allocator.tokens_per_page
                allocator.mark_complete_blocks(request_id, list(prompt_ids[:tokens]), pages)
            used = self._asked[request_id] = tokens // size
            return tokens
        finally:
            lease.release(used)

    def _staging(self, part: int, blocks: range) -> PartBlocks:
        group = self._to._shape.layout.groups[part]
        shape = (len(blocks), group.kv_heads, len(group.layers), 2, self._to._size, group.k_dim)
        return PartBlocks(part, blocks.start, torch.empty(shape, dtype=self._to._shape.dtype))

    def _place(self, request_id: str, parts: Sequence[PartBlocks], start: int, stop: int) -> None:
        """Give the request pages for tokens [start, stop) and fill them."""
        for allocator in self._cache.cache_allocators.values():
            for _ in range(allocator.needs_new_sectors(request_id, start, stop - start)):
                self._cache.pool.allocate_sector(allocator.index)
            allocator.allocate_cache_to_request(request_id, start, stop - start)
            rows = torch.tensor(allocator.get_write_indices(request_id, start, stop - start), device=self._device)
            for part in parts:
                first = part.first_block * self._to._size
                for position, layer in enumerate(self._to._shape.layout.groups[part.part].layers):
                    if layer not in allocator._kv_token_views:
                        continue
                    for half, view in enumerate(allocator._kv_token_views[layer]):
                        # [block, head, token, dim] to [token, head, dim]
                        states = part.tensor[:, :, position, half].transpose(1, 2).flatten(0, 1)
                        view.index_copy_(0, rows, states[start - first : stop - first].to(self._device))

    def _save(self, state: Any) -> None:
        """Copy the whole blocks of a finished request out of its pages, and have them stored."""
        batching, size = self._to, self._to._size
        tokens = np.asarray(state.initial_tokens + state.generated_tokens, np.uint32)
        end = min(int(state.position_offset), len(tokens))
        if batching._prompt_only:
            end = min(end, int(state._true_initial_tokens) or len(state.initial_tokens))
        end -= end % size
        first = self._asked.get(state.request_id, 0) * size
        if end <= first:
            return
        root, store = batching._namespace()
        chain = KeyChain(root, size)
        chain.append(tokens[:end])
        groups = batching._shape.layout.groups
        pieces = [[self._states(state.request_id, layer, first, end) for layer in group.layers] for group in groups]
        snapshot = Snapshot(batching._shape, size, pieces, [first] * len(groups))
        job = StoreJob(0, Prompt(0, tokens[:end]), chain, None, end)
        batching._thread.add(store, snapshot, [job], max_waiting=MAX_WAITING)

    def _states(
        self, request_id: str, layer: int, start: int, stop: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(keys, values) of tokens [start, stop), [1, kv_head, token, dim] each, in memory of their own."""
        allocator = self._cache.layer_to_allocator[layer]
        rows = torch.tensor(allocator.get_read_indices(request_id, 0, stop)[start:], device=self._device)
        keys, values = (
            view.index_select(0, rows).transpose(0, 1).unsqueeze(0) for view in allocator._kv_token_views[layer]
        )  # fmt: skip
        return [keys], [values]

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._cache.cache_tensor.device
        return device


def _left_alone(processor: Any, shape: CacheShape) -> str:
    """Why a batch processor's requests go without the cache; "" where they need not."""
    if any(group.window_tokens for group in shape.layout.groups):
        return "continuous_batching_windows"  # its pages of windows are rings that hold no prefix
    if getattr(processor, "use_async_batching", True):
        return "async_batching"  # the next step is under way when a request ends
    if getattr(processor.cache, "use_prefix_sharing", None) is False:
        return "block_sharing_off"
    try:
        allocators = processor.cache.cache_allocators.values()
        views = {layer: view for each in allocators for layer, view in each._kv_token_views.items()}
    except AttributeError:
        return UNKNOWN_FORM
    for group in shape.layout.groups:
        for layer in group.layers:
            if group.k_dim != group.v_dim or not _fits(views.get(layer), (group.kv_heads, group.k_dim), shape.dtype):
                return UNKNOWN_FORM  # among others ranks of tensor parallelism, which hold some of the heads
    return ""


def _fits(views: Any, form: tuple[int, int], dtype: torch.dtype) -> bool:
    return views is not None and all(tuple(view.shape[1:]) == form and view.dtype is dtype for view in views)


@contextmanager
def batching(model: PreTrainedModel, over: Batching) -> Iterator[None]:
    """While this is entered, every batch processor that this model's managers make is attached to."""
    original = model.init_continuous_batching

    def initialised(*arguments: Any, **more: Any) -> Any:
        manager = original(*arguments, **more)
        create = getattr(manager, "_create_batch_processor", None)
        if create is None:
            over.leave_alone(UNKNOWN_FORM)
            return manager

        def created() -> Any:
            processor = create()
            over.attach(processor)
            return processor

        if "_create_batch_processor" not in vars(manager):
            over.stand_in(manager, "_create_batch_processor", created)
        return manager

    over.stand_in(model, "init_continuous_batching", initialised)
    try:
        yield
    finally:
        over.detach()
