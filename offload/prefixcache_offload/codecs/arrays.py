"""Coding and decoding with numpy: for processes without torch, and the plain form that `tensors` is compared with.

Arrays are float32 `[..., token, dim]`, codes u8 `[..., token, dim or dim/2]`, scales and origins bfloat16 as u16
`[..., groups]`. NaN is coded as 0, what is infinite or beyond `formats.most` as that.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from prefixcache_offload.codecs.formats import LEAST_SCALE, Format, Rule, most
from prefixcache_offload.strides import Component, PartShape

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]


def encode(form: Format, shape: PartShape, dtype: str, raw: Bytes, coded: Bytes) -> None:
    """Fill u8[n, coded part bytes] from u8[n, part bytes], blocks of numbers of `dtype` in canonical order."""
    into = _layers(coded, form.coded(shape))
    for component, values in _components(shape, dtype, raw):
        place, rule = form.place(shape, component), form.rule(component)
        codes, scale, origin = quantise(values, rule, most(dtype))
        if form.bits == 4:
            half = codes.shape[-1] // 2
            codes = codes[..., :half] | codes[..., half:] << np.uint8(4)
        _put(into, place.codes, codes)
        _put(into, place.scale, scale.view(np.uint8))
        if place.origin >= 0:
            _put(into, place.origin, origin.view(np.uint8))


def decode(form: Format, shape: PartShape, dtype: str, coded: Bytes, raw: Bytes) -> None:
    """Fill u8[n, part bytes] from u8[n, coded part bytes]. Any bytes decode to some numbers."""
    layers, whole = _layers(coded, form.coded(shape)), _layers(raw, shape)
    at = 0
    for component in ("k", "v"):
        dim = shape.dim(component)
        if not dim:
            continue
        place, rule = form.place(shape, component), form.rule(component)
        width = dim * form.bits // 8
        codes = layers[..., place.codes : place.codes + shape.tokens * width]
        codes = codes.reshape(*codes.shape[:-1], shape.tokens, width)
        if form.bits == 4:
            codes = np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
        scale = _numbers(layers, place.scale, place.groups)
        origin = _numbers(layers, place.origin, place.groups) if place.origin >= 0 else None
        values = dequantise(codes, scale, origin, rule)
        size = shape.tokens * dim * shape.itemsize
        whole[..., at : at + size] = _narrow(values, dtype).reshape(*values.shape[:-2], size)
        at += size


def quantise(values: Floats, rule: Rule, limit: float) -> tuple[Bytes, Halves, Halves]:
    """(codes, scale, origin) of numbers [..., token, dim]; scales rounded up, origins down, so that all is covered."""
    values = np.clip(np.nan_to_num(values, nan=0.0, posinf=limit, neginf=-limit), -limit, limit).astype(np.float32)
    axis = -2 if rule.by_channel else -1
    if rule.signed:
        low = np.zeros(np.delete(values.shape, axis), np.float32)
        span = np.abs(values).max(axis)
    else:
        low = _widen(_rounded_down(values.min(axis))) + np.float32(0)  # no negative zero: it has no order
        span = values.max(axis) - low
    scale = _widen(_rounded_up(span / np.float32(rule.levels)))
    scale = np.where(scale >= LEAST_SCALE, scale, 0).astype(np.float32)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    steps = np.rint((values - np.expand_dims(low, axis)) * np.expand_dims(inverse, axis))
    codes = np.clip(steps, -rule.levels if rule.signed else 0, rule.levels)
    made = codes.astype(np.int8).view(np.uint8) if rule.signed else codes.astype(np.uint8)
    return made, _halves(scale), _halves(low)


def dequantise(codes: Bytes, scale: Halves, origin: Halves | None, rule: Rule) -> Floats:
    """The numbers [..., token, dim] that codes stand for."""
    axis = -2 if rule.by_channel else -1
    values = (codes.view(np.int8) if rule.signed else codes).astype(np.float32)
    with np.errstate(all="ignore"):  # damaged bytes may say anything; whoever reads them finds out
        values *= np.expand_dims(_widen(scale), axis)
        if origin is not None:
            values += np.expand_dims(_widen(origin), axis)
    return values


def widened(raw: Bytes, dtype: str) -> Floats:
    """Contiguous bytes of numbers of `dtype` along the last axis, as float32."""
    if dtype == "bfloat16":
        return _widen(raw.view("<u2"))
    wide: Floats = raw.view("<f2" if dtype == "float16" else "<f4").astype(np.float32)
    return wide


def _narrow(values: Floats, dtype: str) -> Bytes:
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
        return rounded.astype("<u2").view(np.uint8)
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(values.astype("<f2" if dtype == "float16" else "<f4")).view(np.uint8)


def _components(shape: PartShape, dtype: str, raw: Bytes) -> list[tuple[Component, Floats]]:
    layers, found, at = _layers(raw, shape), [], 0
    names: tuple[Component, ...] = ("k", "v")
    for component in names:
        dim = shape.dim(component)
        size = shape.tokens * dim * shape.itemsize
        if dim:
            values = widened(np.ascontiguousarray(layers[..., at : at + size]), dtype)
            found.append((component, values.reshape(*values.shape[:-1], shape.tokens, dim)))
        at += size
    return found


def _layers(blocks: Bytes, shape: PartShape) -> Bytes:
    return blocks.reshape(len(blocks), shape.kv_heads, shape.layers, shape.layer_bytes)


def _put(layers: Bytes, at: int, values: npt.NDArray[Any]) -> None:
    flat = np.ascontiguousarray(values).reshape(*layers.shape[:-1], -1)
    layers[..., at : at + flat.shape[-1]] = flat


def _numbers(layers: Bytes, at: int, count: int) -> Halves:
    return np.ascontiguousarray(layers[..., at : at + 2 * count]).view("<u2")


def _widen(halves: npt.NDArray[Any]) -> Floats:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _halves(values: Floats) -> Halves:
    """Numbers that are bfloat16 already."""
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype("<u2")


def _rounded_up(values: Floats) -> Halves:
    """The least bfloat16 not under a number that is not negative."""
    return ((np.ascontiguousarray(values).view(np.uint32) + 0xFFFF) >> 16).astype("<u2")


def _rounded_down(values: Floats) -> Halves:
    """The greatest bfloat16 not above a number."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    away = (bits >> 31 != 0) & (bits & 0xFFFF != 0)
    rounded: Halves = ((bits >> 16) + away).astype("<u2")
    return rounded
