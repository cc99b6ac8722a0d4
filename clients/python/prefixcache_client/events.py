"""What a watcher is told of blocks that come and go, and what it then knows.

Plain data and a replay; where events come from is not known here (see watching).
"""

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from prefixcache.v1 import admin_pb2, common_pb2

KEY_BYTES: Final = 32


class EventKind(StrEnum):
    """What happened to blocks, or to the stream; see EventKind of the contract for every detail."""

    STORED = "stored"
    REMOVED = "removed"
    MOVED = "moved"
    CLEARED = "cleared"
    GAP = "gap"
    SNAPSHOT_BEGIN = "snapshot_begin"
    SNAPSHOT_END = "snapshot_end"
    KEEPALIVE = "keepalive"
    NAMESPACE = "namespace"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One message of a watch.

    `keys`: consecutive blocks from position `first_block` of their prompts on, below `parent` (b"" at the root), each
    32 bytes, or 8 where no namespace was named. `tier`: "host" (in memory, maybe on disk as well), "disk" (on disk
    only) or "gpu" (copies in GPU pool `pool`, which take nothing from what the other tiers said). `snapshot`: told
    because it is there, not because it is new. `lost`: with a gap, how many events (0: unknown). `label` and
    `block_tokens` come with a namespace's name.
    """

    kind: EventKind
    sequence: int
    fingerprint: bytes = b""
    keys: tuple[bytes, ...] = ()
    parent: bytes = b""
    tier: str = ""
    first_block: int = 0
    snapshot: bool = False
    pool: int = 0
    lost: int = 0
    label: str = ""
    block_tokens: int = 0


def event_of(message: admin_pb2.WatchEventsResponse) -> WatchEvent:
    """The event that the server sent. A kind that this client does not know is UNKNOWN."""
    size = message.key_bytes or KEY_BYTES
    packed = message.keys
    return WatchEvent(
        _KINDS.get(message.kind, EventKind.UNKNOWN),
        message.sequence,
        message.fingerprint,
        tuple(packed[at : at + size] for at in range(0, len(packed), size)),
        message.parent,
        _TIERS.get(message.tier, ""),
        message.first_block,
        message.snapshot,
        message.pool,
        message.lost,
        message.label,
        message.block_tokens,
    )


class KnownBlocks:
    """What a watcher knows is held, by applying every event in its order.

    `synced`: whether that is exactly what the server held at event `sequence`. Between the beginning and the end of a
    snapshot it is a part of it. Not thread-safe.
    """

    def __init__(self) -> None:
        self.synced = False
        self.sequence = 0
        self.tiers: defaultdict[bytes, dict[bytes, str]] = defaultdict(dict)
        """By fingerprint: key -> "host" or "disk"."""
        self.copies: defaultdict[bytes, set[tuple[int, bytes]]] = defaultdict(set)
        """By fingerprint: (pool, key) of copies in GPU memory."""

    def apply(self, event: WatchEvent) -> None:
        """The next event of the stream."""
        self.sequence = event.sequence
        kind = event.kind
        if kind in (EventKind.STORED, EventKind.REMOVED, EventKind.MOVED):
            self._apply_blocks(event)
        elif kind is EventKind.CLEARED:
            self.tiers.pop(event.fingerprint, None)
        elif kind is EventKind.SNAPSHOT_BEGIN:
            self.tiers.clear()
            self.copies.clear()
            self.synced = False
        elif kind is EventKind.SNAPSHOT_END:
            self.synced = True
        elif kind in (EventKind.GAP, EventKind.UNKNOWN):
            self.synced = False

    def leading(self, fingerprint: bytes, keys: bytes) -> int:
        """How many leading blocks of a prompt (packed keys, 32 bytes each) are held, in memory or on disk."""
        tiers = self.tiers.get(fingerprint, {})
        for at in range(0, len(keys), KEY_BYTES):
            if keys[at : at + KEY_BYTES] not in tiers:
                return at // KEY_BYTES
        return len(keys) // KEY_BYTES

    def _apply_blocks(self, event: WatchEvent) -> None:
        if event.tier == "gpu":
            named = {(event.pool, key) for key in event.keys}
            if event.kind is EventKind.STORED:
                self.copies[event.fingerprint] |= named
            else:
                self.copies[event.fingerprint] -= named
            return
        tiers = self.tiers[event.fingerprint]
        if event.kind is EventKind.REMOVED:
            for key in event.keys:
                tiers.pop(key, None)
        else:
            tiers.update(dict.fromkeys(event.keys, event.tier))


_KINDS: Final = {
    admin_pb2.EVENT_KIND_STORED: EventKind.STORED,
    admin_pb2.EVENT_KIND_REMOVED: EventKind.REMOVED,
    admin_pb2.EVENT_KIND_MOVED: EventKind.MOVED,
    admin_pb2.EVENT_KIND_CLEARED: EventKind.CLEARED,
    admin_pb2.EVENT_KIND_GAP: EventKind.GAP,
    admin_pb2.EVENT_KIND_SNAPSHOT_BEGIN: EventKind.SNAPSHOT_BEGIN,
    admin_pb2.EVENT_KIND_SNAPSHOT_END: EventKind.SNAPSHOT_END,
    admin_pb2.EVENT_KIND_KEEPALIVE: EventKind.KEEPALIVE,
    admin_pb2.EVENT_KIND_NAMESPACE: EventKind.NAMESPACE,
}
_TIERS: Final = {common_pb2.TIER_HOST: "host", common_pb2.TIER_DISK: "disk", common_pb2.TIER_GPU: "gpu"}
