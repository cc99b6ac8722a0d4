"""Which namespaces a seed may have, what goes wrong in it, and the keys of its prompts."""

from __future__ import annotations

import hashlib

from prefixcache.core.ids import GroupKind, NamespaceKind
from prefixcache.core.spec import GroupSpec, NamespaceSpec, PartSpec
from tests.sim.fakes import HEADS

GRANULE = 4096
TOKENS = 4
FULL = GroupSpec(GroupKind.FULL)
SPECS = (
    NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, HEADS, GRANULE),)),
    NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, HEADS, 2 * GRANULE), PartSpec(0, HEADS, GRANULE))),
    NamespaceSpec(
        TOKENS,
        (FULL, GroupSpec(GroupKind.SLIDING, 2 * TOKENS), GroupSpec(GroupKind.STATE)),
        (PartSpec(0, HEADS, GRANULE), PartSpec(1, HEADS, 2 * GRANULE), PartSpec(2, HEADS, GRANULE)),
    ),
    NamespaceSpec(TOKENS, (GroupSpec(GroupKind.SLIDING, 2 * TOKENS),), (PartSpec(0, HEADS, GRANULE),)),
    NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, HEADS, GRANULE),), NamespaceKind.FOREIGN),
    NamespaceSpec(
        TOKENS, (FULL,), (PartSpec(0, HEADS, 2 * GRANULE), PartSpec(0, HEADS, GRANULE)), NamespaceKind.FOREIGN
    ),
    NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 1, GRANULE, HEADS),)),  # what is a head elsewhere is a layer here
)
STEPS = 60
# What a seed is mostly about: which namespaces it may have, and what goes wrong in it.
FLAVOURS: dict[str, tuple[list[int], list[str]]] = {
    "mixed": ([0, 1, 2, 3, 4], ["session_trouble"] * 3 + ["clear", "faulted_in", "fail_part", "restart"]),
    "sessions": ([0, 1, 2, 3, 4], ["session_trouble"] * 6 + ["clear"]),
    "moves": ([0, 1, 2], ["clear", "fail_part", "session_trouble"]),
    "restarts": ([0, 1, 2, 3, 4], ["restart"] * 3 + ["fail_part"]),
    "patches": ([2, 3], ["clear", "fail_part", "session_trouble"]),
    "shared": ([0, 1, 2, 3, 6], ["session_trouble"] * 4 + ["clear", "fail_part"]),
    "gpu": ([0, 1, 0, 1, 2, 4], ["clear", "clear", "fail_part", "session_trouble", "lose_device"]),
    "gpu_moves": ([0, 1], ["clear", "session_trouble"]),
    "gpu_cuts": ([0], ["cut"]),
    "gpu_lost": ([0, 1], ["lose_device"]),
    "gpu_restarts": ([0, 1], ["restart", "session_trouble", "clear"]),
    "gpu_disk": ([0, 1], ["crash", "clear", "disk_trouble", "flush", "fail_part", "lose_device"]),
    "disk": (
        [0, 1, 0, 1, 2, 3, 4],
        ["crash"] * 2 + ["clear", "disk_trouble", "disk_trouble", "replace_disk", "flush", "fail_part"],
    ),
    "disk_moves": ([0, 1], ["clear", "flush"]),
    "disk_restarts": ([0, 1, 4], ["crash"] * 3 + ["restart"] * 3 + ["clear", "flush"] * 3 + ["session_trouble"]),
    "disk_foreign": (
        [4, 5, 4, 5, 0],
        ["crash"] * 4 + ["restart", "clear", "clear", "disk_trouble", "replace_disk", "flush", "fail_part"],
    ),
    "disk_replaced": ([0, 1, 4], ["replace_disk"] * 4 + ["flush"] * 2 + ["session_trouble", "clear"]),
    "disk_windows": (
        [2, 2, 3],
        ["crash"] * 5 + ["clear", "disk_trouble", "disk_trouble", "replace_disk", "flush", "fail_part"],
    ),
}

# For planted bugs that show without GPU pools and shared reservations; those have their own in test_gpu_simulator and
# test_sharing.
WITHOUT_GPUS = tuple(flavour for flavour in FLAVOURS if "gpu" not in flavour and flavour != "shared")


def chain(letters: str) -> bytes:
    """Packed keys of a prompt given as letters, one a block."""
    key = b"root"
    keys = []
    for letter in letters:
        key = hashlib.sha256(key + letter.encode()).digest()
        keys.append(key)
    return b"".join(keys)
