"""The refusal of a call, the same on every transport.

`CallError` is raised below the transports and turned into a proto `Error` by them. Its message never holds prompt text,
tokens or keys, because it ends in logs. It must not know gRPC.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from prefixcache.v1 import common_pb2 as pb

ERROR_TYPE_URL: Final = "type.googleapis.com/prefixcache.v1.Error"


class Code(IntEnum):
    """Canonical gRPC status codes in use."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15


# Which canonical code each reason has, so that the same cause has the same code everywhere.
CODES: Final[Mapping[int, Code]] = {
    pb.REASON_SESSION_UNKNOWN: Code.NOT_FOUND,
    pb.REASON_NAMESPACE_UNKNOWN: Code.NOT_FOUND,
    pb.REASON_NAMESPACE_MISMATCH: Code.FAILED_PRECONDITION,
    pb.REASON_BAD_LAYOUT: Code.INVALID_ARGUMENT,
    pb.REASON_BAD_KEYS: Code.INVALID_ARGUMENT,
    pb.REASON_BAD_ARGUMENT: Code.INVALID_ARGUMENT,
    pb.REASON_PROTOCOL_VERSION: Code.FAILED_PRECONDITION,
    pb.REASON_LEASE_UNKNOWN: Code.NOT_FOUND,
    pb.REASON_RESERVATION_UNKNOWN: Code.NOT_FOUND,
    pb.REASON_RESERVATION_EXPIRED: Code.FAILED_PRECONDITION,
    pb.REASON_NOT_YOURS: Code.PERMISSION_DENIED,
    pb.REASON_RESERVATION_INCOMPLETE: Code.FAILED_PRECONDITION,
    pb.REASON_STREAM_TRUNCATED: Code.ABORTED,
    pb.REASON_MESSAGE_TOO_LARGE: Code.RESOURCE_EXHAUSTED,
    pb.REASON_UNIMPLEMENTED: Code.UNIMPLEMENTED,
    pb.REASON_ID_IN_USE: Code.ALREADY_EXISTS,
    pb.REASON_INTERNAL: Code.INTERNAL,
    pb.REASON_LIMIT: Code.RESOURCE_EXHAUSTED,
    pb.REASON_DRAINING: Code.UNAVAILABLE,
    pb.REASON_TOO_LARGE: Code.FAILED_PRECONDITION,
    pb.REASON_LEASE_LOST: Code.ABORTED,
    pb.REASON_WORKER_GONE: Code.ABORTED,
}


class CallError(Exception):
    """A refused call. `metadata` are facts by name, for machines."""

    def __init__(self, reason: pb.Reason.ValueType, message: str, code: Code | None = None, **metadata: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.code = code or CODES.get(reason, Code.FAILED_PRECONDITION)
        self.message = message
        self.metadata = {name: str(value) for name, value in metadata.items()}

    def to_proto(self) -> pb.Error:
        """The wire form."""
        return pb.Error(code=self.code, reason=self.reason, message=self.message, metadata=self.metadata)


def status_details(error: pb.Error) -> bytes:
    """The `grpc-status-details-bin` trailer: a google.rpc.Status that carries `error`."""
    status = pb.Status(code=error.code, message=error.message)
    packed = status.details.add()
    packed.type_url = ERROR_TYPE_URL
    packed.value = error.SerializeToString()
    return status.SerializeToString()


def reason_name(reason: int) -> str:
    """`not_cached` of REASON_NOT_CACHED; the number for one that this build does not know."""
    try:
        return pb.Reason.Name(pb.Reason.ValueType(reason)).removeprefix("REASON_").lower()
    except ValueError:
        return str(reason)
