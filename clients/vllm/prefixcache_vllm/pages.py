"""A request's pages as the SDK's tensors: any page size beside any block size, from any page on, any heads.

Rules:
1. Tensors are described once, when vLLM registers them (`describe_layers`); a transfer is integers beside that.
2. A load writes only tokens of its span: not those the engine has itself, even inside a block. Pages that a window has
   dropped are vLLM's null block, which nobody reads, so writing there does no harm.
3. A store reads only pages that are there.

Bytes are prefixcache_offload.paged's.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixcache_client.blocks import BlockFormat
from prefixcache_offload.engine import Job
from prefixcache_offload.paged import PagedCache, PagedTensor, Stretch
from prefixcache_vllm.orders import PageRun
from prefixcache_vllm.packing import View
from prefixcache_vllm.ranks import Rank

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
class PartPages:
    """Layers of one part whose pages are found by one group's table."""

    cache: PagedCache
    group: int


PagedParts = Sequence[Sequence[PartPages]]
"""By part."""


def describe_layers(form: BlockFormat, layers: Mapping[int, LayerPages], rank: Rank) -> PagedParts:
    """The layers' tensors as parts of a block: this rank's heads and layers of it.

    Raises ValueError for tensors that do not fit the layout, KeyError for a layer that is not there.
    """
    parts = []
    for part, shape in enumerate(form.shapes):
        places = enumerate(form.layers_of(part))
        members = [(place, layers[layer]) for place, layer in places if rank.stages == 1 or layer in layers]
        found = []
        for (group, _), run in itertools.groupby(members, key=lambda member: (member[1].group, member[1].page_tokens)):
            tensors = [PagedTensor(*view, position) for position, layer in run for view in layer.views]
            first = rank.holds(shape.kv_heads).start
            found.append(PartPages(PagedCache(shape, tensors, first_head=first), group))
        parts.append(found)
    return parts


@dataclass(frozen=True, slots=True)
class PagedSpan:
    """Tokens [from_token, to_token) of one request in the engine's pages; what the SDK loads to or stores from.

    `pages`: by group. Blocks only partly in the span can be loaded (`partial`), not stored. `hold`: entered while a
    store reads the pages.
    """

    parts: PagedParts
    pages: Sequence[PageRun]
    from_token: int
    to_token: int
    partial: bool = False
    hold: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)

    def held(self) -> AbstractContextManager[None]:
        """See prefixcache_client.tensors.HeldTensors."""
        return self.hold()

    def covers(self, form: BlockFormat, part: int) -> range:
        """See prefixcache_client.tensors.KvTensors."""
        size = form.block_tokens
        if self.partial:
            return range(self.from_token // size, -(-self.to_token // size))
        # Of a part of which this rank has no layer, the others' pages are those of the only group.
        there = max(self._first_whole(each) for each in self.parts[part] or next(filter(None, self.parts)))
        first = -(-max(self.from_token, there) // size)
        return range(first, max(first, self.to_token // size))

    def jobs(self, form: BlockFormat, part: int, blocks: Places, slots: Slots) -> list[Job]:
        """See prefixcache_client.tensors.KvTensors."""
        jobs = []
        for each in self.parts[part]:
            run = self.pages[each.group]
            pages = np.zeros(run.first + len(run.ids), np.int64)
            pages[run.first :] = run.ids
            stretches = [self._stretch(form, taken, slots[at], pages) for taken, at in _runs(blocks)]
            jobs += each.cache.jobs(stretches)
        return jobs

    def _stretch(self, form: BlockFormat, blocks: range, slots: Slots, pages: Places) -> Stretch:
        size = form.block_tokens
        start, stop = max(blocks.start * size, self.from_token), min(blocks.stop * size, self.to_token)
        return Stretch(slots, pages, start, stop, blocks.start)

    def _first_whole(self, each: PartPages) -> int:
        """The first token from which on every page is there."""
        run = self.pages[each.group]
        gaps = np.flatnonzero(np.asarray(run.ids, dtype=np.int64) == NULL_PAGE)
        return (run.first + (int(gaps[-1]) + 1 if gaps.size else 0)) * each.cache.page_tokens


def layers_in(form: BlockFormat, layers: Iterable[int]) -> tuple[range, ...]:
    """By part, which of its layers these are, counted from its first. Raises ValueError where there is a gap."""
    known, found = set(layers), []
    for part in range(len(form.shapes)):
        places = [place for place, layer in enumerate(form.layers_of(part)) if layer in known]
        found.append(range(places[0], places[-1] + 1) if places else range(0))
        if len(found[-1]) != len(places):
            raise ValueError(f"layers {sorted(known)} do not follow each other in part {part}")
    return tuple(found)


def _runs(blocks: Places) -> list[tuple[range, slice]]:
    """Blocks that follow each other, and where they stand."""
    cuts = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), blocks.size]
    return [
        (range(int(blocks[first]), int(blocks[first]) + end - first), slice(first, end))
        for first, end in itertools.pairwise(cuts)
        if end > first
    ]
