"""Coding and decoding with torch, on any device: the same numbers as `arrays`, fast.

On the host a decode goes from the coded bytes straight to where the numbers are wanted, a few blocks at a time, through
float32 in the cache, which torch computes three times as fast as bfloat16. It runs on a few threads of ours, each of
which has torch work on one thread: torch's own threads wait for each other at every step, and where another process
has a core for a moment that costs ten times the work.

torch is imported when something is done, never before.
"""

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

from prefixcache_offload.codecs.formats import LEAST_SCALE, Format, Rule, most
from prefixcache_offload.strides import Component, PartShape

if TYPE_CHECKING:
    import torch

_PIECE: Final = 1 << 20
"""Numbers decoded at a time: larger costs cache, smaller costs calls, for which threads wait for each other."""
_SHARE: Final = 1 << 23
"""Most numbers that one thread takes at a time; fewer where there would be too few shares for all threads."""
_SHARES_EACH: Final = 2
_MOST_THREADS: Final = 4
_ROW: Final = 512
"""Numbers of an inner loop, at least, where all tokens of a channel share a scale."""
_local = threading.local()


class Plane(NamedTuple):
    """K or V of some blocks: codes and where the numbers go.

    layers: u8[n, head, layer, coded layer bytes], any strides. target: numbers [n, head, layer, token, dim], any
    strides. first_token: of the block, that is token 0 of the target.
    """

    component: Component
    layers: "torch.Tensor"
    target: "torch.Tensor"
    first_token: int


class CodedPlanes(NamedTuple):
    """Planes of one form. shape: of the raw part."""

    form: Format
    shape: PartShape
    planes: Sequence[Plane]


def encode(form: Format, shape: PartShape, dtype: str, raw: "torch.Tensor") -> "torch.Tensor":
    """u8[n, coded part bytes] of u8[n, part bytes], blocks of `dtype` in canonical order, on their device."""
    import torch

    made = torch.empty((len(raw), form.coded(shape).part_bytes), dtype=torch.uint8, device=raw.device)
    encode_into(form, shape, dtype, raw, list(made) if raw.device.type == "cpu" else [made])
    return made


def encode_into(
    form: Format, shape: PartShape, dtype: str, raw: "torch.Tensor", targets: "Sequence[torch.Tensor]"
) -> None:
    """Encode u8[n, part bytes] into contiguous targets: u8[coded part bytes] for each block, or one u8[n, ...]."""
    import torch

    coded = form.coded(shape)
    numbers = raw.view(getattr(torch, dtype)).view(len(raw), shape.kv_heads, shape.layers, -1)
    blocks = [numbers] if len(targets) == 1 and targets[0].dim() > 1 else list(numbers)
    pieces = []
    for some, target in zip(blocks, targets, strict=True):
        into = target.view(*target.shape[:-1], coded.kv_heads, coded.layers, coded.layer_bytes)
        if raw.device.type == "cpu" and some.numel() > 2 * _PIECE:  # K and V
            pieces += [_Uncoded(form, shape, dtype, *head) for head in zip(some, into, strict=True)]
        else:
            pieces.append(_Uncoded(form, shape, dtype, some, into))
    _run([functools.partial(_encode_piece, piece) for piece in pieces], host=raw.device.type == "cpu")


class _Uncoded(NamedTuple):
    """numbers: [..., layer, k and v of a block], any axes in front; into: u8[..., layer, coded layer bytes]."""

    form: Format
    shape: PartShape
    dtype: str
    numbers: "torch.Tensor"
    into: "torch.Tensor"


def _encode_piece(piece: _Uncoded) -> None:
    shape, at = piece.shape, 0
    names: tuple[Component, ...] = ("k", "v")
    for component in names:
        size = shape.tokens * shape.dim(component)
        if size:
            values = piece.numbers[..., at : at + size].unflatten(-1, (shape.tokens, shape.dim(component)))
            _encode_component(piece, component, values)
        at += size


def _encode_component(piece: _Uncoded, component: Component, values: "torch.Tensor") -> None:
    import torch

    form, shape, into = piece.form, piece.shape, piece.into
    place, rule = form.place(shape, component), form.rule(component)
    wide = _scratch(values)
    wide.copy_(values)
    scale, origin = _quantise(wide, rule, most(piece.dtype))
    width = values.shape[-1] * form.bits // 8
    codes = into[..., place.codes : place.codes + shape.tokens * width].unflatten(-1, (shape.tokens, width))
    if form.bits == 4:
        codes.copy_(wide[..., :width].add_(wide[..., width:], alpha=16.0))
    else:
        codes.view(torch.int8 if rule.signed else torch.uint8).copy_(wide)
    _put(into, place.scale, scale)
    if place.origin >= 0:
        _put(into, place.origin, origin)


def _quantise(wide: "torch.Tensor", rule: Rule, limit: float) -> "tuple[torch.Tensor, torch.Tensor]":
    """Turn float32 numbers [..., token, dim] into their codes, in place; (scale, origin) bfloat16, see
    arrays.quantise."""
    import torch

    torch.nan_to_num(wide, nan=0.0, posinf=limit, neginf=-limit, out=wide)
    wide.clamp_(-limit, limit)
    axis = -2 if rule.by_channel else -1
    low, high = wide.amin(axis, keepdim=True), wide.amax(axis, keepdim=True)  # aminmax takes ten times as long
    if rule.signed:
        low, span = torch.zeros_like(low), torch.maximum(high, -low)
    else:
        low = _rounded_down(low) + 0.0  # no negative zero: it has no order
        span = high - low
        wide.sub_(low)
    scale = _rounded_up(span / rule.levels)
    scale = torch.where(scale >= LEAST_SCALE, scale, 0.0)
    wide.mul_(torch.where(scale > 0, 1.0 / scale, 0.0)).round_()
    wide.clamp_(-rule.levels if rule.signed else 0, rule.levels)
    return scale.squeeze(axis).to(torch.bfloat16), low.squeeze(axis).to(torch.bfloat16)


def decode(work: "Sequence[CodedPlanes]") -> None:
    """Decode every plane of it to its target. Any bytes decode to some numbers."""
    host = all(plane.target.device.type == "cpu" for each in work for plane in each.planes)
    numbers = sum(plane.target.numel() for each in work for plane in each.planes)
    most = min(max(numbers // (_SHARES_EACH * _threads()), _PIECE), _SHARE)
    shares = [
        functools.partial(_decode_share, each.form, each.shape, share)
        for each in work
        for plane in each.planes
        for share in _shares(plane, most)
    ]
    _run(shares, host=host)


def _shares(plane: Plane, most: int) -> "list[Plane]":
    """A plane as work for one thread each: some blocks, whose scales are many small tensors and looked at together."""
    blocks = len(plane.target)
    if plane.target.device.type != "cpu" or not blocks:
        return [plane]
    step = max(1, most // max(plane.target[0].numel(), 1))
    parts = zip(plane.layers.split(step), plane.target.split(step), strict=True)
    return [plane._replace(layers=layers, target=target) for layers, target in parts]


def _decode_share(form: Format, shape: PartShape, plane: Plane) -> None:
    for piece in _cut(_coded(form, shape, plane)):
        _decode_piece(piece)


class _Numbers(NamedTuple):
    """codes: [n, head, layer, token, width]. scale and origin, if any: float32 [n, head, layer, token, 1], or where all
    tokens share them [n, head, layer, 1, dim times some tokens]. target: as of `Plane`."""

    bits: int
    codes: "torch.Tensor"
    scale: "torch.Tensor"
    origin: "torch.Tensor | None"
    target: "torch.Tensor"


def _run(work: Sequence[Callable[[], None]], *, host: bool) -> None:
    """Do all of it: on the host with our threads, on a device by queueing it from here."""
    numbers = itertools.count()
    threads = min(_threads(), len(work)) if host else 0
    running = [_pool().submit(_work_off, work, numbers) for _ in range(threads)]
    if not running:
        _work_off(work, numbers)
    for each in running:
        each.result()


def _work_off(work: Sequence[Callable[[], None]], numbers: "Iterator[int]") -> None:
    """Take pieces until there are no more; several threads may."""
    import torch

    with torch.no_grad():
        for number in numbers:
            if number >= len(work):
                return
            work[number]()


def _cut(whole: _Numbers) -> "list[_Numbers]":
    """In pieces of whole blocks, or of some heads of one; a device takes it as it is."""
    target = whole.target
    heads = target.shape[1]
    if target.device.type != "cpu":
        return [whole]
    each = max(target[0].numel(), 1)
    if each <= _PIECE:
        return _split(whole, max(1, _PIECE // each), 0)
    step = max(1, _PIECE * heads // each)
    return [piece for block in _split(whole, 1, 0) for piece in _split(block, step, 1)]


def _split(whole: _Numbers, step: int, axis: int) -> "list[_Numbers]":
    bits, codes, scale, origin, target = whole
    count = -(-target.shape[axis] // step)
    origins = [None] * count if origin is None else origin.split(step, axis)
    parts = zip(codes.split(step, axis), scale.split(step, axis), origins, target.split(step, axis), strict=True)
    return [_Numbers(bits, *part) for part in parts]


def _decode_piece(piece: _Numbers) -> None:
    bits, codes, scale, origin, target = piece
    wide = _scratch(target)
    if bits == 4:
        half = target.shape[-1] // 2
        wide[..., :half].copy_(codes & 15)
        wide[..., half:].copy_(codes >> 4)
    else:
        wide.copy_(codes)
    rows = wide.view(*target.shape[:3], -1, scale.shape[-1]) if scale.shape[-1] > 1 else wide
    rows.mul_(scale)
    if origin is not None:  # not addcmul: that rounds once on some processors, and takes four times as long
        rows.add_(origin)
    target.copy_(wide)


def _scratch(like: "torch.Tensor") -> "torch.Tensor":
    """Float32 of a shape; on the host this thread's own memory, used again while it is in its cache."""
    import torch

    if like.device.type != "cpu":
        return torch.empty(like.shape, dtype=torch.float32, device=like.device)
    flat = getattr(_local, "flat", None)
    if flat is None or flat.numel() < like.numel():
        flat = _local.flat = torch.empty(max(like.numel(), _PIECE), dtype=torch.float32)
    made: torch.Tensor = flat[: like.numel()].view(like.shape)
    return made


def _coded(form: Format, shape: PartShape, plane: Plane) -> _Numbers:
    """A plane's tokens and what they are multiplied by, for all of its blocks at once."""
    import torch

    place, rule, target = form.place(shape, plane.component), form.rule(plane.component), plane.target
    tokens = slice(plane.first_token, plane.first_token + target.shape[-2])
    width = shape.dim(plane.component) * form.bits // 8
    codes = plane.layers[..., place.codes : place.codes + shape.tokens * width].unflatten(-1, (shape.tokens, width))
    codes = codes[..., tokens, :]
    if rule.signed:
        codes = codes.view(torch.int8)
    # Rows of several tokens: an inner loop over one head's channels is too short.
    repeat = 1
    while repeat * target.shape[-1] < _ROW and target.shape[-2] % (2 * repeat) == 0:
        repeat *= 2

    def numbers(at: int) -> "torch.Tensor":
        found = plane.layers[..., at : at + 2 * place.groups].contiguous().view(torch.bfloat16).float()
        return found.repeat(1, 1, 1, repeat).unsqueeze(-2) if rule.by_channel else found[..., tokens].unsqueeze(-1)

    origin = numbers(place.origin) if place.origin >= 0 else None
    return _Numbers(form.bits, codes, numbers(place.scale), origin, target)


def _put(into: "torch.Tensor", at: int, values: "torch.Tensor") -> None:
    import torch

    flat = values.contiguous().view(torch.uint8).flatten(into.dim() - 1)
    into[..., at : at + flat.shape[-1]] = flat


def _rounded_up(values: "torch.Tensor") -> "torch.Tensor":
    import torch

    bits = values.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & -0x10000).view(torch.float32)


def _rounded_down(values: "torch.Tensor") -> "torch.Tensor":
    import torch

    bits = values.contiguous().view(torch.int32)
    away = (bits < 0) & ((bits & 0xFFFF) != 0)
    return ((bits & -0x10000) + away.to(torch.int32) * 0x10000).view(torch.float32)


def _threads() -> int:
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Threads in which torch works on one thread each."""
    import torch

    count = torch.get_num_threads()
    ready = threading.Barrier(_threads() + 1)

    def begin() -> None:
        torch.get_num_threads()  # a thread takes over the process's number at its first use, so that has to be now
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(_threads(), "prefixcache-decode", initializer=begin)
    for _ in range(_threads()):
        pool.submit(int)
    ready.wait()
    # The number is this thread's and that of threads yet to come: those of the pool keep theirs.
    torch.set_num_threads(count)
    return pool


os.register_at_fork(after_in_child=_pool.cache_clear)
