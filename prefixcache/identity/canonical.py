"""Canonical msgpack: one value, one byte string, in any language.

Rules (a second implementation needs nothing else):
1. Allowed values: nil, true/false, integers from -2^63 to 2^64-1, finite floats, UTF-8 strings, byte strings, arrays
   and maps of these. No extension types. Nesting at most 32 deep.
2. Every integer, length and count takes the shortest form that msgpack has for it; a non-negative integer takes the
   unsigned forms.
3. A float is always float64 (0xcb), never float32, and never an integer: 1.0 and 1 are different values. Negative zero
   is written as zero. NaN and the infinities are refused.
4. A string is of the str family, bytes are of the bin family. Strings are taken as they are (no Unicode normal form);
   lone surrogates are refused.
5. Keys of a map are strings, each once, sorted by their UTF-8 bytes.

What belongs here: those rules. It must not know what is packed. msgpack's own packer already does 2 and 4; this module
refuses what would break 1, 3 and 5, by exact type, because a subclass (numpy scalar, IntEnum) may pack differently.
"""

import math
from collections.abc import Mapping
from typing import cast

import msgpack  # type: ignore[import-untyped]  # msgpack ships no type information

MAX_DEPTH = 32

Value = None | bool | int | float | str | bytes | list["Value"] | tuple["Value", ...] | Mapping[str, "Value"]


class CanonicalError(ValueError):
    """A value that has no canonical form, or bytes that are not the canonical form of their value."""


def pack(value: Value) -> bytes:
    """The canonical msgpack bytes of `value`. Raises CanonicalError for what rule 1, 3, 4 or 5 refuses."""
    packed: bytes = msgpack.packb(_plain(value, "value", 0), use_bin_type=True, use_single_float=False)
    return packed


def unpack(data: bytes) -> Value:
    """The value whose canonical bytes are `data`. Raises CanonicalError when `data` is anything but canonical."""
    try:
        value = cast("Value", msgpack.unpackb(data, raw=False, strict_map_key=True))
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise CanonicalError(f"not msgpack: {error}") from error
    if pack(value) != bytes(data):
        raise CanonicalError("msgpack, but not in canonical form (see prefixcache.identity.canonical)")
    return value


def _plain(value: object, where: str, depth: int) -> object:
    """`value` with its maps sorted and its floats cleaned, or CanonicalError naming the place that is not canonical."""
    if depth > MAX_DEPTH:
        raise CanonicalError(f"{where}: nested more than {MAX_DEPTH} deep")
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _sorted_map(value, where, depth)
    return _scalar(value, where)


def _scalar(value: object, where: str) -> object:
    kind = type(value)
    if value is None or kind is bool or kind is bytes:
        return value
    if kind is int:
        if not -(2**63) <= cast("int", value) < 2**64:
            raise CanonicalError(f"{where}: integer {value} is outside -2^63 .. 2^64-1")
        return value
    if kind is float:
        if not math.isfinite(cast("float", value)):
            raise CanonicalError(f"{where}: {value} is not a finite float")
        return cast("float", value) + 0.0  # turns -0.0 into 0.0
    if kind is str:
        _utf8(cast("str", value), where)
        return value
    raise CanonicalError(f"{where}: {kind.__name__} has no canonical form")


def _sorted_map(value: Mapping[object, object], where: str, depth: int) -> dict[str, object]:
    for key in value:
        if type(key) is not str:
            raise CanonicalError(f"{where}: map key {key!r} is not a string")
    keys = sorted(cast("Mapping[str, object]", value), key=lambda key: _utf8(key, where))
    return {key: _plain(value[key], f"{where}.{key}", depth + 1) for key in keys}


def _utf8(text: str, where: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CanonicalError(f"{where}: string with a lone surrogate") from error
