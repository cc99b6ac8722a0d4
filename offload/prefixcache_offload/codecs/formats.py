"""The lossy forms a namespace may ask for: how many bits a number keeps, along which axis numbers share a scale, and
where all of it lies in a part. Values only; `arrays` and `tensors` compute, `moves` brings it to slots.

A coded part has the canonical order of the part it stands for, `[kv_head][layer][k | v | scales]`, so a rank's heads
are one contiguous range still:

    k       token x k_dim codes, unsigned; a channel's codes over the block's tokens share a scale and an origin
    v       token x v_dim codes; a token's share a scale (int8: signed, no origin; int4: unsigned, and an origin)
    scales  k scale[k_dim] | k origin[k_dim] | v scale[token] | v origin[token] (int4 only), bfloat16 each

K is told apart by channel and V by token because that is where their outliers are (KIVI, arXiv 2402.02750). Codes of
4 bits are two to a byte: channel c in the low half, channel c + dim/2 in the high half.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from prefixcache_offload.strides import Component, PartShape

SCALE_BYTES: Final = 2
_BYTE_BITS: Final = 8
SOURCE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Number types that can be coded, and their size."""


class CodecError(ValueError):
    """A form that is unknown, or that cannot stand for this part. `reason` is for counters."""

    def __init__(self, message: str, reason: str = "codec_unsupported") -> None:
        """`message` is for people and says what to do."""
        super().__init__(message)
        self.reason = reason


class Rule(NamedTuple):
    """How one component is coded. levels: steps between smallest and largest. signed: codes lie around zero, no origin.

    by_channel: numbers of one channel share a scale, else those of one token.
    """

    levels: int
    signed: bool
    by_channel: bool


class Place(NamedTuple):
    """Where a component lies in the bytes of one head and layer: codes, `groups` scales, origins (-1: none)."""

    codes: int
    scale: int
    origin: int
    groups: int


@dataclass(frozen=True, slots=True)
class Format:
    """One form. `version` rises when its bytes come to mean something else."""

    name: str
    bits: int
    k: Rule
    v: Rule
    version: int = 1

    def rule(self, component: Component) -> Rule:
        """How K or V is coded."""
        return self.k if component == "k" else self.v

    def scale_bytes(self, tokens: int, k_dim: int, v_dim: int) -> int:
        """Bytes of scales of one head and layer of a block."""
        numbers = 2 * k_dim
        if v_dim:
            numbers += tokens * (1 if self.v.signed else 2)
        return numbers * SCALE_BYTES

    def coded(self, shape: PartShape) -> PartShape:
        """The shape of the coded part, in bytes. Raises CodecError where its numbers do not fill bytes."""
        per_byte = _BYTE_BITS // self.bits
        if shape.k_dim % per_byte or shape.v_dim % per_byte:
            raise CodecError(f"{self.name} needs even head sizes, got {shape.k_dim} and {shape.v_dim}; use int8")
        if shape.scale_bytes:
            raise CodecError(f"{self.name} cannot code a part that has scales of its own; use codec='raw'")
        scales = self.scale_bytes(shape.tokens, shape.k_dim, shape.v_dim)
        k_dim, v_dim = shape.k_dim // per_byte, shape.v_dim // per_byte
        return PartShape(shape.kv_heads, shape.layers, shape.tokens, k_dim, v_dim, 1, scales)

    def place(self, shape: PartShape, component: Component) -> Place:
        """Where K or V of the part `shape` lies in one head and layer of its coded form."""
        coded = self.coded(shape)
        scales = coded.layer_bytes - coded.scale_bytes
        if component == "k":
            return Place(0, scales, scales + shape.k_dim * SCALE_BYTES, shape.k_dim)
        first = scales + 2 * shape.k_dim * SCALE_BYTES
        origin = -1 if self.v.signed else first + shape.tokens * SCALE_BYTES
        return Place(shape.tokens * coded.k_dim, first, origin, shape.tokens)


RAW: Final = "raw"
INT8: Final = Format("int8", 8, Rule(255, signed=False, by_channel=True), Rule(127, signed=True, by_channel=False))
INT4: Final = Format("int4", 4, Rule(15, signed=False, by_channel=True), Rule(15, signed=False, by_channel=False))
FORMATS: Final = {form.name: form for form in (INT8, INT4)}


def format_of(name: str) -> Format | None:
    """The form of this name, None for raw. Raises CodecError for a name that nobody knows."""
    if name in (RAW, "none", ""):
        return None
    try:
        return FORMATS[name]
    except KeyError:
        known = ", ".join((RAW, *FORMATS))
        raise CodecError(f"unknown codec {name!r}; known are {known}", "codec_unknown") from None


def most(dtype: str) -> float:
    """Numbers are brought into +- this before they are coded: decoded, none of them is infinite then.

    Raises CodecError for number types that cannot be coded.
    """
    if dtype not in SOURCE_BYTES:
        raise CodecError(f"KV of {dtype} cannot be coded, only {', '.join(SOURCE_BYTES)}; use codec='raw'")
    return 64000.0 if dtype == "float16" else 2.0**126


LEAST_SCALE: Final = 2.0**-120
"""Differences too small for a scale above this vanish: its inverse must be a number."""
