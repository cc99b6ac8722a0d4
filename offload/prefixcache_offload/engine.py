"""An engine's KV tensors beside the canonical order: which bytes of a tensor are which bytes of which slots.

An engine names the axes of its tensor with one letter each, so a new engine is a string, not a class:

    b page or block    t token    h KV head    l layer    d values    c component (0 = K, 1 = V)    1 of length one

Examples: Transformers one layer "1htd"; vLLM NHD "cbthd", HND "cbhtd", fused "bhtd" holding K|V along d; MLA "btd";
SGLang "thd" or its host pools "clthd". The axes' order in memory comes from the strides, not from the letters.

`plan` turns (slots, places) into pieces and says which of them go on at equal distances, so can be one copy. It only
computes; `transfer` moves.
"""

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


@dataclass(frozen=True, slots=True)
class EngineTensor:
    """One tensor: its memory, its place there, and what its axes mean. Make it with `of`."""

    memory: Memory
    place: Strided
    axes: str
    holds: Holds

    @classmethod
    def of(cls, tensor: Any, axes: str, holds: Holds) -> "EngineTensor":
        """Describe a numpy array or torch tensor. `holds` "kv" needs an axis c, or K and V side by side along d.

        Raises ValueError when the letters do not fit the tensor.
        """
        memory, place = Memory.of_tensor(tensor) if is_tensor(tensor) else Memory.of_array(tensor)
        letters = axes.replace("1", "")
        if len(axes) != len(place.shape) or len(set(letters)) != len(letters) or set(letters) - set(_AXES + "c"):
            raise ValueError(f"axes {axes!r} do not describe a tensor of shape {place.shape}")
        if "t" not in letters or "d" not in letters or ("c" in letters and holds != "kv"):
            raise ValueError(f"axes {axes!r} need t and d, and c only where the tensor holds k and v")
        if any(length != 1 for letter, length in zip(axes, place.shape, strict=True) if letter == "1"):
            raise ValueError(f"axes {axes!r} want length one where the tensor has {place.shape}")
        return cls(memory, place, axes, holds)

    def axis(self, letter: str) -> tuple[int, int]:
        """(length, byte stride) of an axis; (1, 0) where the tensor has none."""
        at = self.axes.find(letter)
        return (1, 0) if at < 0 else (self.place.shape[at], self.place.strides[at])

    def components(self) -> Sequence[Component]:
        """What it holds."""
        return ("k", "v") if self.holds == "kv" else (self.holds,)

    def component_offset(self, component: Component, part: PartShape, itemsize: int) -> int:
        """Byte offset in the memory of page 0, token 0, head 0 of K or V."""
        if self.holds != "kv" or component == "k":
            return self.place.offset
        stride = self.axis("c")[1] if "c" in self.axes else part.k_dim * self.axis("d")[1]
        return self.place.offset + stride

    def check(self, part: PartShape, span: Span) -> None:
        """Raise ValueError unless the tensor's heads, layers and values are those of `span`."""
        fused = self.holds == "kv" and "c" not in self.axes
        want_d = part.k_dim + part.v_dim if fused else part.dim(self.components()[-1])
        if "c" in self.axes and (part.k_dim != part.v_dim or self.axis("c")[0] != len(("k", "v"))):
            raise ValueError("an axis c needs length two and K and V of equal size")
        have = (self.axis("h")[0], self.axis("l")[0], self.axis("d")[0])
        if have != (span.heads, span.layers, want_d):
            raise ValueError(f"tensor has (heads, layers, values) {have}, wanted {(span.heads, span.layers, want_d)}")


def plan(part: PartShape, span: Span, tensor: EngineTensor, slots: npt.ArrayLike, places: npt.ArrayLike) -> Job:
    """What moves between `slots` (u32[n], one block each) and `tensor`, which holds `span` of every block.

    `places` (i64[n * m]) are the token positions in the tensor (page * tokens a page + token in page) where each m-th
    of a block starts: m = 1 unless the engine's pages are smaller than a block. Raises ValueError when a piece leaves
    its page, sizes do not fit, or `places` is no multiple of `slots`.
    """
    part.check(span)
    tensor.check(part, span)
    blocks = np.asarray(slots, dtype=np.uint32)
    targets = np.asarray(places, dtype=np.int64)
    if not blocks.size and not targets.size:
        return Job(tensor.memory, [], part.itemsize)
    pieces, rest = divmod(targets.size, blocks.size) if blocks.size else (0, 0)
    if rest or not pieces or part.tokens % pieces:
        raise ValueError(f"{targets.size} places for {blocks.size} blocks of {part.tokens} tokens")
    tokens = part.tokens // pieces
    geometry = (*tensor.axis("b"), *tensor.axis("t"))
    packed = (blocks.tobytes(), targets.tobytes())
    groups: list[Move | Pieces] = []
    for component in tensor.components():
        if part.dim(component):
            where = _where(packed, geometry, tokens, tokens * part.dim(component) * part.itemsize)
            groups.append(Pieces(_piece(part, span, tensor, component, tokens), *where))
    return Job(tensor.memory, groups, part.itemsize)


@lru_cache(maxsize=64)
def _where(
    packed: tuple[bytes, bytes], geometry: tuple[int, int, int, int], tokens: int, step: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], list[tuple[int, int]]]:
    """(pool offsets, engine offsets, runs) of pieces of `tokens` tokens; remembered, as all layers of a request ask.

    `packed`: slots as u32, places as i64. `geometry`: pages, their stride, tokens a page, their stride. `step`: bytes
    between the pieces of a block in the pool.
    """
    blocks, places = np.frombuffer(packed[0], np.uint32), np.frombuffer(packed[1], np.int64)
    pages, page_stride, page_tokens, token_stride = geometry
    page, token = np.divmod(places, page_tokens)
    if page.min() < 0 or page.max() >= pages or token.max() + tokens > page_tokens:
        raise ValueError(f"a piece of {tokens} tokens leaves its page ({pages} pages of {page_tokens} tokens)")
    engine_at = page * page_stride + token * token_stride
    within = np.arange(places.size // blocks.size) * step
    pool_at = (blocks.astype(np.int64)[:, None] * SLOT_GRANULE + within).reshape(-1)
    for array in (pool_at, engine_at):
        array.setflags(write=False)
    return pool_at, engine_at, _runs(pool_at, engine_at)


def _piece(part: PartShape, span: Span, tensor: EngineTensor, component: Component, tokens: int) -> Move:
    """One piece (head, layer, token, dim) at slot 0 and at the tensor's first token."""
    pool = part.view(component, span)
    shape = (*pool.shape[:2], tokens, pool.shape[3])
    strides = tuple(tensor.axis(letter)[1] for letter in "hltd")
    offset = tensor.component_offset(component, part, part.itemsize)
    return Move(Strided(pool.offset, shape, pool.strides), Strided(offset, shape, strides))


def _runs(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
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
