"""What every call shares: the sessions, the namespaces, the planner's owner, and the table of methods.

A method takes (session, request message) and answers a response message, or raises `CallError`. It knows no transport;
transports look methods up in `Service.methods` and turn bytes into messages and back.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache.core.ids import ID_BYTES
from prefixcache.core.spec import NamespaceSpec
from prefixcache.server import layouts
from prefixcache.server.background import Background
from prefixcache.server.config import Config
from prefixcache.server.errors import CallError
from prefixcache.server.gpu import GpuStore
from prefixcache.server.holdings import Holdings
from prefixcache.server.layouts import Namespace
from prefixcache.server.loop import Owner
from prefixcache.server.reasons import refusal
from prefixcache.server.sessions import Session, Sessions
from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common
from prefixcache_offload.export import HandleKind, PoolExport
from prefixcache_offload.pool import HostPool
from prefixcache_offload.units import control_bytes

PROTOCOL: Final = 1
_MAX_NAME: Final = 200
_TIERS: Final = {"host": common.TIER_HOST, "gpu": common.TIER_GPU}
_HANDLES: Final = {
    HandleKind.MEMFD: common.POOL_HANDLE_UNSPECIFIED,
    HandleKind.CUDA_FD: common.POOL_HANDLE_CUDA_FD,
    HandleKind.CUDA_IPC: common.POOL_HANDLE_CUDA_IPC,
}


@dataclass(frozen=True, slots=True)
class Method:
    """One rpc. `answer(session, request)` answers a message, a future of one, or, for streams, an iterator.

    `session` is None where `needs_session` is False and the request names none.
    """

    name: str
    parse: Callable[[bytes], Any]
    answer: Callable[[Any, Any], Any]
    needs_session: bool = True


@dataclass
class Shell:
    """The state that all calls work on. `draining` refuses new leases and reservations."""

    config: Config
    version: str
    owner: Owner
    pools: Mapping[int, HostPool]
    local_channel: str = ""
    incarnation: bytes = field(default_factory=lambda: secrets.token_bytes(ID_BYTES))
    started_at: float = field(default_factory=time.monotonic)
    draining: bool = False
    is_growing: Callable[[], bool] = lambda: False
    blocks_of: Callable[[int], int] = lambda _: 0
    namespace_opened: Callable[[bytes], object] = lambda _: None  # told of a new one's fingerprint, under the lock
    clear_lasts: Callable[[], object] = lambda: None  # waits until a clear would survive a crash
    digest_of: Callable[[bytes, int, int, int], bytes] = lambda *_: b""
    gpus: GpuStore | None = None

    def __post_init__(self) -> None:
        self.background = Background(self.owner)
        self.sessions = Sessions(self.config.max_sessions)
        self.holdings = Holdings()
        self.namespaces: dict[int, Namespace] = {}
        self.by_fingerprint: dict[bytes, Namespace] = {}
        self.next_namespace = 1

    def namespace(self, number: int) -> Namespace:
        """A namespace by its short id. Raises CallError (NAMESPACE_UNKNOWN)."""
        try:
            return self.namespaces[number]
        except KeyError:
            raise CallError(
                common.REASON_NAMESPACE_UNKNOWN, f"namespace {number} is unknown since this server started; open it"
            ) from None

    def export(self, number: int) -> PoolExport:
        """What another process needs to reach a pool. Raises CallError where there is none."""
        pool = self.pools.get(number) or (self.gpus.pools.get(number) if self.gpus is not None else None)
        if pool is None:
            raise CallError(common.REASON_BAD_ARGUMENT, f"there is no pool {number}; OpenSession lists them")
        return pool.export()

    def add_namespace(
        self, number: int, fingerprint: bytes, spec: NamespaceSpec, label: str, value_bytes: tuple[int, ...] = ()
    ) -> None:
        """Know a namespace that the planner knows. The first label and the first sizes of numbers stay."""
        known = self.namespaces.get(number)
        if known is None or not known.label or not known.value_bytes:
            sizes = tuple(part.size_bytes for part in spec.parts)
            if known is not None:
                label, value_bytes = known.label or label, known.value_bytes or value_bytes
            namespace = Namespace(number, fingerprint, label, spec, sizes, layouts.head_bytes(spec), value_bytes)
            self.namespaces[number] = self.by_fingerprint[fingerprint] = namespace
            self.next_namespace = max(self.next_namespace, number + 1)
            self.namespace_opened(fingerprint)

    def forget_namespace(self, number: int) -> None:
        """The planner forgot an empty namespace to make room; a worker that still uses its id is told to open it."""
        namespace = self.namespaces.pop(number)
        del self.by_fingerprint[namespace.fingerprint]

    def end(self, session: Session) -> bool:
        """End a session: its leases and keys are free. True if slots wait for its process's exit. Can be repeated."""
        with session.writes, self.owner.lock:
            if not self.sessions.remove(session) or self.owner.failure:
                return False
            closed = self.owner.call(e.SessionEnded(session.id))
            return isinstance(closed, c.SessionClosed) and closed.quarantined_slots > 0

    def exited(self, session_id: bytes) -> None:
        """The process behind a session (ended or not) is gone: its slots are free, too."""
        with self.owner.lock:
            if not self.owner.failure:
                self.owner.call(e.ProcessExited(session_id))
                self.holdings.process_exited(session_id)


def expect(reply: c.Reply | None, kind: type) -> Any:
    """The reply if it is a `kind`. Raises the refusal as CallError."""
    if type(reply) is kind:
        return reply
    if isinstance(reply, c.Refused):
        raise refusal(reply)
    raise CallError(common.REASON_INTERNAL, f"the planner answered {type(reply).__name__} instead of {kind.__name__}")


def granted_ttl(asked_ms: int, default_s: float, most_s: float) -> float:
    """Seconds: what was asked for, the default for 0, never more than the most."""
    return min(asked_ms / 1000 if asked_ms else default_s, most_s)


class SessionCalls:
    """OpenSession, KeepAlive, CloseSession, OpenNamespace."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def open_session(
        self, request: pb.OpenSessionRequest, transport: str, *, pid: int = 0, process: int = 0
    ) -> Session:
        """A session for a worker on any transport. Raises CallError."""
        shell = self._shell
        if not request.protocol_min <= PROTOCOL <= request.protocol_max:
            raise CallError(
                common.REASON_PROTOCOL_VERSION,
                f"this server speaks protocol {PROTOCOL}, the client {request.protocol_min} to {request.protocol_max}; "
                "install matching releases of client and server",
                server_min=PROTOCOL, server_max=PROTOCOL,
            )  # fmt: skip
        if len(request.client_name) > _MAX_NAME:
            raise CallError(common.REASON_BAD_ARGUMENT, f"client_name may have {_MAX_NAME} characters")
        ttl_s = granted_ttl(request.ttl_ms, shell.config.session_ttl, shell.config.session_ttl_max)
        can_map = transport == "local" and shell.config.host_writable
        session = shell.sessions.open(
            request.client_name, transport, ttl_s, pid=pid, process=process, can_map=can_map
        )  # fmt: skip
        if transport == "local" and shell.gpus is not None:
            session.gpu_pools = shell.gpus.pools_on(request.devices)
        try:
            opened = e.SessionOpened(session.id, can_map, session.name, session.gpu_pools)
            expect(shell.owner.call(opened), c.SessionReady)
        except CallError:
            shell.sessions.remove(session)
            raise
        return session

    def describe(self, session: Session) -> pb.OpenSessionResponse:
        """What the worker is told about its session and this server."""
        shell = self._shell
        return pb.OpenSessionResponse(
            session=session.id,
            protocol=PROTOCOL,
            ttl_ms=int(session.ttl_s * 1000),
            incarnation=shell.incarnation,
            server_version=shell.version,
            pools=[export_message(shell.export(pool)) for pool in (*shell.pools, *session.gpu_pools)],
            local_channel=shell.local_channel,
        )

    def open_over_grpc(self, _: None, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        """OpenSession on a transport without connections."""
        return self.describe(self.open_session(request, "grpc"))

    def keep_alive(self, session: Session, _: pb.KeepAliveRequest) -> pb.KeepAliveResponse:
        """Looking the session up has renewed it."""
        return pb.KeepAliveResponse(ttl_ms=int(session.ttl_s * 1000))

    def close_session(self, session: Session, _: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        """End the session."""
        self._shell.end(session)
        return pb.CloseSessionResponse()

    def open_namespace(self, session: Session, request: pb.OpenNamespaceRequest) -> pb.OpenNamespaceResponse:
        """Register a layout, or find it registered."""
        shell, message = self._shell, request.spec
        spec = layouts.check(message)
        with shell.owner.lock:
            event = e.NamespaceOpened(shell.next_namespace, message.fingerprint, spec)
            ready: c.NamespaceReady = expect(shell.owner.call(event), c.NamespaceReady)
            told = layouts.value_bytes(message)
            shell.add_namespace(ready.namespace, message.fingerprint, spec, message.label, told)
        if message.root_key:
            session.root_keys[ready.namespace] = message.root_key
        block_bytes = shell.namespaces[ready.namespace].block_bytes
        known = shell.blocks_of(ready.namespace) > 0
        return pb.OpenNamespaceResponse(namespace_id=ready.namespace, block_bytes=block_bytes, known=known)


def export_message(export: PoolExport) -> common.Pool:
    """A pool as workers are told about it."""
    about = export.descriptor
    return common.Pool(
        pool=about.pool_id,
        tier=_TIERS[about.tier],
        size_bytes=about.size_bytes,
        writable=about.writable,
        control_bytes=control_bytes(about.size_bytes),
        handle=_HANDLES[export.handle],
        device=export.device_uuid,
        ipc_handle=export.ipc_handle,
    )
