"""One session with one incarnation of a daemon: how it is opened, and what is known only as long as it lives.

Namespace numbers, pools and leases belong to a session and die with it. Reconnecting is not done here (see link).
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from prefixcache.v1 import cache_pb2, common_pb2
from prefixcache_client import devices
from prefixcache_client.address import Address
from prefixcache_client.blocks import BlockFormat
from prefixcache_client.devices import WorkerDevice
from prefixcache_client.errors import Refused, Unreachable
from prefixcache_client.local import LocalTransport
from prefixcache_client.options import ClientOptions
from prefixcache_client.paths import BytePath, MappedPath, MappedReads
from prefixcache_client.pools import DeviceUnusable, MappedPools
from prefixcache_client.reasons import DEADLINE
from prefixcache_client.streams import StreamPath
from prefixcache_client.transport import (
    OPEN_NAMESPACE,
    OPEN_SESSION,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    BlockStreams,
    Transport,
    unreadable,
)

if TYPE_CHECKING:
    from prefixcache_client.grpc_transport import GrpcTransport

M = TypeVar("M", bound=Message)

log = logging.getLogger("prefixcache_client")

LOCAL: Final = "local"
GRPC: Final = "grpc"
MAX_NAME: Final = 200
"""Characters of a client's name that the server takes."""


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
        self.server_session = opened.session
        self.incarnation = opened.incarnation
        self.ttl_s = opened.ttl_ms / 1000
        self.host_pool_bytes = sum(pool.size_bytes for pool in opened.pools if pool.tier == common_pb2.TIER_HOST)
        self.path = path
        self.namespaces: dict[bytes, int] = {}
        """Numbers by fingerprint, of those opened in this session."""

    @property
    def alive(self) -> bool:
        """Whether calls may still be made."""
        return self.transport.alive

    def namespace_id(self, fingerprint: bytes, form: BlockFormat, label: str, deadline: float) -> int:
        """The namespace's number, opened at first use. Raises Unreachable or Refused."""
        known = self.namespaces.get(fingerprint)
        if known is not None:
            return known
        request = cache_pb2.OpenNamespaceRequest(session=self.session_id, spec=form.spec(fingerprint, label))
        payload = self.transport.call(OPEN_NAMESPACE, request.SerializeToString(), remaining(deadline))
        answer = parse(cache_pb2.OpenNamespaceResponse, payload)
        if answer.block_bytes != form.block_bytes:
            raise Refused("namespace_mismatch", f"the server counts {answer.block_bytes} bytes a block", 9)
        self.namespaces[fingerprint] = answer.namespace_id
        return answer.namespace_id

    def forget_namespaces(self) -> None:
        """Have each namespace opened again at its next use."""
        self.namespaces.clear()

    def close(self) -> None:
        """End the session: its leases end and its mappings are dropped."""
        self.transport.close_session(self.server_session)


def remaining(deadline: float) -> float:
    """Seconds until `deadline`. Raises Unreachable (reason `deadline`) when none are left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise Unreachable("no time is left for the call", reason="deadline")
    return left


def open_local(address: Address, options: ClientOptions, deadline: float) -> Session:
    """A session on the local channel. Where memory cannot be shared, bytes go by gRPC under the same session.

    Raises Unreachable or Refused.
    """
    device = devices.find(options.device)
    try:
        return _open_local(address, options, device, deadline)
    except DeviceUnusable as error:
        log.warning("copies in the memory of %s are not used: %s", options.device, error)
        return _open_local(address, options, None, deadline)


def _open_local(address: Address, options: ClientOptions, device: WorkerDevice | None, deadline: float) -> Session:
    transport = LocalTransport(address.local_path, options.timeout_s)
    try:
        opened = _open(transport.call, options, 0, deadline, device)
        path = _local_path(transport, opened, (address, device), options, deadline)
    except (Unreachable, Refused):
        transport.close()
        raise
    return Session(LOCAL, transport, opened, path)


def open_grpc(address: Address, options: ClientOptions, deadline: float) -> Session:
    """A session over gRPC, kept alive by a thread. Raises Unreachable or Refused."""
    from prefixcache_client.grpc_transport import GrpcTransport

    transport = GrpcTransport(address.target)
    try:
        opened = _open(transport.call, options, int(options.session_ttl_s * 1000), deadline)
    except (Unreachable, Refused):
        transport.close()
        raise
    transport.keep_alive(opened.session, opened.ttl_ms / 1000)
    path = StreamPath(lambda: transport, opened.session, options.stream_timeout_s)
    return Session(GRPC, transport, opened, path)


def grpc_alone(address: Address) -> "GrpcTransport":
    """A connection without a session, for what needs none. Raises Unreachable."""
    from prefixcache_client.grpc_transport import GrpcTransport

    if address.is_foreign:
        raise Unreachable(f"the folder of {address.socket_path} belongs to another user")
    return GrpcTransport(address.target)


def _local_path(
    transport: LocalTransport,
    opened: cache_pb2.OpenSessionResponse,
    ends: tuple[Address, WorkerDevice | None],
    options: ClientOptions,
    deadline: float,
) -> BytePath:
    address, device = ends
    streamed = StreamPath(_Streams(transport, address), opened.session, options.stream_timeout_s)
    try:
        pools = MappedPools(transport, opened.pools, remaining(deadline), device)
    except DeviceUnusable:
        raise
    except Unreachable as error:
        if error.lost or error.reason == DEADLINE:
            raise
        log.warning("the daemon's memory cannot be mapped, blocks go as streams: %s", error)
        return streamed
    transport.on_lost(pools.close)
    mapped = MappedPath(pools)
    return mapped if pools.writable else MappedReads(mapped, streamed)


class _Streams:
    """The gRPC channel for the bytes of a session on the local channel: made at first use, ends with the session."""

    def __init__(self, owner: LocalTransport, address: Address) -> None:
        self._owner = owner
        self._address = address
        self._lock = threading.Lock()
        self._made: BlockStreams | None = None

    def __call__(self) -> BlockStreams:
        from prefixcache_client.grpc_transport import GrpcTransport

        with self._lock:
            if self._made is None:
                made = GrpcTransport(self._address.target)
                self._owner.on_lost(made.close)
                self._made = made
            return self._made


def _open(
    call: Callable[[int, bytes, float], bytes],
    options: ClientOptions,
    ttl_ms: int,
    deadline: float,
    device: WorkerDevice | None = None,
) -> cache_pb2.OpenSessionResponse:
    name = options.client_name or f"pid {os.getpid()}"
    request = cache_pb2.OpenSessionRequest(
        client_name=name[:MAX_NAME],
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        ttl_ms=ttl_ms,
        devices=[device.uuid] if device is not None else [],
    )
    opened = parse(cache_pb2.OpenSessionResponse, call(OPEN_SESSION, request.SerializeToString(), remaining(deadline)))
    if not PROTOCOL_MIN <= opened.protocol <= PROTOCOL_MAX:
        raise Refused("protocol_version", f"the server chose protocol {opened.protocol}", 9)
    return opened
