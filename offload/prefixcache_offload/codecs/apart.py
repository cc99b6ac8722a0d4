"""Finds K and V among the moves between raw blocks and an engine's tensors, so that each can be decoded to its place.

The moves come from `engine.plan`, or are whole blocks of an array in canonical order, in which K and V are looked for
among the axes. What cannot be told apart is None. Only strides are computed here; no memory is touched.
"""

from typing import NamedTuple

from prefixcache_offload.engine import Move, Pieces
from prefixcache_offload.strides import Component, PartShape, Strided
from prefixcache_offload.units import SLOT_GRANULE

Axes = list[tuple[int, int]]
"""(length, stride) each."""


class Place(NamedTuple):
    """K or V of `count` blocks from `first_block` on. engine: [block, head, layer, token, dim]."""

    component: Component
    first_block: int
    head: int
    layer: int
    first_token: int
    engine: Strided


def raw_stride(shape: PartShape) -> int:
    """Bytes from one raw block to the next in the imagined memory: whole granules, so that they have slot numbers."""
    return -(-shape.part_bytes // SLOT_GRANULE) * SLOT_GRANULE


def told_apart(shape: PartShape, itemsize: int, some: Move | Pieces) -> list[Place] | None:
    """K and V of a move, each on its own; None where that cannot be said."""
    if isinstance(some, Pieces):
        return [place for move in some.moves() for place in _of_piece(shape, move)]
    return _of_blocks(shape, itemsize, some)


def _of_piece(shape: PartShape, move: Move) -> list[Place]:
    """A move that `engine.plan` made: axes [run,] head, layer, token, dim; a run is of blocks or of one's tokens."""
    stride = raw_stride(shape)
    pool, engine = move.pool, move.engine
    if len(pool.shape) == 5 and pool.strides[0] != stride:
        singles = [
            Move(Strided(pool.offset + i * pool.strides[0], pool.shape[1:], pool.strides[1:]),
                 Strided(engine.offset + i * engine.strides[0], engine.shape[1:], engine.strides[1:]))
            for i in range(pool.shape[0])
        ]  # fmt: skip
        return [place for single in singles for place in _of_piece(shape, single)]
    if len(pool.shape) == 4:
        pool, engine = pool.stacked(1, stride), engine.stacked(1, 0)
    block, within = divmod(pool.offset, stride)
    head, within = divmod(within, shape.head_bytes)
    layer, within = divmod(within, shape.layer_bytes)
    k_bytes = shape.tokens * shape.k_dim * shape.itemsize
    component: Component = "k" if within < k_bytes else "v"
    token = (within - k_bytes * (component == "v")) // (shape.dim(component) * shape.itemsize)
    return [Place(component, block, head, layer, token, engine)]


def _of_blocks(shape: PartShape, itemsize: int, move: Move) -> list[Place] | None:
    """A move of whole blocks, dense on the pool's side: K and V are looked for among the axes of the engine's array."""
    block, rest = divmod(move.pool.offset, raw_stride(shape))
    values = _as_values(move.engine, itemsize, shape.itemsize)
    if rest or values is None:
        return None
    blocks = _block_axis(shape, move.pool, values)
    split = _by_heads_and_layers(shape, blocks) if blocks is not None else None
    if split is None:
        return None
    k, v = split
    places = [Place("k", block, 0, 0, 0, k)]
    return [*places, Place("v", block, 0, 0, 0, v)] if v is not None else places


def _block_axis(shape: PartShape, pool: Strided, engine: Strided) -> Strided | None:
    """The engine's array with an axis of blocks in front: the first of it, or a new one of length one."""
    values = shape.part_bytes // shape.itemsize
    if engine.shape and pool.strides[0] == raw_stride(shape) and engine.shape[0] * values == engine.elements:
        return engine
    return engine.stacked(1, 0) if engine.elements == values else None


def _as_values(view: Strided, have: int, want: int) -> Strided | None:
    """The same bytes as numbers of `want` bytes, where they lie together along the last axis."""
    if have == want:
        return view
    count = want // have
    ends = count and view.shape and view.shape[-1] % count == 0 and view.strides[-1] == have
    if not ends or any(step % want for step in view.strides[:-1]) or view.offset % want:
        return None
    return Strided(view.offset, (*view.shape[:-1], view.shape[-1] // count), (*view.strides[:-1], want))


def _by_heads_and_layers(shape: PartShape, view: Strided) -> tuple[Strided, Strided | None] | None:
    """(K, V) with axes block, head, layer, token, dim out of [block, ...] in canonical order; None for odd shapes."""
    axes: Axes = list(zip(view.shape[1:], view.strides[1:], strict=True))
    heads, layers = _take(axes, shape.kv_heads), _take(axes, shape.layers)
    if heads is None or layers is None:
        return None
    front = [(view.shape[0], view.strides[0]), heads, layers]
    k, v = _halves(shape, axes)
    if k is None or (v is None and shape.v_dim):
        return None
    return _joined(view.offset, front, k[1]), None if v is None else _joined(view.offset + v[0], front, v[1])


_Half = tuple[int, Axes]
"""(offset, axes token and dim)"""


def _halves(shape: PartShape, axes: Axes) -> tuple[_Half | None, _Half | None]:
    """K and V of one head and layer, whose bytes lie along these axes; None for what cannot be seen."""
    if not shape.v_dim:
        return _half(0, axes, shape.tokens, shape.k_dim), None
    if len(axes) == 1:  # K and V along one axis
        step = axes[0][1]
        k_values, v_values = shape.tokens * shape.k_dim, shape.tokens * shape.v_dim
        k = _half(0, [(k_values, step)], shape.tokens, shape.k_dim)
        return k, _half(k_values * step, [(v_values, step)], shape.tokens, shape.v_dim)
    if axes and axes[0][0] == len(("k", "v")) and shape.k_dim == shape.v_dim:
        rest = axes[1:]
        return _half(0, rest, shape.tokens, shape.k_dim), _half(axes[0][1], rest, shape.tokens, shape.v_dim)
    return None, None


def _half(offset: int, axes: Axes, tokens: int, dim: int) -> _Half | None:
    found = _token_and_dim(axes, tokens, dim)
    return None if found is None else (offset, found)


def _take(axes: Axes, length: int) -> tuple[int, int] | None:
    """Split `length` off the front of the axes; (length, stride), or None where they do not allow it."""
    if not axes:
        return None
    while len(axes) > 1 and axes[0][0] == 1 and length != 1:
        axes.pop(0)
    size, step = axes[0]
    if length == 1:
        return (1, 0) if size != 1 else axes.pop(0)
    if size % length:
        return None
    if size == length:
        axes.pop(0)
        return (length, step) if axes else None
    axes[0] = (size // length, step)
    return length, step * (size // length)


def _token_and_dim(axes: Axes, tokens: int, dim: int) -> Axes | None:
    axes = [axis for axis in axes if axis[0] != 1]
    if [length for length, _ in axes] == [tokens, dim]:
        return axes
    if len(axes) == 1 and axes[0][0] == tokens * dim:
        return [(tokens, axes[0][1] * dim), (dim, axes[0][1])]
    return None


def _joined(offset: int, front: Axes, inner: Axes) -> Strided:
    axes = [*front, *inner]
    return Strided(offset, tuple(length for length, _ in axes), tuple(stride for _, stride in axes))
