"""Every reason the core may give for not doing something. A reason is counted wherever it is given.

Belongs here: enums only. Values are what goes over the wire and into metrics, so they never change meaning.
"""

from __future__ import annotations

from enum import StrEnum


class Miss(StrEnum):
    """Why looked-up tokens were not a hit (the closed sum of design rule 6 is kept by these)."""

    NOT_STORED = "not_stored"
    BEING_WRITTEN = "being_written"
    GROUP_GAP = "group_gap"  # a sliding or state group lacks what the prefix would need
    PARTIAL_BLOCK = "partial_block"  # tokens behind the last whole block whose key was sent
    BEYOND_LIMIT = "beyond_limit"  # stored, but more than the caller's max_blocks
    UNUSED = "unused"  # promised, and the worker did not use it
    LEASE_LOST = "lease_lost"  # the worker saw another generation after its copy
    LEASE_EXPIRED = "lease_expired"
    SESSION_ENDED = "session_ended"
    COPY_FAILED = "copy_failed"
    DEADLINE = "deadline"
    CLIENT_ERROR = "client_error"
    CHECKSUM = "checksum"  # bytes did not verify
    SLOWER_THAN_RECOMPUTE = "slower_than_recompute"
    POOL_FULL = "pool_full"  # on disk, and no slot to load it to
    TIER_OFF = "tier_off"  # on disk, which cannot be read now


class Skip(StrEnum):
    """Why Reserve did not grant a block, or a granted one did not become visible."""

    ALREADY_STORED = "already_stored"
    BEING_WRITTEN = "being_written"
    POOL_FULL = "pool_full"
    NOT_WORTH_IT = "not_worth_it"  # the policy finds it worth less than what would have to leave for it
    PARENT_MISSING = "parent_missing"
    PARTS_MISSING = "parts_missing"  # a new block needs every part of every full group
    DRAINING = "draining"
    QUOTA = "quota"  # a bound on blocks per reservation or bytes per session
    ORPHANED = "orphaned"  # its parent left before it could be seen
    RAN_OUT = "ran_out"  # granted, and not written in time
    WRITER_GONE = "writer_gone"  # granted, and the session of a writer ended
    CALLED_OFF = "called_off"  # granted, and a writer gave it up


class DiskDrop(StrEnum):
    """Why blocks are not, or no longer, on disk. Counted in blocks."""

    UNWRITTEN = "dropped_unwritten"  # left memory before they were written
    WITH_PARENT = "with_parent"  # were on disk below one that left
    NOT_WANTED = "not_wanted"  # their segment was freed
    WRITE_FAILED = "write_failed"
    NO_ROOM = "no_room"  # the cap left no room when they were to be written
    LOST = "lost"  # the record was not there any more, or not whole
    ORPHANED = "orphaned"  # found after a restart without what stands in front of them
    CLEARED = "cleared"


class PromotionSkip(StrEnum):
    """Why hot blocks got no copy in GPU memory. Counted in blocks."""

    LAYOUT = "layout"  # a namespace with sliding or state groups, or of opaque keys
    BUSY = "busy"  # as many bytes as may be under way are
    THRASHING = "thrashing"  # the pool is full, and most of what left it had not been read there
    NO_ROOM = "no_room"  # all that could be dropped for them is leased, or a part is larger than a slab
    COPY_FAILED = "copy_failed"
    STALE = "stale"  # they, or the copy of what stands in front of them, left meanwhile
    TIER_OFF = "tier_off"


class CopyDrop(StrEnum):
    """Why copies left GPU memory. Counted in blocks."""

    EVICTED = "evicted"
    WITH_HOST = "with_host"  # their block left host memory, or was cleared
    TIER_OFF = "tier_off"


class PinEnd(StrEnum):
    """Why a pin ended without being asked to."""

    EXPIRED = "expired"
    CLEARED = "cleared"


class Kind(StrEnum):
    """Canonical gRPC status names, the only ones the core uses."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    DATA_LOSS = "DATA_LOSS"
    UNAVAILABLE = "UNAVAILABLE"


class Refusal(StrEnum):
    """The reason inside a `Refused`."""

    SESSION_UNKNOWN = "session_unknown"
    SESSION_EXISTS = "session_exists"
    SESSION_ENDED = "session_ended"
    NAMESPACE_UNKNOWN = "namespace_unknown"
    NAMESPACE_MISMATCH = "namespace_mismatch"
    NAMESPACE_TAKEN = "namespace_taken"
    SPEC_INVALID = "spec_invalid"
    BLOCK_TOO_LARGE = "block_too_large"
    KEYS_INVALID = "keys_invalid"
    ID_INVALID = "id_invalid"
    ARGUMENT_INVALID = "argument_invalid"
    LEASE_UNKNOWN = "lease_unknown"
    LEASE_EXPIRED = "lease_expired"
    LEASE_TAKEN = "lease_taken"
    RESERVATION_UNKNOWN = "reservation_unknown"
    RESERVATION_EXPIRED = "reservation_expired"
    RESERVATION_INCOMPLETE = "reservation_incomplete"
    RESERVATION_TAKEN = "reservation_taken"
    FOREIGN_SESSION = "foreign_session"
    TOO_MANY = "too_many"
    COPY_UNKNOWN = "copy_unknown"
    CHECK_UNKNOWN = "check_unknown"
    STALE = "stale"  # the thing it speaks of has moved on since; harmless
    PIN_UNKNOWN = "pin_unknown"
    PIN_TAKEN = "pin_taken"
    PIN_BUDGET = "pin_budget"
    IN_USE = "in_use"  # blocks of it are leased or pinned
    SNAPSHOT_INVALID = "snapshot_invalid"
    SNAPSHOT_NOT_CLEAN = "snapshot_not_clean"
    EVENT_UNKNOWN = "event_unknown"
