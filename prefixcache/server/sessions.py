"""Sessions: who is connected, how, and until when.

A local session ends with its connection, a gRPC session when its time to live passes without a call. What ends with a
session is the planner's business; here is only who is there. Thread-safe.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prefixcache.core.ids import ID_BYTES
from prefixcache.server.errors import CallError
from prefixcache.v1 import common_pb2 as pb


@dataclass(slots=True, eq=False)
class Session:
    """One session. `root_keys` by namespace number: the chains that it may let the server hash.

    `process` is the number of the worker's process (0 where it cannot be known, as over gRPC).
    """

    id: bytes
    name: str
    transport: str
    pid: int
    process: int
    can_map: bool
    ttl_s: float
    opened_at: float
    last_seen: float
    root_keys: dict[int, bytes] = field(default_factory=dict)
    gpu_pools: tuple[int, ...] = ()
    ended: bool = False
    writes: threading.Lock = field(default_factory=threading.Lock)


class Sessions:
    """All sessions by id, and the gRPC ones by their last sign of life."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._by_id: dict[bytes, Session] = {}

    def open(
        self, name: str, transport: str, ttl_s: float, *, pid: int = 0, process: int = 0, can_map: bool
    ) -> Session:
        """A new session with a random id. Raises CallError (LIMIT) when there are too many."""
        now = self._clock()
        session = Session(secrets.token_bytes(ID_BYTES), name, transport, pid, process, can_map, ttl_s, now, now)
        with self._lock:
            if len(self._by_id) >= self._limit:
                raise CallError(
                    pb.REASON_LIMIT, f"{self._limit} sessions are open; raise max_sessions", limit=self._limit
                )
            self._by_id[session.id] = session
        return session

    def require(self, session_id: bytes) -> Session:
        """The session of a gRPC call, its time to live starting anew. Raises CallError (SESSION_UNKNOWN)."""
        session = self._by_id.get(session_id)
        if session is None:
            if len(session_id) != ID_BYTES:
                raise CallError(
                    pb.REASON_BAD_ARGUMENT, f"a session id has {ID_BYTES} bytes, got {len(session_id)}; open a session"
                )
            raise CallError(pb.REASON_SESSION_UNKNOWN, "the session is unknown or has ended; open a new one")
        session.last_seen = self._clock()
        return session

    def remove(self, session: Session) -> bool:
        """Forget the session; False if that was done before."""
        with self._lock:
            session.ended = True
            return self._by_id.pop(session.id, None) is not None

    def overdue(self) -> list[Session]:
        """gRPC sessions whose time to live has passed."""
        now = self._clock()
        return [
            session for session in list(self._by_id.values())
            if session.transport == "grpc" and now - session.last_seen > session.ttl_s
        ]  # fmt: skip

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)
