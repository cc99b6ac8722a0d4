"""Between an engine's paged KV cache and canonical slots, both ways, a whole transfer in one call.

    cache = PagedCache(part, [PagedTensor(kv, "cbthd", first_layer=i) for i, kv in enumerate(layers)], first_head=2)
    gather(cache, pool, [Stretch(slots, pages, start, stop)])     # pages -> slots, to store
    scatter(cache, pool, [Stretch(slots, pages, start, stop)])    # slots -> pages, to load

A cache is described once, when the engine registers its tensors; then every transfer of any number of requests is one
call. How a tensor is laid out is a string of axes (see `engine`), so no engine has a branch here:

    "cbthd"   [2, pages, tokens, heads, dim]    vLLM, a tensor a layer; "cbhtd" with heads before tokens (HND)
    "bcthd"   [pages, 2, tokens, heads, dim]    pages first; "bthd" with K and V apart, holds "k" and holds "v"
    "bhtd"    [pages, heads, tokens, 2 * dim]   K and V side by side along dim
    "blcthd"  [pages, layers, 2, ...]           one tensor for all layers
    "btd"     [pages, tokens, dim]              MLA, holds "k"
    "bhdt"    [pages, heads, dim, tokens]       K transposed, holds "k"
    "bhtdtd"  [pages, heads, tokens / 16, dim / 2, 16, 2]   packed for matrix units, holds "k"

Views of a tensor (`as_strided`, slices) describe layouts that no reshape does, such as two packings in one page.
Tensors that are layers of one storage at equal distances become one tensor with an axis more, so that a block is one
strided copy instead of one a layer.

Pages and blocks may be of any sizes: a stretch is cut wherever a page or a block ends. It may start or end inside a
block (the engine has the first pages itself); a gather then fills only that part of the slot. `pool` is host memory, or
memory on the tensors' device; host memory and a device meet by way of `staging`. Generations are compared by the
caller, after the copy and after `PagedCache.wait` or an event of its own; nothing here knows requests, leases or ranks.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache_offload import transfer
from prefixcache_offload.engine import Cut, EngineTensor, Holds, Job, plan_cuts
from prefixcache_offload.memory import Memory
from prefixcache_offload.strides import PartShape, Span
from prefixcache_offload.units import SLOT_GRANULE


@dataclass(frozen=True, slots=True)
class PagedTensor:
    """One tensor of the cache, as numpy array or torch tensor. Axis b counts pages, t tokens of a page.

    `holds`: "kv" with an axis c or K and V side by side along d, else "k" or "v". `first_layer`: which layer of the
    part its first one is.
    """

    tensor: Any
    axes: str
    holds: Holds = "kv"
    first_layer: int = 0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens [start, stop) of one prompt, and where they are on both sides.

    `slots` (u32[m]): slots[i] holds block `first_block` + i of the prompt. `pages` (i64[n]): pages[j] holds the
    prompt's tokens from j * page tokens on; entries outside of [start, stop) are not looked at.
    """

    slots: npt.ArrayLike
    pages: npt.ArrayLike
    start: int
    stop: int
    first_block: int = 0


class _Member(NamedTuple):
    span: Span
    tensor: EngineTensor


class PagedCache:
    """An engine's paged tensors that hold one part of every block, or one rank's heads of it.

    `part`: the shape of the part, all heads of the model. `page_tokens`: tokens a page. `span`: the heads and layers
    that are here.
    """

    def __init__(self, part: PartShape, tensors: Iterable[PagedTensor], *, first_head: int = 0) -> None:
        """Describe the tensors; they are kept alive. `first_head`: the part's head that is head 0 of the tensors.

        Raises ValueError when a tensor is not as its axes say, when pages differ in size, or when K or V of a layer is
        missing or there twice: what a gather leaves out would be another owner's bytes.
        """
        members = []
        for each in tensors:
            tensor = EngineTensor.of(each.tensor, each.axes, each.holds)
            span = Span(first_head, tensor.length("h"), each.first_layer, tensor.length("l"))
            part.check(span)
            tensor.check(part, span)
            members.append(_Member(span, tensor))
        if not members:
            raise ValueError("a cache needs tensors")
        self.part = part
        self.page_tokens = members[0].tensor.length("t")
        if any(member.tensor.length("t") != self.page_tokens for member in members):
            raise ValueError("all tensors need pages of one size")
        self.span = _complete(part, members)
        self._members = _joined(members)

    @property
    def tensors(self) -> int:
        """How many tensors are copied from or to, after layers of one storage were joined."""
        return len(self._members)

    def jobs(self, stretches: Sequence[Stretch]) -> list[Job]:
        """What moves, for `transfer`. Raises ValueError when a slot or page is missing."""
        cuts = _cut(stretches, self.part.tokens, self.page_tokens)
        return [plan_cuts(self.part, member.span, member.tensor, cuts) for member in self._members]

    def wait(self) -> None:
        """Wait until the copies queued on the current stream of the tensors' device are over; at once on the host."""
        for member in self._members:
            member.tensor.memory.wait()


def gather(cache: PagedCache, pool: Memory, stretches: Sequence[Stretch]) -> int:
    """Copy from the cache's pages into slots; answer the bytes moved.

    Raises ValueError or IndexError before a byte moves, OSError as `transfer`.

    On a device the copies are queued on the current stream: `cache.wait()` or an event of the caller's tells when they
    are over. Slots that are to be committed must be covered wholly by the stretches of all calls.
    """
    _inside(cache.part, pool, stretches)
    return transfer.store(pool, cache.jobs(stretches))


def scatter(cache: PagedCache, pool: Memory, stretches: Sequence[Stretch]) -> int:
    """Copy from slots into the cache's pages; as `gather`. The pool may be read-only."""
    _inside(cache.part, pool, stretches)
    return transfer.load(pool, cache.jobs(stretches))


def _inside(part: PartShape, pool: Memory, stretches: Sequence[Stretch]) -> None:
    """Raise IndexError for a slot that reaches out of the pool, before anything moves."""
    for slots in (np.asarray(stretch.slots, np.uint32) for stretch in stretches):
        if slots.size and int(slots.max()) * SLOT_GRANULE + part.part_bytes > pool.size_bytes:
            raise IndexError(f"slot {slots.max()} of {part.part_bytes} bytes reaches out of {pool.size_bytes} bytes")


def _complete(part: PartShape, members: Sequence[_Member]) -> Span:
    """The heads and layers that `members` hold. Raises ValueError where a component of a layer is not there once."""
    first, heads = members[0].span.first_head, members[0].span.heads
    seen: dict[tuple[str, int], int] = {}
    for span, tensor in members:
        if span.heads != heads:
            raise ValueError("all tensors need the same heads")
        for component in tensor.components():
            for layer in range(span.first_layer, span.first_layer + span.layers):
                seen[component, layer] = seen.get((component, layer), 0) + 1
    layers = sorted({layer for _, layer in seen})
    wanted = {(c, layer) for c in ("k", "v") if part.dim(c) for layer in range(layers[0], layers[-1] + 1)}
    wrong = sorted(wanted ^ set(seen)) + sorted(key for key, count in seen.items() if count > 1)
    if wrong:
        what, which = wrong[0]
        raise ValueError(f"{what} of layer {which} is there {seen.get(wrong[0], 0)} times, wanted once")
    return Span(first, heads, layers[0], layers[-1] + 1 - layers[0])


def _joined(members: Sequence[_Member]) -> list[_Member]:
    """Single layers of one storage at equal distances as one tensor with an axis l; the others as they are."""
    alike: dict[tuple[object, ...], list[_Member]] = {}
    for member in members:
        tensor = member.tensor
        key = (tensor.memory.identity, tensor.axes, tensor.holds, tensor.place.shape, tensor.place.strides)
        alike.setdefault(key if "l" not in tensor.axes else (id(member),), []).append(member)
    return [joined for group in alike.values() for joined in _join(sorted(group, key=lambda m: m.span.first_layer))]


def _join(group: list[_Member]) -> list[_Member]:
    first = group[0]
    offsets = [member.tensor.place.offset for member in group]
    step = offsets[1] - offsets[0] if len(group) > 1 else 0
    equal = all(after - before == step for before, after in itertools.pairwise(offsets))
    layers = [member.span.first_layer for member in group]
    if step <= 0 or not equal or layers != list(range(layers[0], layers[0] + len(layers))):
        return group
    tensor = first.tensor
    place = tensor.place.stacked(len(group), step)
    wider = EngineTensor(tensor.memory, place, "l" + tensor.axes, tensor.holds, tensor.itemsize)
    return [_Member(Span(first.span.first_head, first.span.heads, layers[0], len(group)), wider)]


def _cut(stretches: Sequence[Stretch], block_tokens: int, page_tokens: int) -> list[Cut]:
    """Stretches cut where a page or a block ends, by length of the pieces, longest first."""
    columns: list[tuple[npt.NDArray[np.int64], ...]] = []
    for stretch in stretches:
        slots, pages = np.asarray(stretch.slots, np.uint32), np.asarray(stretch.pages, np.int64)
        last_block = stretch.first_block + slots.size
        if not stretch.first_block * block_tokens <= stretch.start <= stretch.stop <= last_block * block_tokens:
            text = f"blocks {stretch.first_block} to {last_block} of {block_tokens} tokens are given"
            raise ValueError(f"tokens {stretch.start} to {stretch.stop} are wanted, {text}")
        if stretch.stop > pages.size * page_tokens:
            raise ValueError(f"{pages.size} pages of {page_tokens} tokens end before token {stretch.stop}")
        bounds = _bounds(stretch.start, stretch.stop, block_tokens, page_tokens)
        firsts = bounds[:-1]
        page, token = np.divmod(firsts, page_tokens)
        block, within = np.divmod(firsts, block_tokens)
        own = slots[block - stretch.first_block].astype(np.int64)
        columns.append((np.diff(bounds), own, within, pages[page] * page_tokens + token))
    if not columns:
        return []
    lengths, slots_, within_, places = (np.concatenate(column) for column in zip(*columns, strict=True))
    chosen = [(int(length), lengths == length) for length in np.unique(lengths)[::-1]]
    return [Cut(length, slots_[here].astype(np.uint32), within_[here], places[here]) for length, here in chosen]


def _bounds(start: int, stop: int, *sizes: int) -> npt.NDArray[np.int64]:
    """`start`, every multiple of one of `sizes` behind it, and `stop`, in order; nothing but `start` when empty."""
    inner = [np.arange(-(-start // size) * size, stop, size, dtype=np.int64) for size in sizes]
    return np.unique(np.concatenate([np.array([start, stop], np.int64), *inner]))
