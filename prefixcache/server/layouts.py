"""NamespaceSpec messages, checked: what comes over the wire becomes the core's spec, or a refusal that names the
field.

Sizes are recomputed with whole numbers, so nothing overflows here; what would not fit u64 elsewhere is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prefixcache.core.ids import GroupKind, NamespaceKind
from prefixcache.core.spec import MAX_GROUPS, MAX_PARTS, GroupSpec, NamespaceSpec, PartSpec, SpecError
from prefixcache.server.errors import CallError
from prefixcache.v1 import common_pb2 as pb

_MAX_BLOCK_BYTES: Final = 1 << 36
_MAX_LABEL: Final = 200
_FINGERPRINT_BYTES: Final = 32
_MOST_VALUE_BYTES: Final = 8
_GROUP_KINDS: Final[Mapping[int, GroupKind]] = {
    pb.GROUP_KIND_FULL: GroupKind.FULL,
    pb.GROUP_KIND_SLIDING: GroupKind.SLIDING,
    pb.GROUP_KIND_STATE: GroupKind.STATE,
}
_KINDS: Final[Mapping[int, NamespaceKind]] = {
    pb.NAMESPACE_KIND_UNSPECIFIED: NamespaceKind.TOKENS,
    pb.NAMESPACE_KIND_TOKENS: NamespaceKind.TOKENS,
    pb.NAMESPACE_KIND_FOREIGN: NamespaceKind.FOREIGN,
}


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace as the shell knows it. `part_bytes` by part number; `head_bytes` is one KV head's share of each."""

    number: int
    fingerprint: bytes
    label: str
    spec: NamespaceSpec
    part_bytes: tuple[int, ...]
    head_bytes: tuple[int, ...]
    value_bytes: tuple[int, ...] = ()
    """By group: size of one number, 0 for unknown; empty where nobody has told yet."""

    @property
    def block_bytes(self) -> int:
        """Bytes of all parts of a block."""
        return sum(self.part_bytes)


def check(message: pb.NamespaceSpec) -> NamespaceSpec:
    """The core's spec. Raises CallError (BAD_LAYOUT) for anything that cannot be a layout."""
    _check_identity(message)
    if len(message.groups) > MAX_GROUPS or len(message.parts) > MAX_PARTS:
        raise _bad(f"at most {MAX_GROUPS} groups and {MAX_PARTS} parts")
    groups = tuple(_group(index, group) for index, group in enumerate(message.groups))
    parts = tuple(_part(message, index, part) for index, part in enumerate(message.parts))
    _check_cover(message)
    total = sum(part.size_bytes for part in parts)
    if total > _MAX_BLOCK_BYTES:
        raise _bad(f"a block would be {total} bytes, more than {_MAX_BLOCK_BYTES}")
    spec = NamespaceSpec(message.block_tokens, groups, parts, _KINDS[message.kind])
    try:
        spec.validate()
    except SpecError as error:
        raise _bad(str(error)) from error
    return spec


def _check_identity(message: pb.NamespaceSpec) -> None:
    if len(message.fingerprint) != _FINGERPRINT_BYTES:
        raise _bad(f"fingerprint must be {_FINGERPRINT_BYTES} bytes, got {len(message.fingerprint)}")
    if message.root_key and len(message.root_key) != _FINGERPRINT_BYTES:
        raise _bad(f"root_key must be empty or {_FINGERPRINT_BYTES} bytes, got {len(message.root_key)}")
    if len(message.label) > _MAX_LABEL:
        raise _bad(f"label must be at most {_MAX_LABEL} characters, got {len(message.label)}")
    if message.kind not in _KINDS:
        raise _bad(f"namespace kind {message.kind} is unknown to this server")


def value_bytes(message: pb.NamespaceSpec) -> tuple[int, ...]:
    """By group: size of one number of K or V, 0 where the client does not say or says nonsense."""
    return tuple(group.value_bytes if group.value_bytes <= _MOST_VALUE_BYTES else 0 for group in message.groups)


def head_bytes(spec: NamespaceSpec) -> tuple[int, ...]:
    """Bytes of one KV head in each part."""
    return tuple(part.size_bytes // part.kv_heads for part in spec.parts)


def _group(index: int, group: pb.LayerGroup) -> GroupSpec:
    kind = _GROUP_KINDS.get(group.kind)
    if kind is None:
        raise _bad(f"groups[{index}].kind {group.kind} is unset or unknown to this server")
    for name in ("layers", "kv_heads", "k_bytes"):
        if getattr(group, name) == 0:
            raise _bad(f"groups[{index}].{name} must be above 0")
    return GroupSpec(kind, group.window_tokens)


def _part(message: pb.NamespaceSpec, index: int, part: pb.Part) -> PartSpec:
    if part.group >= len(message.groups):
        raise _bad(f"parts[{index}].group must be one of {len(message.groups)} groups, got {part.group}")
    group = message.groups[part.group]
    # A state is one row at the block's end, whatever the block's length.
    rows = 1 if group.kind == pb.GROUP_KIND_STATE else message.block_tokens
    size = group.kv_heads * part.layers * (rows * (group.k_bytes + group.v_bytes) + group.scale_bytes)
    if size > _MAX_BLOCK_BYTES:
        raise _bad(f"parts[{index}] would be {size} bytes, more than {_MAX_BLOCK_BYTES}")
    if size != part.size_bytes:
        raise _bad(f"parts[{index}].size_bytes is {part.size_bytes}, but its group's layers make {size}")
    return PartSpec(part.group, group.kv_heads, size, part.layers)


def _check_cover(message: pb.NamespaceSpec) -> None:
    """Every layer of every group must lie in exactly one part."""
    for number, group in enumerate(message.groups):
        reached = 0
        for first, layers in sorted((part.first_layer, part.layers) for part in message.parts if part.group == number):
            if first != reached or layers == 0:
                raise _bad(f"the parts of groups[{number}] must cover its layers once, in ranges; see layer {reached}")
            reached += layers
        if reached != group.layers:
            raise _bad(f"the parts of groups[{number}] cover {reached} of its {group.layers} layers")


def _bad(message: str) -> CallError:
    return CallError(pb.REASON_BAD_LAYOUT, message)
