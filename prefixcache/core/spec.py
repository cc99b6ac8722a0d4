"""Shapes given from outside: what a block of a namespace consists of, which pools there are, and the bounds.

Belongs here: plain values and their validation. Must not know: keys, slots in use, sessions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixcache.core.ids import HOST_POOL, SLOT_GRANULE, GroupKind, NamespaceKind, PoolId, Tier
from prefixcache.core.policy.names import DEFAULT as DEFAULT_POLICY

MAX_BLOCK_TOKENS = 65_536
MAX_GROUPS = 16
MAX_PARTS = 64  # part masks are one u64
MAX_KV_HEADS = 512
MAX_PART_BYTES = 1 << 40


class SpecError(ValueError):
    """A namespace spec that no pool could ever serve; the text says which field."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One layer group. `window_tokens` is used by `sliding` only (> 0 there, 0 elsewhere)."""

    kind: GroupKind
    window_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One part of a block, numbered by its place in `NamespaceSpec.parts`.

    group: index into `groups`; kv_heads, layers: what commits have to cover, each of the heads (MLA: 1) of each of the
    layers; size_bytes: whole part. layers 0: not told, as in records of earlier runs; then a commit covers all of them.
    """

    group: int
    kv_heads: int
    size_bytes: int
    layers: int = field(default=0, compare=False)

    @property
    def stride_bytes(self) -> int:
        """Bytes a slot of this part takes: size rounded up to SLOT_GRANULE."""
        return -(-self.size_bytes // SLOT_GRANULE) * SLOT_GRANULE


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """Layout of one namespace as far as the core has to know it."""

    block_tokens: int
    groups: tuple[GroupSpec, ...]
    parts: tuple[PartSpec, ...]
    kind: NamespaceKind = NamespaceKind.TOKENS

    def validate(self) -> None:
        """Raises SpecError where a field is out of its bounds or parts and groups do not fit each other."""
        if not 0 < self.block_tokens <= MAX_BLOCK_TOKENS:
            raise SpecError(f"block_tokens must be 1..{MAX_BLOCK_TOKENS}, not {self.block_tokens}")
        if not 0 < len(self.groups) <= MAX_GROUPS:
            raise SpecError(f"groups must be 1..{MAX_GROUPS}, not {len(self.groups)}")
        if not 0 < len(self.parts) <= MAX_PARTS:
            raise SpecError(f"parts must be 1..{MAX_PARTS}, not {len(self.parts)}")
        for index, group in enumerate(self.groups):
            if (group.kind is GroupKind.SLIDING) != (group.window_tokens > 0):
                raise SpecError(f"groups[{index}].window_tokens must be > 0 for sliding groups only")
        for index, part in enumerate(self.parts):
            self._validate_part(index, part)
        if {part.group for part in self.parts} != set(range(len(self.groups))):
            raise SpecError("every group needs at least one part")
        if self.kind is NamespaceKind.FOREIGN and any(group.kind is not GroupKind.FULL for group in self.groups):
            raise SpecError("a foreign namespace has full groups only")

    def _validate_part(self, index: int, part: PartSpec) -> None:
        if not 0 <= part.group < len(self.groups):
            raise SpecError(f"parts[{index}].group must name one of {len(self.groups)} groups, not {part.group}")
        if not 0 < part.kv_heads <= MAX_KV_HEADS:
            raise SpecError(f"parts[{index}].kv_heads must be 1..{MAX_KV_HEADS}, not {part.kv_heads}")
        if not 0 < part.size_bytes <= MAX_PART_BYTES:
            raise SpecError(f"parts[{index}].size_bytes must be 1..{MAX_PART_BYTES}, not {part.size_bytes}")


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One slab pool. `size_bytes` and `slab_bytes` are multiples of SLOT_GRANULE; a part must fit into one slab."""

    size_bytes: int
    slab_bytes: int = 64 << 20
    pool: PoolId = HOST_POOL
    tier: Tier = Tier.HOST


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on everything a client can make grow. Beyond one of them an event is refused with RESOURCE_EXHAUSTED."""

    max_sessions: int = 4_096
    max_namespaces: int = 4_096
    max_leases_per_session: int = 4_096
    max_reservations_per_session: int = 1_024
    max_keys: int = 262_144  # of one call: 16M tokens at 64 a block
    max_ttl_s: float = 3_600.0
    min_ttl_s: float = 0.001
    recent_ends: int = 4_096  # ended commits and leases whose outcome a retry can still learn
    max_bare_blocks: int = 1 << 20  # rows of one namespace without a full group: links need no slot
    max_pins: int = 1_024
    max_parked: int = 1_024  # acquires waiting for a verification


@dataclass(frozen=True, slots=True)
class DiskSpec:
    """How the disk tier is used. Bytes are of payload.

    segment_bytes: of a new segment. reserve_share: of the host pool, kept free or clean ahead of need. job_bytes: most
    of one write; writing_bytes, loading_bytes: most under way, together. early_bytes_per_day: for blocks written before
    they have to be. read_bytes_per_s, read_latency_s: believed until measured.
    """

    segment_bytes: int = 256 << 20
    reserve_share: float = 0.02
    job_bytes: int = 32 << 20
    writing_bytes: int = 64 << 20
    loading_bytes: int = 1 << 30
    early_bytes_per_day: int = 1 << 40
    read_bytes_per_s: float = 1e9
    read_latency_s: float = 0.0005


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """How GPU pools are used. moving_bytes: most bytes under way to one of them; job_bytes: most of one copy."""

    moving_bytes: int = 256 << 20
    job_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """What a planner is built from.

    first_generation: the counter's start, from the server's incarnation, so that no restart repeats a generation (> 0).
    ready_bytes: how much of each pool is pre-faulted at start; more by `CapacityReady`. None: all of it.
    policy: which leaf goes first, one of `policy.names`; policy_seed: for those that draw lots.
    publish: whether `Published` commands are made; checksum: whether `ComputeChecksum` commands are made.
    """

    pools: tuple[PoolSpec, ...]
    first_generation: int = 1
    ready_bytes: int | None = None
    policy: str = DEFAULT_POLICY
    policy_seed: int = 0
    priority_fades_s: float = 3_600.0  # a block that was not used for so long has no priority any more
    pin_bytes: int = 0  # of slots that pinned blocks may take, together
    publish: bool = False
    checksum: bool = False
    disk: DiskSpec | None = None  # there is a disk tier
    gpu: GpuSpec = field(default_factory=GpuSpec)
    limits: Limits = field(default_factory=Limits)
