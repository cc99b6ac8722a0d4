"""What a block of a namespace looks like: its parts, where K and V lie in them, and the spec the server is told.

Plain data made once per namespace. It must not know sessions, tensors or how bytes travel.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from prefixcache.identity.layout import CANONICAL_PACKING, DTYPE_BITS, GroupKind, LayerGroup, Layout, LayoutError, Part
from prefixcache.v1 import common_pb2
from prefixcache_offload.codecs.formats import RAW, CodecError, Format, format_of, most
from prefixcache_offload.strides import PartShape
from prefixcache_offload.units import SLOT_GRANULE

_BYTE_BITS: Final = 8
_KINDS: Final = {
    GroupKind.FULL: common_pb2.GROUP_KIND_FULL,
    GroupKind.SLIDING: common_pb2.GROUP_KIND_SLIDING,
    GroupKind.STATE: common_pb2.GROUP_KIND_STATE,
}
MAX_LABEL: Final = 200


@dataclass(frozen=True)
class BlockFormat:
    """A layout at a block size, in the form that slots hold. Raises LayoutError, as `Layout.parts` does, when its sizes
    overflow, and CodecError for a codec that is unknown or cannot stand for this layout.

    `layout` is that of the engine's tensors, `stored` that of the slots; they differ where there is a codec. `foreign`:
    whether keys are an engine's own, each found for itself.
    """

    layout: Layout
    block_tokens: int
    codec: str = RAW
    foreign: bool = False

    def __post_init__(self) -> None:
        self.stored.parts(self.block_tokens)

    @cached_property
    def coder(self) -> Format | None:
        """The form of the slots' bytes, None for raw."""
        return format_of(self.codec)

    @cached_property
    def source(self) -> "BlockFormat":
        """The same blocks raw: what callers' tensors look like."""
        return self if self.coder is None else BlockFormat(self.layout, self.block_tokens)

    @cached_property
    def stored(self) -> Layout:
        """The layout of the slots' bytes."""
        if self.coder is None:
            return self.layout
        groups = tuple(_coded_group(self.coder, self.layout, group, self.block_tokens) for group in self.layout.groups)
        return Layout(groups, self.layout.packing, self.layout.stages)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Parts of a block as they are stored, part i at index i."""
        return self.stored.parts(self.block_tokens)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of all parts of a block."""
        return sum(part.bytes for part in self.parts)

    @cached_property
    def slot_granules(self) -> tuple[int, ...]:
        """By part: granules of 4 KiB that one slot takes."""
        return tuple(-(-part.bytes // SLOT_GRANULE) for part in self.parts)

    @cached_property
    def shapes(self) -> tuple[PartShape, ...]:
        """By part: where K and V lie in a raw block. Raises LayoutError for opaque bytes (native packing, states)."""
        return tuple(self._shape(part) for part in self.layout.parts(self.block_tokens))

    @cached_property
    def needed_blocks(self) -> tuple[int, ...]:
        """By part: how many of a prefix's last blocks a restore needs."""
        return tuple(_needed(self.layout.groups[part.group], self.block_tokens) for part in self.parts)

    @cached_property
    def all_full(self) -> bool:
        """Whether every group is full attention, so that any shorter prefix is as good."""
        return all(group.kind is GroupKind.FULL for group in self.layout.groups)

    def layers_of(self, part: int) -> tuple[int, ...]:
        """Model layers of a part, in order."""
        item = self.parts[part]
        return self.layout.groups[item.group].layers[item.first_layer : item.first_layer + item.layer_count]

    def dtype_of(self, part: int) -> str:
        """The type of a part's numbers in the engine's tensors."""
        return self.layout.groups[self.parts[part].group].dtype

    def spec(self, fingerprint: bytes, label: str) -> common_pb2.NamespaceSpec:
        """What OpenNamespace sends. The root key stays here: the server never needs to hash."""
        return common_pb2.NamespaceSpec(
            fingerprint=fingerprint,
            block_tokens=self.block_tokens,
            groups=[_group(group) for group in self.stored.groups],
            parts=[
                common_pb2.Part(
                    group=part.group, first_layer=part.first_layer, layers=part.layer_count, size_bytes=part.bytes
                )
                for part in self.parts
            ],
            kind=common_pb2.NAMESPACE_KIND_FOREIGN if self.foreign else common_pb2.NAMESPACE_KIND_TOKENS,
            label=label[:MAX_LABEL],
        )

    def _shape(self, part: Part) -> PartShape:
        group = self.layout.groups[part.group]
        if self.layout.packing != CANONICAL_PACKING or group.kind is GroupKind.STATE:
            raise LayoutError("this part is opaque bytes: pass one array per block (Blocks)")
        # int4 is moved as bytes, two values each.
        bits = DTYPE_BITS[group.dtype]
        itemsize, shrink = (bits // _BYTE_BITS, 1) if bits >= _BYTE_BITS else (1, _BYTE_BITS // bits)
        return PartShape(
            kv_heads=part.kv_heads,
            layers=part.layer_count,
            tokens=self.block_tokens,
            k_dim=group.k_dim // shrink,
            v_dim=group.v_dim // shrink,
            itemsize=itemsize,
            scale_bytes=group.scale_bytes,
        )


def _coded_group(coder: Format, layout: Layout, group: LayerGroup, block_tokens: int) -> LayerGroup:
    if layout.packing != CANONICAL_PACKING or group.kind is GroupKind.STATE:
        what = "states" if group.kind is GroupKind.STATE else f"bytes packed as {layout.packing!r}"
        raise CodecError(f"{coder.name} cannot code {what}: nobody here knows the numbers in them; use codec='raw'")
    most(group.dtype)  # raises for numbers that have no coded form
    scales = group.scale_bytes + coder.scale_bytes(block_tokens, group.k_dim, group.v_dim)
    if group.scale_bytes or group.k_dim * coder.bits % _BYTE_BITS or group.v_dim * coder.bits % _BYTE_BITS:
        raise CodecError(
            f"{coder.name} needs KV without scales of its own and head sizes that fill bytes, got {group.k_dim} and "
            f"{group.v_dim}; use codec='raw'"
        )
    return dataclasses.replace(group, dtype=coder.name, scale_bytes=scales)


def _needed(group: LayerGroup, block_tokens: int) -> int:
    if group.kind is GroupKind.STATE:
        return 1
    return group.window_blocks(block_tokens) if group.kind is GroupKind.SLIDING else 1 << 40


def _group(group: LayerGroup) -> common_pb2.LayerGroup:
    bits = DTYPE_BITS[group.dtype]
    k_bits, v_bits = group.k_dim * bits, group.v_dim * bits
    if k_bits % _BYTE_BITS or v_bits % _BYTE_BITS:
        raise LayoutError(f"{group.k_dim} or {group.v_dim} values of {group.dtype} do not fill whole bytes")
    k_bytes, v_bytes, scale_bytes = k_bits // _BYTE_BITS, v_bits // _BYTE_BITS, group.scale_bytes
    if group.kind is GroupKind.STATE:
        # The contract counts K and V once per token; a state is there once per block, so it goes by the field that is.
        k_bytes, v_bytes, scale_bytes = 0, 0, k_bytes + v_bytes + scale_bytes
    return common_pb2.LayerGroup(
        kind=_KINDS[group.kind],
        window_tokens=group.window_tokens,
        layers=len(group.layers),
        kv_heads=group.kv_heads,
        k_bytes=k_bytes,
        v_bytes=v_bytes,
        scale_bytes=scale_bytes,
        value_bytes=bits // _BYTE_BITS,
    )
