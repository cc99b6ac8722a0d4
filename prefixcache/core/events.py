"""Everything that can happen to the core, in the past tense. `Planner.handle(event, now)` takes exactly these.

Belongs here: plain values. Must not know: what the planner makes of them (its commands say).
Not frozen: a frozen dataclass costs three times as much to make, and these are made once per RPC. Treat as immutable.
All times are seconds on the caller's monotonic clock, all ids 16 bytes, all keys packed `n x 32` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.disk_events import DiskChanged as DiskChanged
from prefixcache.core.disk_events import DiskForgotten as DiskForgotten
from prefixcache.core.disk_events import DiskMeasured as DiskMeasured
from prefixcache.core.disk_events import DiskRecovered as DiskRecovered
from prefixcache.core.disk_events import FlushStarted as FlushStarted
from prefixcache.core.disk_events import RecoveryDone as RecoveryDone
from prefixcache.core.disk_events import SegmentLost as SegmentLost
from prefixcache.core.disk_events import WorkResumed as WorkResumed
from prefixcache.core.ids import Generations, LeaseId, NamespaceId, PoolId, ReservationId, Rows, SessionId
from prefixcache.core.pin_messages import PinEvent
from prefixcache.core.reasons import Miss
from prefixcache.core.spec import NamespaceSpec
from prefixcache.core.table import NORMAL

ALL_PARTS = (1 << 64) - 1


@dataclass(slots=True)
class SessionOpened:
    """A worker (or one engine with all its ranks) came. Answer: SessionReady | Refused.

    can_map: it writes slots itself through a mapping, so its filling slots only come back by Commit, Abort or
    ProcessExited. False: the daemon writes for it (`WriteBlocks`), its slots come back at once when it ends; the shell
    must then end its own write before it reports the end or lets the reservation run out.
    gpu_pools: GPU pools that it maps, so that it can be told of copies in them.
    """

    session: SessionId
    can_map: bool
    name: str = ""
    gpu_pools: tuple[PoolId, ...] = ()


@dataclass(slots=True)
class SessionEnded:
    """Goodbye, TTL over, or end of file. Leases and keys are free at once. Answer: SessionClosed | Refused."""

    session: SessionId


@dataclass(slots=True)
class ProcessExited:
    """The process behind a session is gone for sure (pidfd), so nobody writes its slots any more.
    Answer: SessionClosed (also when SessionEnded came before) | Refused."""

    session: SessionId


@dataclass(slots=True)
class NamespaceOpened:
    """A layout was registered. `namespace` is the id to give it if the fingerprint is new; the answer names the id
    that counts. Answer: NamespaceReady | Refused."""

    namespace: NamespaceId
    fingerprint: bytes
    spec: NamespaceSpec


@dataclass(slots=True)
class AcquireRequested:
    """The longest restorable prefix of a prompt is wanted. Answer: Acquired | Refused (later, if bytes must be
    verified first: VerifyParts).

    keys: the chain from block 0 (also for blocks below `from_block`, which the engine has itself and which are not
    looked up). prompt_tokens: whole prompt length; what lies behind the last key is the miss `partial_block`.
    """

    session: SessionId
    lease: LeaseId
    namespace: NamespaceId
    keys: bytes
    from_block: int
    prompt_tokens: int
    ttl_s: float
    max_blocks: int | None = None
    deadline_s: float = 0.0  # how long the worker would wait for what is on disk
    recompute_s_per_token: float = 0.0  # what a token costs it to compute; 0: not known


@dataclass(slots=True)
class LeaseRenewed:
    """Answer: LeaseExtended | Refused."""

    session: SessionId
    lease: LeaseId
    ttl_s: float


@dataclass(slots=True)
class LeaseReleased:
    """The worker is done. The first `used_blocks` planned blocks were a hit (None: all), the others the miss `unused`.
    Answer: Released | Refused."""

    session: SessionId
    lease: LeaseId
    used_blocks: int | None = None
    unused: Miss = Miss.UNUSED


@dataclass(slots=True)
class LookupRequested:
    """As AcquireRequested without a pin, a session or a trace in the LRU order. Answer: LookedUp | Refused."""

    namespace: NamespaceId
    keys: bytes
    from_block: int = 0


@dataclass(slots=True)
class ReserveRequested:
    """Slots are wanted for what is missing of `keys[from_block:]`. Answer: Reserved | Refused.

    keys: the chain from block 0. parents (foreign namespaces only): None, or 32 bytes per key, zeros for no parent.
    part_mask: bit p set = part p will be written. priority (table.LOW, NORMAL, HIGH): of new blocks; those of `keys`
    that are stored get it as well, if it is higher than theirs. shared: several sessions ask for the same and fill it.
    """

    session: SessionId
    reservation: ReservationId
    namespace: NamespaceId
    keys: bytes
    from_block: int
    ttl_s: float
    parents: bytes | None = None
    part_mask: int = ALL_PARTS
    priority: int = NORMAL
    shared: bool = False


@dataclass(slots=True)
class Coverage:
    """What one writer has filled: blocks (numbers in the chain; in a foreign namespace places in the reserved keys), of
    one part, of so many heads and layers (None: to the last), each from a first one on."""

    first_block: int
    block_count: int
    part: int
    first_head: int = 0
    head_count: int | None = None
    first_layer: int = 0
    layer_count: int | None = None


@dataclass(slots=True)
class CommitRequested:
    """Slots were filled. coverage None: all that was granted (not where it is shared). more: another commit by this
    session follows. Answer: Committed | Refused."""

    session: SessionId
    reservation: ReservationId
    coverage: tuple[Coverage, ...] | None = None
    more: bool = False


@dataclass(slots=True)
class AbortRequested:
    """The writer gives up and writes no more; what was not made visible comes back. shared: also where it never asked.
    Answer: Aborted | Refused."""

    session: SessionId
    reservation: ReservationId
    shared: bool = False


@dataclass(slots=True)
class CopyDone:
    """A CopySlots ended. Answer: nothing, or Refused when there is no such copy."""

    copy: int
    ok: bool


@dataclass(slots=True)
class PromotionDone:
    """A PromoteSlots ended. Answer: nothing, or Refused when there is no such copy."""

    copy: int
    ok: bool


@dataclass(slots=True)
class DeviceLost:
    """A GPU pool cannot be used any more; what is being copied to it ends as failed all the same. Answer: nothing."""

    pool: PoolId
    reason: str


@dataclass(slots=True)
class ChecksumDone:
    """A ComputeChecksum ended: digests u8[n, 16] in the order of `rows`, or None if it failed."""

    namespace: NamespaceId
    part: int
    rows: Rows
    generations: Generations
    digests: NDArray[np.uint8] | None


@dataclass(slots=True)
class VerifyDone:
    """A VerifyParts ended; `failed` holds (part, row) of what did not verify."""

    check: int
    failed: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class PartFailedVerification:
    """Bytes of a part were found wrong by whoever read them. The block and all that follows it leave.
    Answer: Cleared | Refused (stale)."""

    namespace: NamespaceId
    part: int
    row: int
    generation: int


@dataclass(slots=True)
class CapacityReady:
    """The first `ready_bytes` of a pool are pre-faulted (and pinned). Only ever grows."""

    pool: PoolId
    ready_bytes: int


@dataclass(slots=True)
class ClearRequested:
    """Forget what is stored: everything (namespace None), one namespace, or what has the chain `keys` as its prefix.
    Leased blocks are out of sight at once and free with their last lease; pins that reach there end.
    own_tail (with keys): only what no other prompt goes through, from the end of the prefix on. gently: refused, and
    nothing changes, where any of it is leased, pinned or being stored. Answer: Cleared | Refused."""

    namespace: NamespaceId | None = None
    keys: bytes | None = None
    own_tail: bool = False
    gently: bool = False


@dataclass(slots=True)
class DrainStarted:
    """No reservation is granted from now on. Answer: DrainFinished once no reservation is left (maybe at once)."""


@dataclass(slots=True)
class SnapshotRequested:
    """For a warm restart, after the drain. Answer: SnapshotTaken | Refused (a reservation is still open)."""


@dataclass(slots=True)
class SnapshotRestored:
    """The snapshot of an earlier planner over the same pool bytes, before anything else happened. Parts are verified on
    first use. Answer: SnapshotLoaded | Refused (nothing is kept then)."""

    snapshot: dict[str, Any]


class WriteEnd(IntEnum):
    """How a record's write ended."""

    OK = 0
    NO_ROOM = 1  # the cap: a segment must be freed first
    FAILED = 2
    CORRUPT = 3  # the bytes in memory are not those that were committed


class ReadEnd(IntEnum):
    """How a record's read ended."""

    OK = 0
    LOST = 1  # it is not there, or not whole: it will never be
    FAILED = 2  # not now; the record may still be good


@dataclass(slots=True)
class ArrivalsCancelled:
    """The worker waits no more for what is still to come of a lease. Answer: nothing (Arrived says that it ends)."""

    session: SessionId
    lease: LeaseId


@dataclass(slots=True)
class RecordsWritten:
    """Some records of a WriteRecords ended. index: u32[k], their places in it; ends: u8[k] of WriteEnd; segments and
    pages: u32[k], where they are now. room_bytes: what the cap leaves for new segments. Answer: nothing, or Refused
    when there is no such job."""

    job: int
    index: NDArray[np.uint32]
    ends: NDArray[np.uint8]
    segments: NDArray[np.uint32]
    pages: NDArray[np.uint32]
    room_bytes: int


@dataclass(slots=True)
class RecordsRead:
    """Some records of a ReadRecords ended; their bytes were compared with the checksum of the record. index: u32[k];
    ends: u8[k] of ReadEnd. Answer: nothing, or Refused when there is no such job."""

    job: int
    index: NDArray[np.uint32]
    ends: NDArray[np.uint8]


@dataclass(slots=True)
class SegmentFreed:
    """A FreeSegment ended. freed: the segment is gone (else it stays as it was). kept: for each of the `keep` records,
    in order, (ends u8 of WriteEnd, segments u32, pages u32): where they are now. Answer: nothing, or Refused."""

    segment: int
    freed: bool
    kept: tuple[tuple[NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint32]], ...]
    room_bytes: int


@dataclass(slots=True)
class TimePassed:
    """Nothing but time. Leases and reservations whose time is over end (every other event does this as well)."""


Event: TypeAlias = (
    SessionOpened
    | SessionEnded
    | ProcessExited
    | NamespaceOpened
    | AcquireRequested
    | LeaseRenewed
    | LeaseReleased
    | LookupRequested
    | ReserveRequested
    | PinEvent
    | CommitRequested
    | AbortRequested
    | CopyDone
    | PromotionDone
    | DeviceLost
    | ChecksumDone
    | VerifyDone
    | PartFailedVerification
    | CapacityReady
    | ClearRequested
    | DrainStarted
    | SnapshotRequested
    | SnapshotRestored
    | ArrivalsCancelled
    | RecordsWritten
    | RecordsRead
    | SegmentFreed
    | DiskRecovered
    | RecoveryDone
    | SegmentLost
    | DiskForgotten
    | DiskMeasured
    | DiskChanged
    | FlushStarted
    | WorkResumed
    | TimePassed
)
