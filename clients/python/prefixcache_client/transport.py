"""The one interface behind which both transports hide: serialised request in, serialised answer out.

What belongs here: the interface and what both sides share (method numbers, turning an Error into Refused). It must not
know sockets, channels, namespaces or leases.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from google.protobuf.message import DecodeError

from prefixcache.v1 import common_pb2, local_pb2
from prefixcache_client.errors import Refused, Unreachable
from prefixcache_client.reasons import INTERNAL, reason_name

PROTOCOL_MIN: Final = 1
PROTOCOL_MAX: Final = 1

OPEN_SESSION: Final = int(local_pb2.METHOD_OPEN_SESSION)
OPEN_NAMESPACE: Final = int(local_pb2.METHOD_OPEN_NAMESPACE)
ACQUIRE: Final = int(local_pb2.METHOD_ACQUIRE)
ARRIVALS: Final = int(local_pb2.METHOD_ARRIVALS)
RELEASE: Final = int(local_pb2.METHOD_RELEASE)
RESERVE: Final = int(local_pb2.METHOD_RESERVE)
COMMIT: Final = int(local_pb2.METHOD_COMMIT)
ABORT: Final = int(local_pb2.METHOD_ABORT)
LOOKUP: Final = int(local_pb2.METHOD_LOOKUP)
MAP_POOL: Final = int(local_pb2.METHOD_MAP_POOL)
ECHO: Final = int(local_pb2.METHOD_ECHO)
KEEP_ALIVE: Final = int(local_pb2.METHOD_KEEP_ALIVE)
PREFETCH: Final = int(local_pb2.METHOD_PREFETCH)
PIN: Final = int(local_pb2.METHOD_PIN)
UNPIN: Final = int(local_pb2.METHOD_UNPIN)


class Transport(Protocol):
    """A connection to one daemon. Thread-safe. Every method raises Unreachable or Refused and nothing else."""

    alive: bool
    """False once nothing can be sent any more; another transport must be made then."""

    def call(self, method: int, payload: bytes, timeout_s: float) -> bytes:
        """Send the serialised request of `method` and wait for its serialised answer."""

    def post(self, method: int, payload: bytes) -> None:
        """Send a request whose answer nobody wants, behind all calls sent before it where the transport keeps order."""

    def arrivals(self, payload: bytes, timeout_s: float) -> Iterator[bytes]:
        """Serialised ArrivalsResponses for a serialised ArrivalsRequest, as they come. `timeout_s` bounds all of them.

        Raises from the iterator."""

    def on_lost(self, action: Callable[[], None]) -> None:
        """Have `action` called once when the connection ends, for whatever cause; at once if it has ended already."""

    def close_session(self, session_id: bytes) -> None:
        """End the session, so that its leases are free at once, and then the connection.

        Calls still waiting end as Unreachable.
        """

    def close(self) -> None:
        """End the connection without a word."""


class BlockStreams(Protocol):
    """The byte path of a transport without shared memory."""

    def read_blocks(self, payload: bytes, timeout_s: float) -> Iterator[bytes]:
        """Serialised ReadBlocksResponses for a serialised ReadBlocksRequest. `timeout_s` bounds the whole stream."""

    def write_blocks(self, payloads: Iterable[bytes], timeout_s: float) -> bytes:
        """Send serialised WriteBlocksRequests; the serialised WriteBlocksResponse."""


def refusal(payload: bytes) -> Refused:
    """The exception for a serialised Error."""
    try:
        error = common_pb2.Error.FromString(payload)
    except DecodeError:
        return Refused(INTERNAL, "the server sent an error that cannot be read", 13)
    return Refused(reason_name(error.reason) or INTERNAL, error.message, error.code)


def unreadable(error: DecodeError) -> Unreachable:
    """The exception for an answer that is no such message: the peer is not to be trusted any further."""
    return Unreachable(f"the server's answer cannot be read: {error}", lost=True)
