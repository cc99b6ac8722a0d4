"""Everything the core can answer: replies to a caller and orders to the executor, in the order they are to be done.

Belongs here: plain values. Must not know: who carries them out.
An order that stands before a reply is done before that reply leaves (`SetGenerations` before `Reserved`).
Every order that begins something asynchronous (CopySlots, PromoteSlots, ComputeChecksum, VerifyParts) ends in exactly
one Done event; of those about records each record ends exactly once.
Not frozen, for the same reason as the events; treat as immutable. Arrays are not copied again: do not write to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.copying import PartCopy as PartCopy
from prefixcache.core.copying import PromoteSlots as PromoteSlots
from prefixcache.core.ids import Generations, LeaseId, NamespaceId, PoolId, ReservationId, Rows, SessionId, Slots, Tier
from prefixcache.core.pin_messages import PinEnded, PinReply
from prefixcache.core.reasons import Kind, Miss, Refusal, Skip


@dataclass(slots=True)
class Refused:
    """The one negative answer. kind: canonical gRPC code name; metadata: facts for the message, never key material.
    subject: the lease, reservation or session it is about (empty: none): an Acquire may be answered in a later call."""

    kind: Kind
    reason: Refusal
    message: str
    subject: bytes = b""
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class SessionReady:
    session: SessionId


@dataclass(slots=True)
class SessionClosed:
    """quarantined_slots: how many slots wait for ProcessExited (0: the session is forgotten)."""

    session: SessionId
    quarantined_slots: int


@dataclass(slots=True)
class NamespaceReady:
    """The id that counts, and the bytes a slot of each part takes."""

    namespace: NamespaceId
    strides: tuple[int, ...]


@dataclass(slots=True)
class Run:
    """One part of `len(slots)` consecutive blocks from `first_block`, all in one pool.

    The reader compares `generations` with the control page after its copy; a difference is `lease_lost`. Both are kept
    packed (u32, u64), which is how they travel."""

    part: int
    first_block: int
    pool: PoolId
    packed_slots: bytes
    packed_generations: bytes

    @property
    def slots(self) -> Slots:
        """u32[n], read-only."""
        return np.frombuffer(self.packed_slots, np.uint32)

    @property
    def generations(self) -> Generations:
        """u64[n], read-only."""
        return np.frombuffer(self.packed_generations, np.uint64)


@dataclass(slots=True)
class Acquired:
    """Blocks `[from_block, from_block + planned_blocks)` are promised; `ready_blocks` of them can be read.

    planned_blocks 0: there is no lease and nothing to release. stop: why it ends there, None if every key was hit.
    tokens: planned tokens by tier, indexed by `Tier`. runs: full groups whole, sliding and state groups only what the
    prefix needs. present (foreign only): bool[n] over keys from `from_block`; planned_blocks is then its sum.
    """

    lease: LeaseId
    from_block: int
    planned_blocks: int
    ready_blocks: int
    runs: tuple[Run, ...]
    stop: Miss | None
    tokens: tuple[int, int, int, int]
    expires_at: float
    present: NDArray[np.bool_] | None = None
    eta_s: float = 0.0  # when the last planned block should be ready, from now


@dataclass(slots=True)
class LeaseExtended:
    lease: LeaseId
    expires_at: float


@dataclass(slots=True)
class Released:
    """A lease ended; what became of its tokens."""

    lease: LeaseId
    hit_tokens: int
    missed_tokens: int


@dataclass(slots=True)
class LeaseEnded:
    """A lease ended without its worker's word (expired, session gone): stop its arrivals."""

    lease: LeaseId
    session: SessionId
    reason: Miss


@dataclass(slots=True)
class LookedUp:
    """Longest restorable prefix from block 0, in blocks, its tokens behind `from_block` by tier, and how long those on
    disk would take to load."""

    matched_blocks: int
    tokens: tuple[int, int, int, int]
    stop: Miss | None
    present: NDArray[np.bool_] | None = None
    load_s: float = 0.0


@dataclass(slots=True)
class Grant:
    """Slots of one part, one per granted block; NO_SLOT where that block has this part already."""

    part: int
    pool: PoolId
    slots: Slots


@dataclass(slots=True)
class Reserved:
    """blocks: u32[n], ascending numbers in the chain that may be written (foreign: places in the keys). generation: of
    all its slots. skipped: blocks not granted, by reason. Zero blocks: there is no reservation and nothing to end."""

    reservation: ReservationId
    blocks: NDArray[np.uint32]
    grants: tuple[Grant, ...]
    generation: int
    skipped: dict[Skip, int]
    expires_at: float


@dataclass(slots=True)
class Committed:
    """stored: blocks that became visible or will when their parent does; dropped: by reason; open_blocks: still to be
    filled; over: the reservation is."""

    reservation: ReservationId
    stored: int
    dropped: dict[Skip, int]
    open_blocks: int
    over: bool = False


@dataclass(slots=True)
class Aborted:
    reservation: ReservationId
    freed_slots: int


@dataclass(slots=True)
class ReservationEnded:
    """A reservation ran out, a session of it ended, or one of several writers gave it up. quarantined_slots wait for
    the Commit, Abort or exit of all who may still write. session: that which asked first."""

    reservation: ReservationId
    session: SessionId
    quarantined_slots: int


@dataclass(slots=True)
class SetGenerations:
    """Write `generation` into the control page at every one of `slots`, before the reply that follows."""

    pool: PoolId
    slots: Slots
    generation: int


@dataclass(slots=True)
class CopySlots:
    """Copy `slot_bytes` from each source to the target at the same place. Ends in CopyDone(copy)."""

    copy: int
    pool: PoolId
    sources: Slots
    targets: Slots
    slot_bytes: int


@dataclass(slots=True)
class ComputeChecksum:
    """xxh3-128 over the first `size_bytes` of each slot. Ends in ChecksumDone with the same rows and generations."""

    namespace: NamespaceId
    part: int
    pool: PoolId
    size_bytes: int
    rows: Rows
    slots: Slots
    generations: Generations


@dataclass(slots=True)
class PartCheck:
    """Expected digests u8[n, 16] of one part's rows."""

    part: int
    pool: PoolId
    size_bytes: int
    rows: Rows
    slots: Slots
    digests: NDArray[np.uint8]


@dataclass(slots=True)
class VerifyParts:
    """Compare bytes with their digests. Ends in VerifyDone(check), before the Acquire that asked is answered."""

    check: int
    namespace: NamespaceId
    parts: tuple[PartCheck, ...]


@dataclass(slots=True)
class Records:
    """n records of one namespace, in the order in which they are best written or read. keys and parents: packed, n x 32
    (a parent of zeros: none); depths: number of the block in its chain; segments and pages: where they are on disk
    (zeros for what is to be written). All arrays u32[n] but parts, u16[n]."""

    namespace: NamespaceId
    parts: NDArray[np.uint16]
    rows: Rows
    slots: Slots
    segments: NDArray[np.uint32]
    pages: NDArray[np.uint32]
    keys: bytes
    parents: bytes
    depths: NDArray[np.uint32]


@dataclass(slots=True)
class WriteRecords:
    """Append the bytes of these slots to the log. Ends in RecordsWritten events, each record in exactly one. Until then
    the slots keep their bytes, whatever happens to their blocks."""

    job: int
    pool: PoolId
    records: Records
    digests: NDArray[np.uint8] | None = None  # u8[n, 16], zeros where it is not known


@dataclass(slots=True)
class ReadRecords:
    """Read these records into their slots, nearest first. Ends in RecordsRead events, each record in exactly one. Until
    then the slots belong to the read."""

    job: int
    pool: PoolId
    records: Records


@dataclass(slots=True)
class CancelReads:
    """What has not begun of a job's reads is not wanted any more. It ends all the same, as failed."""

    job: int


@dataclass(slots=True)
class FreeSegment:
    """Append `keep` (which lie in it) again, then give the segment's room back. Ends in SegmentFreed."""

    segment: int
    keep: tuple[Records, ...]


@dataclass(slots=True)
class RevokeRecords:
    """Write a tombstone over every record submitted before now: of these keys; of the namespace (keys None); of all
    (namespace None)."""

    namespace: NamespaceId | None
    keys: bytes | None


@dataclass(slots=True)
class MoreToDo:
    """There is something that need not be done before an answer. Ends in WorkResumed, when nobody waits for one."""


@dataclass(slots=True)
class Arrived:
    """More of a lease can be read: `ready_blocks` of its planned ones from now on, `runs` those that are new. stop: the
    rest will not come, for this reason. done: nothing more will be told of this lease."""

    lease: LeaseId
    session: SessionId
    ready_blocks: int
    runs: tuple[Run, ...]
    stop: Miss | None
    done: bool


@dataclass(slots=True)
class Cleared:
    """blocks: out of sight now; leased_blocks of them keep their slots until their leases end."""

    blocks: int
    leased_blocks: int


@dataclass(slots=True)
class NamespaceForgotten:
    """A namespace that held nothing made room for another; its number is free."""

    namespace: NamespaceId


@dataclass(slots=True)
class DrainFinished:
    """No reservation is left and none will come. No reply: it may stand behind the answer to the last Commit."""


@dataclass(slots=True)
class SnapshotTaken:
    """Plain dicts, lists, ints, strings and bytes only (msgpack-able)."""

    snapshot: dict[str, Any]


@dataclass(slots=True)
class SnapshotLoaded:
    namespaces: int
    blocks: int


class Change(StrEnum):
    """MOVED: blocks that stay are somewhere else now. CLEARED: a whole namespace."""

    STORED = "stored"
    REMOVED = "removed"
    MOVED = "moved"
    CLEARED = "cleared"


@dataclass(slots=True)
class Published:
    """For WatchEvents, in the order in which it happened. keys: packed, consecutive blocks from `first_block`, below
    `parent` (empty: the root); none with CLEARED. tier: HOST is in memory, maybe on disk as well, DISK is on disk only;
    a block is in one of them at a time, MOVED tells a change. GPU is about copies only, STORED and REMOVED, and takes
    nothing from what the others said; each of its pools for itself."""

    change: Change
    namespace: NamespaceId
    fingerprint: bytes
    keys: bytes
    parent: bytes
    first_block: int
    tier: Tier
    pool: PoolId = 0


Reply: TypeAlias = (
    Refused | SessionReady | SessionClosed | NamespaceReady | Acquired | LeaseExtended | Released | LookedUp
    | Reserved | Committed | Aborted | PinReply | Cleared | SnapshotTaken | SnapshotLoaded
)  # fmt: skip
Order: TypeAlias = (
    SetGenerations | CopySlots | ComputeChecksum | VerifyParts | PromoteSlots | WriteRecords | ReadRecords
    | CancelReads | FreeSegment | RevokeRecords | MoreToDo
    | LeaseEnded | ReservationEnded | PinEnded | DrainFinished | NamespaceForgotten | Published | Arrived
)  # fmt: skip
Command: TypeAlias = Reply | Order
