"""One session with one incarnation of a daemon: how it is opened, and what is known only as long as it lives.

Namespace numbers, pools and leases belong to a session and die with it. Reconnecting is not done here (see link).
"""

import time
from collections.abc import Callable
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from prefixcache.v1 import cache_pb2
from prefixcache_client.address import Address
from prefixcache_client.blocks import BlockFormat
from prefixcache_client.errors import Refused, Unreachable
from prefixcache_client.local import LocalTransport
from prefixcache_client.paths import BytePath, MappedPath
from prefixcache_client.pools import MappedPools
from prefixcache_client.transport import (
    OPEN_NAMESPACE,
    OPEN_SESSION,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Transport,
    unreadable,
)

M = TypeVar("M", bound=Message)

LOCAL: Final = "local"
GRPC: Final = "grpc"


def parse(kind: type[M], payload: bytes) -> M:
    """The message in `payload`. Raises Unreachable when it is none."""
    try:
        return kind.FromString(payload)
    except DecodeError as error:
        raise unreadable(error) from error


class Session:
    """An open session. `session_id` is what requests carry: empty on the local channel, where the connection is it."""

    def __init__(self, kind: str, transport: Transport, opened: cache_pb2.OpenSessionResponse, path: BytePath) -> None:
        self.kind = kind
        self.transport = transport
        self.session_id = b"" if kind == LOCAL else opened.session
        self.incarnation = opened.incarnation
        self.ttl_s = opened.ttl_ms / 1000
        self.path = path
        self._namespaces: dict[bytes, int] = {}

    @property
    def alive(self) -> bool:
        """Whether calls may still be made."""
        return self.transport.alive

    def namespace_id(self, fingerprint: bytes, form: BlockFormat, label: str, deadline: float) -> int:
        """The namespace's number, opened at first use. Raises Unreachable or Refused."""
        known = self._namespaces.get(fingerprint)
        if known is not None:
            return known
        request = cache_pb2.OpenNamespaceRequest(session=self.session_id, spec=form.spec(fingerprint, label))
        payload = self.transport.call(OPEN_NAMESPACE, request.SerializeToString(), remaining(deadline))
        answer = parse(cache_pb2.OpenNamespaceResponse, payload)
        if answer.block_bytes != form.block_bytes:
            raise Refused("namespace_mismatch", f"the server counts {answer.block_bytes} bytes a block", 9)
        self._namespaces[fingerprint] = answer.namespace_id
        return answer.namespace_id

    def forget_namespaces(self) -> None:
        """Have each namespace opened again at its next use."""
        self._namespaces.clear()

    def close(self) -> None:
        """End the session and drop its mappings."""
        self.transport.close()


def remaining(deadline: float) -> float:
    """Seconds until `deadline`. Raises Unreachable (reason `deadline`) when none are left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise Unreachable("no time is left for the call", reason="deadline")
    return left


def open_local(address: Address, client_name: str, deadline: float, send_timeout_s: float) -> Session:
    """A session on the local channel with all pools mapped. Raises Unreachable or Refused."""
    transport = LocalTransport(address.local_path, send_timeout_s)
    try:
        opened = _open(transport.call, client_name, 0, deadline)
        pools = MappedPools(transport, opened.pools, remaining(deadline))
    except (Unreachable, Refused):
        transport.close()
        raise
    transport.on_lost(pools.close)
    return Session(LOCAL, transport, opened, MappedPath(pools))


def _open(
    call: Callable[[int, bytes, float], bytes], client_name: str, ttl_ms: int, deadline: float
) -> cache_pb2.OpenSessionResponse:
    request = cache_pb2.OpenSessionRequest(
        client_name=client_name[:200], protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, ttl_ms=ttl_ms
    )
    opened = parse(cache_pb2.OpenSessionResponse, call(OPEN_SESSION, request.SerializeToString(), remaining(deadline)))
    if not PROTOCOL_MIN <= opened.protocol <= PROTOCOL_MAX:
        raise Refused("protocol_version", f"the server chose protocol {opened.protocol}", 9)
    return opened
