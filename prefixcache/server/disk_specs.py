"""Namespace specs as they stand in the disk tier's book, so that a restart knows what its records are parts of.

Form 2 also tells how large one number is in each group (see LayerGroup.value_bytes); form 1, of earlier versions, does
not. It must not know files or the tier.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from prefixcache.core.ids import GroupKind, NamespaceKind
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec

_LARGEST_VALUE: Final = 8


def pack_spec(label: str, spec: NamespaceSpec, value_bytes: tuple[int, ...] = ()) -> bytes:
    """A namespace as it stands in the log's book. `value_bytes`: by group, as far as they were told."""
    groups = [[group.kind.value, group.window_tokens] for group in spec.groups]
    parts = [[part.group, part.kv_heads, part.size_bytes] for part in spec.parts]
    return msgspec.msgpack.encode([2, label, spec.block_tokens, spec.kind.value, groups, parts, value_bytes])


def unpack_spec(packed: bytes) -> tuple[str, NamespaceSpec, tuple[int, ...]]:
    """(label, spec, bytes of one number by group, empty in form 1).

    Raises ValueError, TypeError, SpecError or msgspec.DecodeError for anything else.
    """
    told: Sequence[Any] = msgspec.msgpack.decode(packed)
    version, label, block_tokens, kind, groups, parts, *more = told
    if version not in (1, 2):
        raise ValueError(f"namespace in form {version}")
    value_bytes = tuple(int(size) for size in more[0]) if more else ()
    if len(value_bytes) not in (0, len(groups)) or any(not 0 <= size <= _LARGEST_VALUE for size in value_bytes):
        raise ValueError(f"sizes of numbers {value_bytes} for {len(groups)} groups")
    spec = NamespaceSpec(
        int(block_tokens),
        tuple(GroupSpec(GroupKind(name), int(window)) for name, window in groups),
        tuple(PartSpec(int(group), int(heads), int(size)) for group, heads, size in parts),
        NamespaceKind(kind),
    )
    spec.validate()
    return str(label), spec, value_bytes
