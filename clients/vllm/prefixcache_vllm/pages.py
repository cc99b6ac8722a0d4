"""A request's pages as the SDK's tensors: any page size beside any block size, from any page on, any heads.

Rules:
1. Pieces are as long as the greatest common divisor of page and block, so each lies in one page and in one block.
2. What must not be written (tokens the engine has itself, pages a window has dropped) goes to page 0, which every vLLM
   keeps as its null block: nobody reads it.
3. Integers here, bytes in prefixcache_offload.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixcache_client.blocks import BlockFormat
from prefixcache_offload.engine import EngineTensor, Job, plan
from prefixcache_offload.strides import Span
from prefixcache_vllm.orders import PageRun
from prefixcache_vllm.packing import View

NULL_PAGE = 0

Places = npt.NDArray[np.int64]
Slots = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One model layer's KV cache on this rank. `group`: the KV cache group whose table its pages are found by."""

    views: Sequence[View]
    group: int
    page_tokens: int


@dataclass(frozen=True, slots=True)
class PagedSpan:
    """Tokens [from_token, to_token) of one request in the engine's pages; what the SDK loads to or stores from.

    `pages`: by group. `first_head`: this rank's first KV head in the block. Blocks only partly in the span can be
    loaded (`partial`), not stored. `hold`: entered while a store reads the pages.
    """

    layers: Mapping[int, LayerPages]
    pages: Sequence[PageRun]
    from_token: int
    to_token: int
    first_head: int = 0
    partial: bool = False
    hold: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)

    def held(self) -> AbstractContextManager[None]:
        """See prefixcache_client.tensors.HeldTensors."""
        return self.hold()

    def covers(self, form: BlockFormat, part: int) -> range:
        """See prefixcache_client.tensors.KvTensors."""
        size = form.block_tokens
        first = self.from_token // size if self.partial else -(-self.from_token // size)
        blocks = range(first, max(first, self.to_token // size))
        if self.partial:
            return blocks
        groups = {self.layers[layer].group: self.layers[layer].page_tokens for layer in form.layers_of(part)}
        start = max(self._first_whole(group, tokens) for group, tokens in groups.items())
        return range(max(blocks.start, -(-start // size)), max(blocks.stop, -(-start // size)))

    def jobs(self, form: BlockFormat, part: int, blocks: Places, slots: Slots) -> list[Job]:
        """See prefixcache_client.tensors.KvTensors."""
        shape = form.shapes[part]
        places: dict[int, Places] = {}
        jobs = []
        for position, layer in enumerate(form.layers_of(part)):
            own = self.layers[layer]
            if own.group not in places:
                places[own.group] = self._places(own, blocks, form.block_tokens)
            for tensor, axes, holds in own.views:
                described = EngineTensor.of(tensor, axes, holds)
                span = Span(self.first_head, described.axis("h")[0], position, 1)
                jobs.append(plan(shape, span, described, slots, places[own.group]))
        return jobs

    def _places(self, own: LayerPages, blocks: Places, block_tokens: int) -> Places:
        step = math.gcd(block_tokens, own.page_tokens)
        tokens = (blocks[:, None] * block_tokens + np.arange(0, block_tokens, step)).reshape(-1)
        run = self.pages[own.group]
        ids = np.asarray(run.ids, dtype=np.int64)
        page = tokens // own.page_tokens - run.first
        there = (page >= 0) & (page < ids.size) & (tokens >= self.from_token)
        found = np.where(there, ids[np.where(there, page, 0)] if ids.size else 0, NULL_PAGE)
        places: Places = found * own.page_tokens + tokens % own.page_tokens
        return places

    def _first_whole(self, group: int, page_tokens: int) -> int:
        """The first token from which on every page of the group is there."""
        run = self.pages[group]
        ids = np.asarray(run.ids, dtype=np.int64)
        gaps = np.flatnonzero(ids == NULL_PAGE)
        first = run.first + (int(gaps[-1]) + 1 if gaps.size else 0)
        return first * page_tokens
