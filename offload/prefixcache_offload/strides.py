"""Where K and V lie inside a slot, as numbers: the canonical order of design rule "identity", and nothing else.

    [kv_head][layer][k: token x k_dim | v: token x v_dim | scales]

So the heads of one tensor-parallel rank are one contiguous range, and what two ranks wrote is read by one. A view is an
offset, a shape and strides in bytes; numpy and torch both make arrays of it (`memory`). No memory is touched here.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Component = Literal["k", "v"]

MAX_PART_BYTES = 1 << 40
"""Sizes beyond this are a mistake in a layout, not a layout."""


class Strided(NamedTuple):
    """A view of some memory: `offset` and `strides` in bytes, `shape` in elements of a size known beside it."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    def moved(self, offset: int) -> "Strided":
        """The same view `offset` bytes further on."""
        return Strided(self.offset + offset, self.shape, self.strides)

    def stacked(self, count: int, stride: int) -> "Strided":
        """`count` such views, `stride` bytes apart, as a new first axis."""
        return Strided(self.offset, (count, *self.shape), (stride, *self.strides))


@dataclass(frozen=True, slots=True)
class Span:
    """The heads and layers of a part that one tensor holds: a rank's heads, one layer or a pipeline stage's."""

    first_head: int
    heads: int
    first_layer: int
    layers: int


@dataclass(frozen=True, slots=True)
class PartShape:
    """One block's bytes of one group of layers. `itemsize` is bytes of a K or V value; MLA is one head with v_dim 0.

    `scale_bytes` are per head and layer, behind V.
    """

    kv_heads: int
    layers: int
    tokens: int
    k_dim: int
    v_dim: int
    itemsize: int
    scale_bytes: int = 0

    def __post_init__(self) -> None:
        sizes = (self.kv_heads, self.layers, self.tokens, self.k_dim, self.itemsize)
        if min(sizes) <= 0 or self.v_dim < 0 or self.scale_bytes < 0:
            raise ValueError(f"a part needs positive sizes: {self}")
        if self.itemsize not in (1, 2, 4, 8):
            raise ValueError(f"a value of {self.itemsize} bytes is not supported")
        if self.scale_bytes % self.itemsize:
            raise ValueError(f"scales of {self.scale_bytes} bytes leave {self.itemsize}-byte values unaligned")
        if self.part_bytes > MAX_PART_BYTES:
            raise ValueError(f"a part of {self.part_bytes} bytes is larger than {MAX_PART_BYTES}")

    @property
    def layer_bytes(self) -> int:
        """Bytes of one head in one layer: K, V and scales."""
        return self.tokens * (self.k_dim + self.v_dim) * self.itemsize + self.scale_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in all layers; heads follow each other at this distance."""
        return self.layers * self.layer_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes of the whole part."""
        return self.kv_heads * self.head_bytes

    def whole(self) -> Span:
        """All heads and layers."""
        return Span(0, self.kv_heads, 0, self.layers)

    def check(self, span: Span) -> None:
        """Raise ValueError unless `span` lies inside this part."""
        heads_fit = span.first_head >= 0 and span.heads > 0 and span.first_head + span.heads <= self.kv_heads
        layers_fit = span.first_layer >= 0 and span.layers > 0 and span.first_layer + span.layers <= self.layers
        if not (heads_fit and layers_fit):
            raise ValueError(f"{span} is outside {self.kv_heads} heads and {self.layers} layers")

    def dim(self, component: Component) -> int:
        """Values of one token and head."""
        return self.k_dim if component == "k" else self.v_dim

    def view(self, component: Component, span: Span) -> Strided:
        """K or V of `span` in one slot: axes (head, layer, token, dim), offset from the start of the slot.

        Raises ValueError for a span outside the part.
        """
        self.check(span)
        dim = self.dim(component)
        offset = span.first_head * self.head_bytes + span.first_layer * self.layer_bytes
        if component == "v":
            offset += self.tokens * self.k_dim * self.itemsize
        strides = (self.head_bytes, self.layer_bytes, dim * self.itemsize, self.itemsize)
        return Strided(offset, (span.heads, span.layers, self.tokens, dim), strides)

    def scales(self, span: Span) -> Strided:
        """Scales of `span` in one slot, in bytes: axes (head, layer, byte). Raises ValueError as `view`."""
        self.check(span)
        offset = span.first_head * self.head_bytes + (span.first_layer + 1) * self.layer_bytes - self.scale_bytes
        return Strided(offset, (span.heads, span.layers, self.scale_bytes), (self.head_bytes, self.layer_bytes, 1))
