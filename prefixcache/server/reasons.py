"""The core's reasons as the contract's, and back. Tables only.

The core tells apart more than the contract; where several become one, the contract's meaning decides.
"""

from collections.abc import Mapping
from typing import Final

from prefixcache.core.commands import Refused
from prefixcache.core.reasons import Miss, Refusal, Skip
from prefixcache.server.errors import CallError, Code
from prefixcache.v1 import common_pb2 as pb

MISS: Final[Mapping[Miss, pb.Reason.ValueType]] = {
    Miss.NOT_STORED: pb.REASON_NOT_CACHED,
    Miss.BEING_WRITTEN: pb.REASON_BEING_WRITTEN,
    Miss.GROUP_GAP: pb.REASON_NO_RESTORABLE_BOUNDARY,
    Miss.PARTIAL_BLOCK: pb.REASON_PARTIAL_BLOCK,
    Miss.BEYOND_LIMIT: pb.REASON_UNUSED,
    Miss.UNUSED: pb.REASON_UNUSED,
    Miss.LEASE_LOST: pb.REASON_LEASE_LOST,
    Miss.LEASE_EXPIRED: pb.REASON_LEASE_LOST,
    Miss.SESSION_ENDED: pb.REASON_WORKER_GONE,
    Miss.COPY_FAILED: pb.REASON_LEASE_LOST,
    Miss.DEADLINE: pb.REASON_DEADLINE,
    Miss.CLIENT_ERROR: pb.REASON_UNUSED,
    Miss.CHECKSUM: pb.REASON_CHECKSUM_MISMATCH,
    Miss.SLOWER_THAN_RECOMPUTE: pb.REASON_SLOWER_THAN_RECOMPUTE,
    Miss.POOL_FULL: pb.REASON_POOL_FULL,
    Miss.TIER_OFF: pb.REASON_TIER_OFF,
}
# As the reason why a prefix ends: the caller's own limit is no reason.
STOP: Final[Mapping[Miss | None, pb.Reason.ValueType]] = {
    None: pb.REASON_UNSPECIFIED,
    **{miss: MISS[miss] for miss in Miss if miss is not Miss.BEYOND_LIMIT},
    Miss.BEYOND_LIMIT: pb.REASON_UNSPECIFIED,
}
# As the reason why not all comes that was to be prefetched.
PREFETCH_STOP: Final[Mapping[Miss | None, pb.Reason.ValueType]] = {**STOP, Miss.BEYOND_LIMIT: pb.REASON_LIMIT}
SKIP: Final[Mapping[Skip, pb.Reason.ValueType]] = {
    Skip.ALREADY_STORED: pb.REASON_ALREADY_STORED,
    Skip.BEING_WRITTEN: pb.REASON_BEING_WRITTEN,
    Skip.POOL_FULL: pb.REASON_POOL_FULL,
    Skip.NOT_WORTH_IT: pb.REASON_NOT_WORTH_IT,
    Skip.PARENT_MISSING: pb.REASON_ORPHANED,
    Skip.PARTS_MISSING: pb.REASON_RESERVATION_INCOMPLETE,
    Skip.DRAINING: pb.REASON_DRAINING,
    Skip.QUOTA: pb.REASON_LIMIT,
    Skip.ORPHANED: pb.REASON_ORPHANED,
    Skip.RAN_OUT: pb.REASON_RESERVATION_EXPIRED,
    Skip.WRITER_GONE: pb.REASON_WORKER_GONE,
    Skip.CALLED_OFF: pb.REASON_CALLED_OFF,
}
REFUSAL: Final[Mapping[Refusal, pb.Reason.ValueType]] = {
    Refusal.SESSION_UNKNOWN: pb.REASON_SESSION_UNKNOWN,
    Refusal.SESSION_EXISTS: pb.REASON_ID_IN_USE,
    Refusal.SESSION_ENDED: pb.REASON_SESSION_UNKNOWN,
    Refusal.NAMESPACE_UNKNOWN: pb.REASON_NAMESPACE_UNKNOWN,
    Refusal.NAMESPACE_MISMATCH: pb.REASON_NAMESPACE_MISMATCH,
    Refusal.NAMESPACE_TAKEN: pb.REASON_INTERNAL,
    Refusal.SPEC_INVALID: pb.REASON_BAD_LAYOUT,
    Refusal.BLOCK_TOO_LARGE: pb.REASON_TOO_LARGE,
    Refusal.KEYS_INVALID: pb.REASON_BAD_KEYS,
    Refusal.ID_INVALID: pb.REASON_BAD_ARGUMENT,
    Refusal.ARGUMENT_INVALID: pb.REASON_BAD_ARGUMENT,
    Refusal.LEASE_UNKNOWN: pb.REASON_LEASE_UNKNOWN,
    Refusal.LEASE_EXPIRED: pb.REASON_LEASE_UNKNOWN,
    Refusal.LEASE_TAKEN: pb.REASON_ID_IN_USE,
    Refusal.RESERVATION_UNKNOWN: pb.REASON_RESERVATION_UNKNOWN,
    Refusal.RESERVATION_EXPIRED: pb.REASON_RESERVATION_EXPIRED,
    Refusal.RESERVATION_INCOMPLETE: pb.REASON_RESERVATION_INCOMPLETE,
    Refusal.RESERVATION_TAKEN: pb.REASON_ID_IN_USE,
    Refusal.FOREIGN_SESSION: pb.REASON_NOT_YOURS,
    Refusal.TOO_MANY: pb.REASON_LIMIT,
    Refusal.PIN_UNKNOWN: pb.REASON_PIN_UNKNOWN,
    Refusal.PIN_TAKEN: pb.REASON_ID_IN_USE,
    Refusal.PIN_BUDGET: pb.REASON_PIN_BUDGET,
    Refusal.IN_USE: pb.REASON_IN_USE,
}
# What a worker may say when it releases a lease it did not use up.
UNUSED: Final[Mapping[int, Miss]] = {
    pb.REASON_UNSPECIFIED: Miss.UNUSED,
    pb.REASON_UNUSED: Miss.UNUSED,
    pb.REASON_LEASE_LOST: Miss.LEASE_LOST,
    pb.REASON_DEADLINE: Miss.DEADLINE,
    pb.REASON_SLOWER_THAN_RECOMPUTE: Miss.SLOWER_THAN_RECOMPUTE,
    pb.REASON_TIER_OFF: Miss.TIER_OFF,
    pb.REASON_CHECKSUM_MISMATCH: Miss.CHECKSUM,
}


def refusal(refused: Refused) -> CallError:
    """The core's negative answer as ours."""
    reason = REFUSAL.get(refused.reason, pb.REASON_INTERNAL)
    error = CallError(reason, refused.message, Code[refused.kind.name])
    error.metadata.update(refused.metadata)
    return error


def unused(reason: int) -> Miss:
    """Why the worker says it left tokens unused; anything it should not say counts as its own error."""
    return UNUSED.get(reason, Miss.CLIENT_ERROR)
