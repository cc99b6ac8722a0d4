"""An engine's KV tensors beside the canonical order: which bytes of a tensor are which bytes of which slots.

An engine names the axes of its tensor with one letter each, so a new engine is a string, not a class:

    b page or block    t token    h KV head    l layer    d values    c component (0 = K, 1 = V)    1 of length one

Examples: Transformers one layer "1htd"; vLLM NHD "cbthd", HND "cbhtd", fused "bhtd" holding K|V along d; MLA "btd";
SGLang "thd" or its host pools "clthd". The axes' order in memory comes from the strides, not from the letters. A letter
of h, l, t or d may stand more than once, from the outer part of its index to the inner one: tokens in groups of 16 and
values in pairs, as packed for matrix units, are "bhtdtd".

`plan` turns places in both into pieces and says which of them go on at equal distances, so can be one copy. It only
computes; `transfer` moves.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache_offload.memory import Memory, is_tensor
from prefixcache_offload.strides import Component, PartShape, Span, Strided
from prefixcache_offload.units import SLOT_GRANULE

_AXES = "bhltd"
_ONCE = "bc"
_INNER_MOST = 2
Holds = Literal["k", "v", "kv"]


_HERE: npt.NDArray[np.int64] = np.zeros(1, np.int64)


class Move(NamedTuple):
    """Equal shapes on both sides; which one is the target is the copier's choice."""

    pool: Strided
    engine: Strided

    @property
    def total_elements(self) -> int:
        """Values to move."""
        return self.pool.elements

    def moves(self) -> Iterator["Move"]:
        """Itself."""
        yield self

    def spread(self) -> tuple["Move", npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """As `Pieces.spread`."""
        return self, _HERE, _HERE


class Pieces(NamedTuple):
    """One shape at many places: `piece` moved by `pool_at[i]` and `engine_at[i]` bytes (i64[n]) is the i-th.

    `runs` are (first, count) of those at equal, forward distances on both sides; each run can be copied as one.
    """

    piece: Move
    pool_at: npt.NDArray[np.int64]
    engine_at: npt.NDArray[np.int64]
    runs: list[tuple[int, int]]

    @property
    def total_elements(self) -> int:
        """Values to move."""
        return self.piece.pool.elements * self.pool_at.size

    def spread(self) -> tuple[Move, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(piece, pool offsets, engine offsets): where the piece is to be moved to, i64[n] each."""
        return self.piece, self.pool_at, self.engine_at

    def moves(self) -> Iterator[Move]:
        """The pieces as few large moves, a run with a new first axis."""
        for first, count in self.runs:
            pool_first, engine_first = int(self.pool_at[first]), int(self.engine_at[first])
            pool, engine = self.piece.pool.moved(pool_first), self.piece.engine.moved(engine_first)
            if count > 1:
                pool = pool.stacked(count, int(self.pool_at[first + 1]) - pool_first)
                engine = engine.stacked(count, int(self.engine_at[first + 1]) - engine_first)
            yield Move(pool, engine)


class Job(NamedTuple):
    """All that moves between the pool and one tensor of an engine, in values of `itemsize` bytes."""

    memory: Memory
    moves: list[Move | Pieces]
    itemsize: int

    @property
    def total_bytes(self) -> int:
        """Bytes to move."""
        return sum(each.total_elements for each in self.moves) * self.itemsize


class Cut(NamedTuple):
    """Pieces of equal length: `tokens` tokens each, from token `within[i]` of the block in slot `slots[i]` on.

    `places[i]` is the token position in the tensor where the i-th starts (page * tokens a page + token in page). Arrays
    u32[n], i64[n], i64[n].
    """

    tokens: int
    slots: npt.NDArray[np.uint32]
    within: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


Step = tuple[int, int]
"""(length, byte stride) of an axis, or of one part of an axis that is split."""


@dataclass(frozen=True, slots=True)
class EngineTensor:
    """One tensor: its memory, its place there, and what its axes mean. Make it with `of`."""

    memory: Memory
    place: Strided
    axes: str
    holds: Holds
    itemsize: int

    @classmethod
    def of(cls, tensor: Any, axes: str, holds: Holds) -> "EngineTensor":
        """Describe a numpy array or torch tensor. `holds` "kv" needs an axis c, or K and V side by side along d.

        Raises ValueError when the letters do not fit the tensor.
        """
        if is_tensor(tensor):
            (memory, place), itemsize = Memory.of_tensor(tensor), tensor.element_size()
        else:
            (memory, place), itemsize = Memory.of_array(tensor), tensor.dtype.itemsize
        letters = axes.replace("1", "")
        if len(axes) != len(place.shape) or any(axes.count(once) > 1 for once in _ONCE) or set(letters) - {*_AXES, "c"}:
            raise ValueError(f"axes {axes!r} do not describe a tensor of shape {place.shape}")
        if "t" not in letters or "d" not in letters or ("c" in letters and holds != "kv"):
            raise ValueError(f"axes {axes!r} need t and d, and c only where the tensor holds k and v")
        if any(length != 1 for letter, length in zip(axes, place.shape, strict=True) if letter == "1"):
            raise ValueError(f"axes {axes!r} want length one where the tensor has {place.shape}")
        return cls(memory, place, axes, holds, itemsize)

    def steps(self, letter: str) -> tuple[Step, ...]:
        """(length, byte stride) of each part of an axis, the outer one first; one of length one where it has none."""
        every = zip(self.axes, self.place.shape, self.place.strides, strict=True)
        return tuple((length, stride) for axis, length, stride in every if axis == letter) or ((1, 0),)

    def length(self, letter: str) -> int:
        """How long an axis is."""
        return math.prod(length for length, _ in self.steps(letter))

    def components(self) -> Sequence[Component]:
        """What it holds."""
        return ("k", "v") if self.holds == "kv" else (self.holds,)

    def component_offset(self, component: Component, part: PartShape) -> int:
        """Byte offset in the memory of page 0, token 0, head 0 of K or V."""
        if self.holds != "kv" or component == "k":
            return self.place.offset
        stride = self.steps("c")[0][1] if "c" in self.axes else part.k_dim * self.steps("d")[0][1]
        return self.place.offset + stride

    def check(self, part: PartShape, span: Span) -> None:
        """Raise ValueError unless the tensor's heads, layers and values are those of `span`."""
        fused = self.holds == "kv" and "c" not in self.axes
        want_d = part.k_dim + part.v_dim if fused else part.dim(self.components()[-1])
        if "c" in self.axes and (part.k_dim != part.v_dim or self.length("c") != len(("k", "v"))):
            raise ValueError("an axis c needs length two and K and V of equal size")
        if fused and len(self.steps("d")) > 1:
            raise ValueError("axes where K and V lie side by side along d cannot have d split")
        if self.itemsize != part.itemsize:
            raise ValueError(f"tensor has values of {self.itemsize} bytes, wanted {part.itemsize}")
        have = (self.length("h"), self.length("l"), self.length("d"))
        if have != (span.heads, span.layers, want_d):
            raise ValueError(f"tensor has (heads, layers, values) {have}, wanted {(span.heads, span.layers, want_d)}")


def plan(part: PartShape, span: Span, tensor: EngineTensor, slots: npt.ArrayLike, places: npt.ArrayLike) -> Job:
    """What moves between `slots` (u32[n], one block each) and `tensor`, which holds `span` of every block.

    `places` (i64[n * m]) are the token positions in the tensor (page * tokens a page + token in page) where each m-th
    of a block starts: m = 1 unless the engine's pages are smaller than a block. Raises ValueError when a piece leaves
    its page, sizes do not fit, or `places` is no multiple of `slots`.
    """
    blocks = np.asarray(slots, dtype=np.uint32)
    targets = np.asarray(places, dtype=np.int64)
    if not blocks.size and not targets.size:
        return plan_cuts(part, span, tensor, [])
    pieces, rest = divmod(targets.size, blocks.size) if blocks.size else (0, 0)
    if rest or not pieces or part.tokens % pieces:
        raise ValueError(f"{targets.size} places for {blocks.size} blocks of {part.tokens} tokens")
    tokens = part.tokens // pieces
    within = np.tile(np.arange(pieces, dtype=np.int64) * tokens, blocks.size)
    return plan_cuts(part, span, tensor, [Cut(tokens, np.repeat(blocks, pieces), within, targets)])


def plan_cuts(part: PartShape, span: Span, tensor: EngineTensor, cuts: Sequence[Cut]) -> Job:
    """As `plan`, for pieces of any length anywhere in their blocks; those of one `Cut` are equally long.

    Raises ValueError when a piece leaves its block or its page.
    """
    part.check(span)
    tensor.check(part, span)
    geometry = (*tensor.steps("b")[0], tensor.steps("t"))
    groups: list[Move | Pieces] = []
    for cut in cuts:
        if cut.within.size and (cut.within.min() < 0 or cut.within.max() + cut.tokens > part.tokens):
            raise ValueError(f"a piece of {cut.tokens} tokens leaves its block of {part.tokens}")
        packed = (cut.slots.tobytes(), cut.within.tobytes(), cut.places.tobytes())
        for component in tensor.components():
            if part.dim(component):
                step = part.dim(component) * part.itemsize
                where = _where(packed, geometry, cut.tokens, step)
                groups.append(Pieces(_piece(part, span, tensor, component, where.steps), *where[1:]))
    return Job(tensor.memory, groups, part.itemsize)


class _Where(NamedTuple):
    steps: tuple[Step, ...]
    pool_at: npt.NDArray[np.int64]
    engine_at: npt.NDArray[np.int64]
    runs: list[tuple[int, int]]


@lru_cache(maxsize=64)
def _where(
    packed: tuple[bytes, bytes, bytes], geometry: tuple[int, int, tuple[Step, ...]], tokens: int, step: int
) -> _Where:
    """Where pieces of `tokens` tokens lie on both sides; remembered, as all layers of a request ask.

    `packed`: slots as u32, tokens within them and places as i64. `geometry`: pages, their stride, the steps of a page's
    tokens. `step`: bytes of a token of one head in the pool.
    """
    blocks = np.frombuffer(packed[0], np.uint32).astype(np.int64)
    within, places = (np.frombuffer(each, np.int64) for each in packed[1:])
    pages, page_stride, token_steps = geometry
    page_tokens = math.prod(length for length, _ in token_steps)
    page, token = np.divmod(places, page_tokens)
    if places.size and (page.min() < 0 or page.max() >= pages or token.max() + tokens > page_tokens):
        raise ValueError(f"a piece of {tokens} tokens leaves its page ({pages} pages of {page_tokens} tokens)")
    steps, token_at = _tokens(token_steps, token, tokens)
    engine_at = page * page_stride + token_at
    pool_at = blocks * SLOT_GRANULE + within * step
    for array in (pool_at, engine_at):
        array.setflags(write=False)
    return _Where(steps, pool_at, engine_at, equal_steps(pool_at, engine_at))


def _tokens(
    steps: tuple[Step, ...], token: npt.NDArray[np.int64], tokens: int
) -> tuple[tuple[Step, ...], npt.NDArray[np.int64]]:
    """(steps of a piece of `tokens` tokens, byte offsets in the page of those that begin at `token`, i64[n])."""
    if len(steps) == 1:
        return ((tokens, steps[0][1]),), token * steps[0][1]
    if len(steps) > _INNER_MOST:
        raise ValueError("axes may have t split in two at most")
    (_, outer), (inner_length, inner) = steps
    group, rest = np.divmod(token, inner_length)
    offsets = group * outer + rest * inner
    if tokens % inner_length == 0 and not rest.any():
        return ((tokens // inner_length, outer), (inner_length, inner)), offsets
    if rest.size and rest.max() + tokens > inner_length:
        raise ValueError(f"a piece of {tokens} tokens is not made of whole groups of {inner_length}, nor in one")
    return ((1, outer), (tokens, inner)), offsets


def _piece(
    part: PartShape, span: Span, tensor: EngineTensor, component: Component, token_steps: tuple[Step, ...]
) -> Move:
    """One piece (head, layer, token, dim, each split as in the tensor) at slot 0 and at the tensor's first token."""
    pool = part.view(component, span)
    fused = tensor.holds == "kv" and "c" not in tensor.axes
    d_steps = ((pool.shape[3], tensor.steps("d")[0][1]),) if fused else tensor.steps("d")
    shape: list[int] = []
    ours: list[int] = []
    theirs: list[int] = []
    for stride, steps in zip(pool.strides, (tensor.steps("h"), tensor.steps("l"), token_steps, d_steps), strict=True):
        lengths = [length for length, _ in steps]
        shape += lengths
        ours += [stride * math.prod(lengths[i + 1 :]) for i in range(len(lengths))]
        theirs += [step for _, step in steps]
    offset = tensor.component_offset(component, part)
    return Move(Strided(pool.offset, tuple(shape), tuple(ours)), Strided(offset, tuple(shape), tuple(theirs)))


def equal_steps(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """(first, count) of the longest stretches in which both sides go on by equal, forward steps."""
    left_steps, right_steps = np.diff(left), np.diff(right)
    steps = list(zip(left_steps.tolist(), right_steps.tolist(), strict=True))
    runs: list[tuple[int, int]] = []
    first = 0
    while first < left.size:
        end = first + 1
        if first < len(steps) and min(steps[first]) > 0:
            while end < left.size and steps[end - 1] == steps[first]:
                end += 1
        runs.append((first, end - first))
        first = end
    return runs
