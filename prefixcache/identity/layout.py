"""Layouts: the shape of one block's bytes, as data.

Rules:
1. A layout is groups of layers that keep the same kind of thing (full attention, sliding window, state). A block has
   parts, numbered from 0: one per group, in group order; with pipeline stages one per group and stage that has any.
2. Bytes of a part: `[kv_head][layer][k: token x k_dim | v: token x v_dim | scales]`, without padding. A tensor-parallel
   rank's heads are so one contiguous range, and any number of ranks can read what any other wrote.
3. MLA is one head with v_dim 0. A state group keeps one row at a block's end instead of one per token.
4. One model has one layout: groups are ordered by first layer, and groups that differ in their layers only are one.

What belongs here: shapes and sizes. It must not know engines' tensors (see the adapters) or where bytes are kept.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, cast

from prefixcache.identity.canonical import Value
from prefixcache.identity.keys import MAX_BLOCK_TOKENS

CANONICAL_PACKING: Final = "canonical"

# Names as torch and safetensors' users write them. Bits, because int4 packs two elements into a byte.
DTYPE_BITS: Final[Mapping[str, int]] = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16,
    "float8_e4m3fn": 8, "float8_e4m3fnuz": 8, "float8_e5m2": 8, "float8_e5m2fnuz": 8,
    "int8": 8, "uint8": 8, "int4": 4,
}  # fmt: skip

# Limits that no model comes near, but under which every size, offset and product fits u64 (and a part fits u32 bytes):
# a spec that comes over the wire must not make the daemon overflow or reserve nonsense.
MAX_LAYERS: Final = 4096
MAX_HEADS: Final = 65536
MAX_DIM: Final = 1 << 24
MAX_WINDOW: Final = 1 << 31
MAX_GROUPS: Final = 64
MAX_PART_BYTES: Final = (1 << 32) - 4096
MAX_BLOCK_BYTES: Final = 1 << 36

_NATIVE = re.compile(r"native:[a-z0-9][a-z0-9._-]{0,31}:[a-z0-9][a-z0-9._-]{0,31}")


class LayoutError(ValueError):
    """A layout that no model can have: a size out of range, groups out of order, an unknown dtype or packing."""


class GroupKind(StrEnum):
    """What must be there for a prefix to be restorable: all its blocks, the last window of them, or one state."""

    FULL = "full"
    SLIDING = "sliding"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of equal shape. Dimensions in elements of `dtype`; `scale_bytes` per (KV head, layer, block).

    `layers`: indices in the model, ascending. `window_tokens`: tokens a query sees, itself included; sliding only.
    For a state group k_dim and v_dim are the elements of its two states per head and layer (convolution, recurrence).
    """

    kind: GroupKind
    layers: tuple[int, ...]
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    window_tokens: int = 0
    scale_bytes: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BITS:
            raise LayoutError(f"unknown KV dtype {self.dtype!r}; known are {', '.join(DTYPE_BITS)}")
        _check_layers(self.layers)
        _in_range("kv_heads", self.kv_heads, 1, MAX_HEADS)
        _in_range("k_dim", self.k_dim, 1, MAX_DIM)
        _in_range("v_dim", self.v_dim, 0, MAX_DIM)
        _in_range("scale_bytes", self.scale_bytes, 0, MAX_DIM)
        sliding = self.kind is GroupKind.SLIDING
        _in_range(f"window_tokens of a {self.kind} group", self.window_tokens, int(sliding), MAX_WINDOW * sliding)

    @property
    def shape(self) -> tuple[object, ...]:
        """All but the layers: two groups of one layout never have the same."""
        return (
            self.kind, self.window_tokens, self.kv_heads, self.k_dim, self.v_dim, self.dtype, self.scale_bytes
        )  # fmt: skip

    def rows(self, block_tokens: int) -> int:
        """Rows of K and V that a block keeps: its tokens, or one for a state group."""
        return 1 if self.kind is GroupKind.STATE else block_tokens

    def layer_bytes(self, block_tokens: int) -> int:
        """Bytes of one KV head of one layer of one block. Raises LayoutError where int4 rows end inside a byte."""
        rows, bits = self.rows(block_tokens), DTYPE_BITS[self.dtype]
        k_bits, v_bits = rows * self.k_dim * bits, rows * self.v_dim * bits
        if k_bits % 8 or v_bits % 8:
            raise LayoutError(f"{rows} rows of {self.k_dim} or {self.v_dim} {self.dtype} do not fill whole bytes")
        return (k_bits + v_bits) // 8 + self.scale_bytes

    def window_blocks(self, block_tokens: int) -> int:
        """Blocks of a sliding group that must precede a prefix length to make it restorable: ceil((window-1)/block)."""
        return -(-(self.window_tokens - 1) // block_tokens) if self.kind is GroupKind.SLIDING else 0

    def to_map(self) -> dict[str, Value]:
        """As plain values, for canonical msgpack."""
        return {
            "kind": self.kind.value,
            "layers": list(self.layers),
            "kv_heads": self.kv_heads,
            "k_dim": self.k_dim,
            "v_dim": self.v_dim,
            "dtype": self.dtype,
            "window_tokens": self.window_tokens,
            "scale_bytes": self.scale_bytes,
        }

    @classmethod
    def from_map(cls, value: Value) -> "LayerGroup":
        """The inverse of `to_map`. Raises LayoutError for a missing, unknown or wrongly typed field."""
        fields = _fields(value, "a layer group", _GROUP_FIELDS)
        try:
            kind = GroupKind(cast("str", fields["kind"]))
        except ValueError as error:
            raise LayoutError(f"unknown group kind {fields['kind']!r}") from error
        numbers = {name: _integer(name, fields[name]) for name in _GROUP_NUMBERS}
        return cls(kind, _integers("layers", fields["layers"]), dtype=cast("str", fields["dtype"]), **numbers)


@dataclass(frozen=True, slots=True)
class Part:
    """One block's bytes of one group and one range of its layers; the unit of storage.

    `first_layer` and `layer_count` count positions in the group's `layers`, not model layers. `layer_bytes` is one KV
    head of one layer, `bytes` the whole part: kv_heads x layer_count x layer_bytes.
    """

    index: int
    group: int
    first_layer: int
    layer_count: int
    kv_heads: int
    layer_bytes: int

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head over all layers of the part."""
        return self.layer_count * self.layer_bytes

    @property
    def bytes(self) -> int:
        """Bytes of the whole part, all KV heads."""
        return self.kv_heads * self.head_bytes

    def head_range(self, first_head: int, head_count: int) -> tuple[int, int]:
        """(offset, bytes) within the part of a rank's KV heads. Raises LayoutError for heads the part does not have."""
        if first_head < 0 or head_count < 1 or first_head + head_count > self.kv_heads:
            raise LayoutError(f"heads {first_head}..{first_head + head_count - 1} of a part with {self.kv_heads}")
        return first_head * self.head_bytes, head_count * self.head_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """The groups of a model, how a part's bytes are packed, and where pipeline stages cut it.

    `packing`: `canonical` (rule 2), or `native:<engine>:<isa>` for bytes only such engines understand. `stages`: model
    layers at which a new part begins, ascending, without 0; empty for one part per group.
    """

    groups: tuple[LayerGroup, ...]
    packing: str = CANONICAL_PACKING
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise LayoutError(f"a layout has 1 to {MAX_GROUPS} groups, got {len(self.groups)}")
        if self.packing != CANONICAL_PACKING and not _NATIVE.fullmatch(self.packing):
            raise LayoutError(f"packing {self.packing!r} is neither 'canonical' nor 'native:<engine>:<isa>'")
        order = [(group.layers[0], group.kind.value) for group in self.groups]
        if order != sorted(order):
            raise LayoutError("groups must be ordered by their first layer (Layout.of does it)")
        if len({group.shape for group in self.groups}) != len(self.groups):
            raise LayoutError("groups that differ in their layers only must be one group (Layout.of does it)")
        if list(self.stages) != sorted(set(self.stages)) or any(not 0 < cut < MAX_LAYERS for cut in self.stages):
            raise LayoutError(f"stages must be ascending model layers above 0, got {self.stages}")

    @classmethod
    def of(cls, *groups: LayerGroup, packing: str = CANONICAL_PACKING, stages: tuple[int, ...] = ()) -> "Layout":
        """The layout of these groups in rule 4's order, with groups of equal shape joined into one."""
        layers: dict[tuple[object, ...], list[int]] = {}
        first: dict[tuple[object, ...], LayerGroup] = {}
        for group in groups:
            first.setdefault(group.shape, group)
            layers.setdefault(group.shape, []).extend(group.layers)
        joined = [
            LayerGroup(
                group.kind, tuple(sorted(layers[shape])), group.kv_heads, group.k_dim, group.v_dim, group.dtype,
                group.window_tokens, group.scale_bytes,
            )
            for shape, group in first.items()
        ]  # fmt: skip
        joined.sort(key=lambda group: (group.layers[0], group.kind.value))
        return cls(tuple(joined), packing, stages)

    @classmethod
    def opaque(cls, block_bytes: int, block_tokens: int, packing: str) -> "Layout":
        """Blocks of `block_bytes` bytes that only the engine named in `packing` understands: one part, one head, no
        numbers. Raises LayoutError for sizes out of range and for canonical packing."""
        if packing == CANONICAL_PACKING:
            raise LayoutError("opaque bytes have no canonical order; name the engine: 'native:<engine>:<isa>'")
        row, rest = divmod(block_bytes, block_tokens)
        return cls((LayerGroup(GroupKind.FULL, (0,), 1, row, 0, "uint8", scale_bytes=rest),), packing)

    def parts(self, block_tokens: int) -> tuple[Part, ...]:
        """The parts of a block of `block_tokens` tokens, in order. Raises LayoutError where a size overflows."""
        _in_range("block_tokens", block_tokens, 1, MAX_BLOCK_TOKENS)
        parts: list[Part] = []
        for number, group in enumerate(self.groups):
            layer_bytes = group.layer_bytes(block_tokens)
            for first, count in self._layer_ranges(group):
                part = Part(len(parts), number, first, count, group.kv_heads, layer_bytes)
                if part.bytes > MAX_PART_BYTES:
                    raise LayoutError(f"part {part.index} would be {part.bytes} bytes, more than {MAX_PART_BYTES}")
                parts.append(part)
        total = sum(part.bytes for part in parts)
        if total > MAX_BLOCK_BYTES:
            raise LayoutError(f"a block would be {total} bytes, more than {MAX_BLOCK_BYTES}")
        return tuple(parts)

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of all parts of a block. Raises LayoutError as `parts` does."""
        return sum(part.bytes for part in self.parts(block_tokens))

    def to_map(self) -> dict[str, Value]:
        """As plain values, for canonical msgpack."""
        groups: list[Value] = [group.to_map() for group in self.groups]
        return {"groups": groups, "packing": self.packing, "stages": list(self.stages)}

    @classmethod
    def from_map(cls, value: Value) -> "Layout":
        """The inverse of `to_map`. Raises LayoutError for a missing, unknown or wrongly typed field."""
        fields = _fields(value, "a layout", {"groups": list, "packing": str, "stages": list})
        groups = tuple(LayerGroup.from_map(group) for group in cast("list[Value]", fields["groups"]))
        return cls(groups, cast("str", fields["packing"]), _integers("stages", fields["stages"]))

    def _layer_ranges(self, group: LayerGroup) -> Iterator[tuple[int, int]]:
        """(first position, count) of the group's layers in each pipeline stage that has any."""
        first = 0
        for cut in (*self.stages, MAX_LAYERS):
            last = sum(layer < cut for layer in group.layers)
            if last > first:
                yield first, last - first
            first = last


_GROUP_NUMBERS = ("kv_heads", "k_dim", "v_dim", "window_tokens", "scale_bytes")
_GROUP_FIELDS: Mapping[str, type] = {"kind": str, "layers": list, "dtype": str} | dict.fromkeys(_GROUP_NUMBERS, int)


def _check_layers(layers: tuple[int, ...]) -> None:
    if not layers:
        raise LayoutError("a group has no layers")
    if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= MAX_LAYERS:
        raise LayoutError(f"layers must be ascending, each once, from 0 to {MAX_LAYERS - 1}")


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise LayoutError(f"{name} must be {low if low == high else f'from {low} to {high}'}, got {value}")


def _fields(value: Value, what: str, types: Mapping[str, type]) -> Mapping[str, Value]:
    if not isinstance(value, Mapping) or set(value) != set(types):
        raise LayoutError(f"{what} must be a map of exactly {', '.join(sorted(types))}")
    for name, kind in types.items():
        if type(value[name]) is not kind:
            raise LayoutError(f"{name} of {what} must be {kind.__name__}, got {type(value[name]).__name__}")
    return value


def _integer(name: str, value: Value) -> int:
    if type(value) is not int:
        raise LayoutError(f"{name} must be an integer, got {value!r}")
    return value


def _integers(name: str, value: Value) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise LayoutError(f"{name} must be a list of integers")
    return tuple(_integer(name, item) for item in value)
