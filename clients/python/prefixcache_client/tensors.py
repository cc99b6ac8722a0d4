"""What a caller's tensors are, and how their bytes become blocks in canonical order.

Each class describes tensors and answers two questions: which blocks of a part it has, and which moves (offload's
`Job`s) lie between them and given slots. A new engine layout is a string of axes, not a class (see
prefixcache_offload.engine). Only shapes are judged here; mistakes raise ValueError before a byte moves. No leases, no
calls, no generations.

Arrays are numpy arrays or torch tensors; torch is never imported here.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from prefixcache_client.blocks import BlockFormat
from prefixcache_offload.engine import EngineTensor, Holds, Job, Move, Pieces, plan
from prefixcache_offload.memory import Memory, is_tensor
from prefixcache_offload.strides import Span, Strided
from prefixcache_offload.units import SLOT_GRANULE

Slots = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]

_WORD_SIZES: Final = (1, 2, 4, 8)


@runtime_checkable
class KvTensors(Protocol):
    """Tensors that blocks are copied to or stored from."""

    def covers(self, form: BlockFormat, part: int) -> range:
        """Positions in the prompt of the blocks of `part` that are here; empty when it has none of that part."""

    def jobs(self, form: BlockFormat, part: int, blocks: Places, slots: Slots) -> list[Job]:
        """Moves between `slots` (one per block) and these tensors. Raises ValueError where sizes do not fit."""


@runtime_checkable
class HeldTensors(Protocol):
    """Tensors whose owner must know while they are read, because it may want to use their memory for something else.

    `held` is entered after slots were granted and left before the commit, so around the copy and nothing else. It may
    raise Failure to call the store off.
    """

    def held(self) -> AbstractContextManager[None]:
        """A context in which the tensors keep their content."""


def held(tensors: KvTensors) -> AbstractContextManager[None]:
    """The context to copy in: the tensors' own where they have one."""
    return tensors.held() if isinstance(tensors, HeldTensors) else nullcontext()


@dataclass(frozen=True, slots=True)
class Blocks:
    """One array per block of one part, in canonical order when read in C order; any strides, any shape of the right
    size.

    `arrays`: a sequence of arrays, or one array whose first axis counts blocks. The first is block `first_block`.
    """

    arrays: Any
    part: int = 0
    first_block: int = 0

    def covers(self, form: BlockFormat, part: int) -> range:
        """See KvTensors."""
        if part != self.part:
            return range(0)
        return range(self.first_block, self.first_block + len(self.arrays))

    def jobs(self, form: BlockFormat, part: int, blocks: Places, slots: Slots) -> list[Job]:
        """See KvTensors."""
        want = form.parts[part].bytes
        starts = slots.astype(np.int64) * SLOT_GRANULE
        rows = blocks - self.first_block
        if hasattr(self.arrays, "shape"):
            return [_stacked(self.arrays, want, rows, starts)]
        grouped: dict[tuple[int, int], Job] = {}
        memories: dict[int, Memory] = {}
        for row, start in zip(rows.tolist(), starts.tolist(), strict=True):
            memory, place, itemsize = _place_of(self.arrays[row], memories)
            if place.elements * itemsize != want:
                raise ValueError(
                    f"block {row + self.first_block} of part {part} has {want} bytes, "
                    f"its array {place.elements * itemsize}"
                )
            job = grouped.setdefault((id(memory), itemsize), Job(memory, [], itemsize))
            job.moves.append(Move(_dense(start, place.shape, itemsize), place))
        return list(grouped.values())


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one array, in any order: block i of part 0 is row `rows[i]` of `array`, whose first axis counts rows.

    `rows`: i64[n]. For buffers of an engine's that hold blocks of many prompts, such as vLLM's CPU tier.
    """

    array: Any
    rows: npt.ArrayLike

    def covers(self, form: BlockFormat, part: int) -> range:
        """See KvTensors."""
        return range(np.asarray(self.rows).size) if part == 0 else range(0)

    def jobs(self, form: BlockFormat, part: int, blocks: Places, slots: Slots) -> list[Job]:
        """See KvTensors. Raises ValueError for rows that the array does not have."""
        rows = np.asarray(self.rows, dtype=np.int64)[blocks]
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < len(self.array):
            raise ValueError(f"rows must be from 0 to {len(self.array) - 1}")
        return [_stacked(self.array, form.parts[part].bytes, rows, slots.astype(np.int64) * SLOT_GRANULE)]


@dataclass(frozen=True, slots=True)
class Layers:
    """Tensors of each model layer that hold a token axis, such as transformers' [batch, head, token, dim].

    `layers`: one entry per model layer, in order (or a mapping by model layer): a pair (k, v), or one tensor holding
    both. `axes`: what the axes mean, see prefixcache_offload.engine; the default is one row of a transformers cache.
    `row`: which row of the first axis of a transformers tensor is meant; None when `axes` describe the whole tensor.
    `first_tokens`: the position in the prompt of token 0 of each layer's tensor (one number for all, or by model
    layer), above 0 where a sliding layer has forgotten the start. `tokens`: how many are there; None for the whole
    axis.
    """

    layers: Sequence[Any] | Mapping[int, Any]
    axes: str = "htd"
    row: int | None = 0
    first_tokens: int | Mapping[int, int] = 0
    tokens: int | None = None

    def covers(self, form: BlockFormat, part: int) -> range:
        """See KvTensors."""
        ranges = [self._covers(form, layer) for layer in form.layers_of(part) if self._has(layer)]
        if not ranges:
            return range(0)
        return range(max(r.start for r in ranges), min(r.stop for r in ranges))

    def jobs(self, form: BlockFormat, part: int, blocks: Places, slots: Slots) -> list[Job]:
        """See KvTensors."""
        jobs = []
        shape = form.shapes[part]
        for position, layer in enumerate(form.layers_of(part)):
            span = Span(0, shape.kv_heads, position, 1)
            places = blocks * form.block_tokens - self._first_token(layer)
            for tensor, holds in _components(self.layers[layer]):
                described = EngineTensor.of(self._select(tensor), self.axes, holds)
                jobs.append(plan(shape, span, described, slots, places))
        return jobs

    def _covers(self, form: BlockFormat, layer: int) -> range:
        tensor, _ = _components(self.layers[layer])[0]
        first = self._first_token(layer)
        selected = self._select(tensor)
        tokens = selected.shape[self.axes.index("t")] if self.tokens is None else self.tokens
        size = form.block_tokens
        return range(-(-first // size), (first + tokens) // size)

    def _has(self, layer: int) -> bool:
        return layer in self.layers if isinstance(self.layers, Mapping) else layer < len(self.layers)

    def _first_token(self, layer: int) -> int:
        return self.first_tokens if isinstance(self.first_tokens, int) else self.first_tokens.get(layer, 0)

    def _select(self, tensor: Any) -> Any:
        return tensor if self.row is None else tensor[self.row]


@dataclass(frozen=True, slots=True)
class Pages:
    """An engine's paged KV cache: tensors of each model layer with a page axis, and which pages hold this prompt.

    `layers` as in `Layers`; `axes` with a letter b, such as "cbthd" (vLLM) or "bthd" for separate k and v. `page_ids`:
    i64[n], page i holds the prompt's tokens from i * tokens-a-page on; a negative id is a page that is not there.
    """

    layers: Sequence[Any] | Mapping[int, Any]
    page_ids: npt.ArrayLike
    axes: str = "cbthd"

    def covers(self, form: BlockFormat, part: int) -> range:
        """See KvTensors. The longest stretch that ends at the last page and has every page."""
        ids = np.asarray(self.page_ids, dtype=np.int64)
        gaps = np.flatnonzero(ids < 0)
        first_page = int(gaps[-1]) + 1 if gaps.size else 0
        page_tokens, size = self._page_tokens(form, part), form.block_tokens
        return range(-(-first_page * page_tokens // size), ids.size * page_tokens // size)

    def jobs(self, form: BlockFormat, part: int, blocks: Places, slots: Slots) -> list[Job]:
        """See KvTensors. Raises ValueError where neither of block and page is a multiple of the other."""
        places = self._places(form, part, blocks)
        shape = form.shapes[part]
        jobs = []
        for position, layer in enumerate(form.layers_of(part)):
            span = Span(0, shape.kv_heads, position, 1)
            for tensor, holds in _components(self.layers[layer]):
                jobs.append(plan(shape, span, EngineTensor.of(tensor, self.axes, holds), slots, places))
        return jobs

    def _page_tokens(self, form: BlockFormat, part: int) -> int:
        tensor, _ = _components(self.layers[form.layers_of(part)[0]])[0]
        return int(tensor.shape[self.axes.index("t")])

    def _places(self, form: BlockFormat, part: int, blocks: Places) -> Places:
        ids = np.asarray(self.page_ids, dtype=np.int64)
        page_tokens, size = self._page_tokens(form, part), form.block_tokens
        if size % page_tokens and page_tokens % size:
            raise ValueError(f"pages of {page_tokens} tokens do not fit blocks of {size}")
        step = min(size, page_tokens)
        tokens = (blocks[:, None] * size + np.arange(0, size, step)).reshape(-1)
        places: Places = ids[tokens // page_tokens] * page_tokens + tokens % page_tokens
        return places


@dataclass(frozen=True, slots=True)
class Several:
    """Tensors of different kinds for different parts; the first that has a part is taken."""

    members: tuple[KvTensors, ...]

    def covers(self, form: BlockFormat, part: int) -> range:
        """See KvTensors."""
        return next((r for member in self.members if (r := member.covers(form, part))), range(0))

    def jobs(self, form: BlockFormat, part: int, blocks: Places, slots: Slots) -> list[Job]:
        """See KvTensors."""
        owner = next(member for member in self.members if member.covers(form, part))
        return owner.jobs(form, part, blocks, slots)


def as_tensors(tensors: Any) -> KvTensors:
    """What a caller passed, as KvTensors.

    An array (first axis: blocks) or a sequence of arrays is `Blocks` of part 0, a sequence of pairs is `Layers`, a
    sequence of KvTensors is taken together. Raises TypeError for anything else.
    """
    if isinstance(tensors, KvTensors):
        return tensors
    if _is_array(tensors):
        return Blocks(tensors)
    if isinstance(tensors, Sequence) and len(tensors):
        if all(isinstance(item, KvTensors) for item in tensors):
            return Several(tuple(tensors))
        if all(_is_array(item) for item in tensors):
            return Blocks(tensors)
        if all(isinstance(item, Sequence) and len(item) == len(("k", "v")) for item in tensors):
            return Layers(tensors)
    raise TypeError("tensors must be an array per block, a (k, v) pair per layer, or Blocks, Layers or Pages")


def _is_array(thing: object) -> bool:
    return isinstance(thing, np.ndarray) or is_tensor(thing)


def _components(entry: Any) -> list[tuple[Any, Holds]]:
    if _is_array(entry):
        return [(entry, "kv")]
    k, v = entry
    return [(k, "k")] if v is None else [(k, "k"), (v, "v")]


def _place_of(array: Any, memories: dict[int, Memory]) -> tuple[Memory, Strided, int]:
    """The memory of an array, where it lies in it, and the size of the words to copy it by."""
    if is_tensor(array):
        storage = array.untyped_storage()
        known = memories.get(storage.data_ptr())
        size = array.element_size()
        if known is None:
            known, place = Memory.of_tensor(array)
            memories[storage.data_ptr()] = known
            return known, place, size
        strides = tuple(step * size for step in array.stride())
        return known, Strided(array.storage_offset() * size, tuple(array.shape), strides), size
    if not isinstance(array, np.ndarray):
        raise TypeError(f"an array or tensor is wanted, got {type(array).__name__}")
    if array.dtype.itemsize not in _WORD_SIZES:
        raise ValueError(f"values of {array.dtype.itemsize} bytes cannot be copied")
    memory, place = Memory.of_array(array)
    return memory, place, array.dtype.itemsize


def _stacked(arrays: Any, want: int, rows: Places, starts: Places) -> Job:
    """Moves between slots and rows of one array: one for all where both lie at equal distances."""
    memory, place, itemsize = _place_of(arrays, {})
    one = Strided(place.offset, place.shape[1:], place.strides[1:])
    if one.elements * itemsize != want:
        raise ValueError(f"a block of this part has {want} bytes, a row of the array {one.elements * itemsize}")
    slot, row_stride = _dense(0, one.shape, itemsize), place.strides[0]
    steps, row_steps = np.diff(starts), np.diff(rows)
    if rows.size > 1 and steps[0] > 0 and (steps == steps[0]).all() and (row_steps == row_steps[0]).all():
        pool = slot.moved(int(starts[0])).stacked(rows.size, int(steps[0]))
        engine = one.moved(int(rows[0]) * row_stride).stacked(rows.size, int(row_steps[0]) * row_stride)
        return Job(memory, [Move(pool, engine)], itemsize)
    if row_stride > 0 and rows.size > 1 and not (row_steps == 1).all():
        # Scattered on both sides: told as two arrays, for a copy that takes the interpreter's lock once.
        pieces = Pieces(Move(slot, one), starts, rows * row_stride, [(at, 1) for at in range(rows.size)])
        return Job(memory, [pieces], itemsize)
    pairs = zip(starts.tolist(), rows.tolist(), strict=True)
    return Job(memory, [Move(slot.moved(start), one.moved(row * row_stride)) for start, row in pairs], itemsize)


def _dense(start: int, shape: Iterable[int], itemsize: int) -> Strided:
    """A C-contiguous view of a slot."""
    lengths = tuple(shape)
    strides, step = [], itemsize
    for length in reversed(lengths):
        strides.append(step)
        step *= length
    return Strided(start, lengths, tuple(reversed(strides)))
