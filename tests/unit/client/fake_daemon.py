"""A daemon in miniature for the SDK's tests: real sockets, real pools, a dict for an index.

It serves the local channel and gRPC. Faults it makes, each switched on by a field of `Faults`:
    delay_s      every answer comes that late (slow)
    frozen       nothing is answered until the event is cleared
    truncate     the next answer of the local channel, or the next ReadBlocks, ends in the middle
    garbage      the next answer is no protobuf message
    wrong_method the next answer names another method
    bad_slots    the next acquire names a slot outside of the pool
    odd_runs     the next acquire sends one generation too few
    steal        slots get a new generation right after the next acquire or reserve was answered (the lease is lost)
    refuse       {method: Reason}: these calls are refused
    wrong_bytes  OpenNamespace counts other bytes a block than the client
    lose_session the next call over gRPC finds its session unknown
    unsealed     MapPool hands over descriptors that can still shrink
    swap_pieces  the next ReadBlocks sends its pieces in the wrong order
    short_write  WriteBlocks counts that many bytes too few
Restarting under the same path (`restart`) gives a new incarnation, an empty index and a new pool.
What it does not do: evict, count, expire leases by itself (`expire_leases` does it at once), sliding groups.
"""

import os
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from prefixcache.v1 import admin_pb2, cache_pb2, common_pb2, local_pb2
from prefixcache_client import framing
from prefixcache_offload.pool import HostPool
from prefixcache_offload.units import SLOT_GRANULE, control_bytes

LEASE_TTL_MS = 5000
PIECE_BYTES = 1 << 16
RPCS = {
    "OpenSession": 1, "OpenNamespace": 2, "Acquire": 3, "Release": 5, "Reserve": 6, "Commit": 7, "Abort": 8,
    "Lookup": 9, "KeepAlive": 12, "CloseSession": 200,
}  # fmt: skip


@dataclass
class Faults:
    """See the module's docstring."""

    delay_s: float = 0.0
    thaw: threading.Event = field(default_factory=threading.Event)
    truncate: bool = False
    garbage: bool = False
    wrong_method: bool = False
    bad_slots: bool = False
    odd_runs: bool = False
    steal: bool = False
    refuse: dict[int, int] = field(default_factory=dict)
    wrong_bytes: bool = False
    lose_session: bool = False
    unsealed: bool = False
    swap_pieces: bool = False
    short_write: int = 0

    def __post_init__(self) -> None:
        self.thaw.set()


class RefusedCall(Exception):
    """A call answered with an Error."""

    def __init__(self, code: int, reason: int) -> None:
        super().__init__(reason)
        self.error = common_pb2.Error(
            code=code, reason=common_pb2.Reason.ValueType(reason), message="refused by the fake"
        )


class FakeDaemon:
    """Use it in a `with`. `calls` counts methods; `released`, `aborted`, `committed` list ids."""

    def __init__(
        self, path: str, pool_bytes: int = 8 << 20, *, writable: bool = True, offer_local: bool = True
    ) -> None:
        self.path = path
        self.pool_bytes = pool_bytes
        self.writable = writable
        self.offer_local = offer_local
        self.faults = Faults()
        self.calls: dict[int, int] = defaultdict(int)
        self.released: list[tuple[bytes, int, int]] = []
        self.aborted: list[bytes] = []
        self.pinned: list[Any] = []
        self.priorities: list[int] = []
        self.sessions_opened = 0
        self.port = 0
        self.lease_ttl_ms = LEASE_TTL_MS
        self.lock = threading.RLock()
        self.start()

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.incarnation = os.urandom(16)
        self.pool = HostPool.create(0, self.pool_bytes, SLOT_GRANULE, writable=self.writable)
        self.next_slot = 1
        self.generation = int.from_bytes(os.urandom(4), "little") << 8
        self.sessions: set[bytes] = set()
        self.specs: dict[int, Any] = {}
        self.blocks: dict[tuple[int, bytes, int], tuple[int, int]] = {}
        self.leases: dict[bytes, list[int]] = {}
        self.leased: dict[bytes, list[Any]] = {}
        self.reservations: dict[bytes, tuple[int, list[tuple[bytes, int, int, int, int]]]] = {}
        self.connections: list[socket.socket] = []
        self.listener: socket.socket | None = None
        if self.offer_local:
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.listener.bind(self.path + ".local")
            self.listener.listen(64)
            threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()
        self.grpc_server = self._serve_grpc()

    def stop(self) -> None:
        with self.lock:
            listener, self.listener = self.listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            os.unlink(self.path + ".local")
        for connection in self.connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self.faults.thaw.set()
        if self.grpc_server is not None:
            self.grpc_server.stop(0).wait(10)
        self.pool.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def __enter__(self) -> "FakeDaemon":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- gRPC --------------------------------------------------------------------------------------------------------

    def _serve_grpc(self) -> Any:
        server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        handlers = {name: self._unary(method) for name, method in RPCS.items()}
        handlers["ReadBlocks"] = grpc.unary_stream_rpc_method_handler(self._read_blocks)
        handlers["WriteBlocks"] = grpc.stream_unary_rpc_method_handler(self._write_blocks)
        admin = {name: self._unary(method) for name, method in (("Prefetch", 13), ("Pin", 14), ("Unpin", 15))}
        for name, methods in (("CacheService", handlers), ("AdminService", admin)):
            service = grpc.method_handlers_generic_handler(f"prefixcache.v1.{name}", methods)
            server.add_generic_rpc_handlers((service,))
        server.add_insecure_port(f"unix:{self.path}")
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        server.start()
        return server

    def _unary(self, method: int) -> Any:
        def answer(payload: bytes, context: Any) -> bytes:
            self.faults.thaw.wait()
            if self.faults.delay_s:
                threading.Event().wait(self.faults.delay_s)
            try:
                if method == 1:
                    self.sessions.add(owner := os.urandom(16))
                    return self.handle(method, payload, owner)
                self._check_session(method, payload)
                return self.handle(method, payload, b"")
            except RefusedCall as refused:
                abort(context, refused)
                raise

        return grpc.unary_unary_rpc_method_handler(answer)

    def _check_session(self, method: int, payload: bytes) -> None:
        kind, _ = self._actions()[method]
        if self.faults.lose_session and method != 12:
            self.faults.lose_session = False
            self.sessions.clear()
        if kind.FromString(payload).session not in self.sessions:
            raise RefusedCall(5, common_pb2.REASON_SESSION_UNKNOWN)

    def _read_blocks(self, payload: bytes, context: Any) -> Iterator[bytes]:
        request = cache_pb2.ReadBlocksRequest.FromString(payload)
        with self.lock:
            runs = self.leased.get(request.lease)
            cut, self.faults.truncate = self.faults.truncate, False
            swap, self.faults.swap_pieces = self.faults.swap_pieces, False
        if runs is None:
            abort(context, RefusedCall(5, common_pb2.REASON_LEASE_UNKNOWN))
        pieces = list(self._pieces(request, runs))
        if cut:
            pieces = pieces[: len(pieces) // 2]
        if swap:
            pieces.reverse()
        for piece in pieces:
            yield piece.SerializeToString()

    def _pieces(self, request: Any, runs: Any) -> Iterator[Any]:
        for part, first, held, size in runs:
            if request.part_mask and not request.part_mask >> part & 1:
                continue
            for block, (slot, _) in enumerate(held, start=first):
                if request.first_block <= block < request.first_block + request.blocks:
                    data = self.pool.slot(slot, size).tobytes()
                    for offset in range(0, size, PIECE_BYTES):
                        piece = data[offset : offset + PIECE_BYTES]
                        yield cache_pb2.ReadBlocksResponse(part=part, block=block, offset=offset, data=piece)

    def _write_blocks(self, payloads: Iterator[bytes], context: Any) -> bytes:
        reservation, total = b"", 0
        for payload in payloads:
            piece = cache_pb2.WriteBlocksRequest.FromString(payload)
            reservation = reservation or piece.reservation
            with self.lock:
                places = {(part, block): slot for _, part, slot, _, block in self.reservations[reservation][1]}
                target = self.pool.slot(places[piece.part, piece.block], piece.offset + len(piece.data))
                target[piece.offset :] = np.frombuffer(piece.data, np.uint8)
            total += len(piece.data)
        return cache_pb2.WriteBlocksResponse(bytes=total - self.faults.short_write).SerializeToString()

    # -- local channel -----------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self.lock:
                if listener is not self.listener:  # stopped meanwhile
                    connection.close()
                    return
                self.connections.append(connection)
                self.sessions_opened += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        buffer = framing.FrameBuffer()
        owner = os.urandom(16)
        while True:
            frame = buffer.take()
            if frame is None:
                try:
                    data = connection.recv(1 << 16)
                except OSError:
                    data = b""
                if not data:
                    break
                buffer.feed(data)
                continue
            if not self._answer(connection, frame, owner):
                break
        connection.close()

    def _answer(self, connection: socket.socket, frame: framing.Frame, owner: bytes) -> bool:
        faults = self.faults
        call_id, method, _, request = frame
        faults.thaw.wait()
        if faults.delay_s:
            threading.Event().wait(faults.delay_s)
        try:
            payload, flags = self.handle(method, request, owner), framing.END
        except RefusedCall as refused:
            payload, flags = refused.error.SerializeToString(), framing.END | framing.ERROR
        called = method
        if faults.garbage and method not in (1, 10):
            faults.garbage, payload = False, b"\xff\xff\xff\xff"
        if faults.wrong_method:
            faults.wrong_method, method = False, 99
        answer = framing.pack_frame(call_id, method, payload, flags)
        try:
            if called == local_pb2.METHOD_MAP_POOL:
                self._send_pool(connection, call_id, payload)
            elif faults.truncate:
                faults.truncate = False
                connection.sendall(answer[: len(answer) // 2 + 1])
                connection.shutdown(socket.SHUT_RDWR)
                return False
            else:
                connection.sendall(answer)
        except OSError:
            return False
        return True

    def _send_pool(self, connection: socket.socket, call_id: int, payload: bytes) -> None:
        fds = list(self.pool.export_fds())
        if self.faults.unsealed:
            fds[1] = os.memfd_create("unsealed")
            os.ftruncate(fds[1], control_bytes(self.pool_bytes))
        answer = framing.pack_frame(call_id, local_pb2.METHOD_MAP_POOL, payload, framing.END | framing.DESCRIPTORS)
        socket.send_fds(connection, [answer], fds)
        if self.faults.unsealed:
            os.close(fds[1])

    # -- calls -------------------------------------------------------------------------------------------------------

    def handle(self, method: int, payload: bytes, owner: bytes) -> bytes:
        """The serialised answer. Raises RefusedCall."""
        with self.lock:
            self.calls[method] += 1
            if method in self.faults.refuse:
                raise RefusedCall(9, self.faults.refuse[method])
            kind, action = self._actions()[method]
            return payload if kind is None else action(kind.FromString(payload), owner).SerializeToString()

    def _actions(self) -> dict[int, Any]:
        return {
            1: (cache_pb2.OpenSessionRequest, self._open_session),
            2: (cache_pb2.OpenNamespaceRequest, self._open_namespace),
            3: (cache_pb2.AcquireRequest, self._acquire),
            5: (cache_pb2.ReleaseRequest, self._release),
            6: (cache_pb2.ReserveRequest, self._reserve),
            7: (cache_pb2.CommitRequest, self._commit),
            8: (cache_pb2.AbortRequest, self._abort),
            9: (cache_pb2.LookupRequest, self._lookup),
            10: (local_pb2.MapPoolRequest, lambda request, owner: local_pb2.MapPoolResponse(pool=self._pool())),
            11: (None, None),
            12: (cache_pb2.KeepAliveRequest, self._keep_alive),
            13: (admin_pb2.PrefetchRequest, self._prefetch),
            14: (admin_pb2.PinRequest, self._pin),
            15: (admin_pb2.UnpinRequest, self._unpin),
            200: (cache_pb2.CloseSessionRequest, lambda request, owner: cache_pb2.CloseSessionResponse()),
        }

    def _pool(self) -> common_pb2.Pool:
        return common_pb2.Pool(
            pool=0, tier=common_pb2.TIER_HOST, size_bytes=self.pool_bytes, writable=self.writable,
            control_bytes=control_bytes(self.pool_bytes),
        )  # fmt: skip

    def _open_session(self, request: Any, owner: bytes) -> Any:
        return cache_pb2.OpenSessionResponse(
            session=owner,
            protocol=1,
            ttl_ms=request.ttl_ms or 10000,
            incarnation=self.incarnation,
            pools=[self._pool()],
        )

    def _keep_alive(self, request: Any, owner: bytes) -> Any:
        return cache_pb2.KeepAliveResponse(ttl_ms=10000)

    def _open_namespace(self, request: Any, owner: bytes) -> Any:
        number = len(self.specs) + 1
        self.specs[number] = request.spec
        size = sum(part.size_bytes for part in request.spec.parts) + self.faults.wrong_bytes
        return cache_pb2.OpenNamespaceResponse(namespace_id=number, block_bytes=size)

    def _space(self, number: int) -> bytes:
        if number not in self.specs:
            raise RefusedCall(5, common_pb2.REASON_NAMESPACE_UNKNOWN)
        fingerprint: bytes = self.specs[number].fingerprint
        return fingerprint

    def _found(self, request: Any) -> int:
        space = self._space(request.namespace_id)
        parts = range(len(self.specs[request.namespace_id].parts))
        keys = split(request.keys)
        count = 0
        while count < len(keys) and all((space, keys[count], part) in self.blocks for part in parts):
            count += 1
        return count

    def _acquire(self, request: Any, owner: bytes) -> Any:
        found = self._found(request)
        if request.max_blocks:
            found = min(found, request.max_blocks)
        stop = 0 if found == len(request.keys) // 32 or found == request.max_blocks else common_pb2.REASON_NOT_CACHED
        answer = cache_pb2.AcquireResponse(
            planned_blocks=found,
            ready_blocks=found,
            stop=common_pb2.Reason.ValueType(stop),
            ttl_ms=request.ttl_ms or self.lease_ttl_ms,
        )
        if found <= request.from_block:
            return answer
        space, keys = self._space(request.namespace_id), split(request.keys)
        slots: list[int] = []
        for part in range(len(self.specs[request.namespace_id].parts)):
            held = [self.blocks[space, key, part] for key in keys[request.from_block : found]]
            slots += [slot for slot, _ in held]
            answer.runs.append(run(part, request.from_block, held))
            size = self.specs[request.namespace_id].parts[part].size_bytes
            self.leased.setdefault(request.lease, []).append((part, request.from_block, held, size))
        self.leases[request.lease] = slots
        self._spoil(answer, slots)
        return answer

    def _spoil(self, answer: Any, slots: list[int]) -> None:
        faults = self.faults
        if faults.bad_slots:
            faults.bad_slots = False
            answer.runs[0].slots = np.full(len(answer.runs[0].slots) // 4, 1 << 31, "<u4").tobytes()
        if faults.odd_runs:
            faults.odd_runs = False
            answer.runs[0].generations = answer.runs[0].generations[:-8]
        if faults.steal:
            faults.steal = False
            self.steal(slots)

    def steal(self, slots: list[int]) -> None:
        """Give slots to another owner, as after an eviction."""
        self.pool.set_generations(slots, [self._next_generation() for _ in slots])

    def expire_leases(self) -> None:
        """All leases run out and their slots get other owners and other bytes at once."""
        with self.lock:
            for slots in self.leases.values():
                self.steal(slots)
                for slot in slots:
                    self.pool.slot(slot, SLOT_GRANULE)[:] = 0xEE
            self.leases.clear()
            self.blocks.clear()

    def _release(self, request: Any, owner: bytes) -> Any:
        self.released.append((request.lease, request.used_blocks, request.reason))
        if self.leases.pop(request.lease, None) is None:
            raise RefusedCall(5, common_pb2.REASON_LEASE_UNKNOWN)
        return cache_pb2.ReleaseResponse()

    def _reserve(self, request: Any, owner: bytes) -> Any:
        self.priorities.append(request.priority)
        space = self._space(request.namespace_id)
        spec = self.specs[request.namespace_id]
        answer = cache_pb2.ReserveResponse(ttl_ms=5000)
        entries: list[tuple[bytes, int, int, int, int]] = []
        stored = 0
        for part, shape in enumerate(spec.parts):
            if request.part_mask and not request.part_mask >> part & 1:
                continue
            granted = []
            for block, key in list(enumerate(split(request.keys)))[request.from_block :]:
                if (space, key, part) in self.blocks:
                    stored += part == 0
                    continue
                slot = self._take(shape.size_bytes)
                if slot is None:
                    answer.refused.add(reason=common_pb2.REASON_POOL_FULL, count=1)
                    continue
                generation = self._next_generation()
                self.pool.set_generations([slot], [generation])
                granted.append((block, slot, generation))
                entries.append((key, part, slot, generation, block))
            if granted:
                answer.grants.append(grant(part, granted))
        if stored:
            answer.refused.add(reason=common_pb2.REASON_ALREADY_STORED, count=stored)
        if entries:
            self.reservations[request.reservation] = (request.namespace_id, entries)
            if self.faults.steal:
                self.faults.steal = False
                self.steal([slot for _, _, slot, _, _ in entries])
        return answer

    def _take(self, size_bytes: int) -> int | None:
        slot, self_end = self.next_slot, self.pool_bytes // SLOT_GRANULE
        granules = -(-size_bytes // SLOT_GRANULE)
        if slot + granules > self_end:
            return None
        self.next_slot = slot + granules
        return slot

    def _next_generation(self) -> int:
        self.generation += 1
        return self.generation

    def _commit(self, request: Any, owner: bytes) -> Any:
        held = self.reservations.pop(request.reservation, None)
        if held is None:
            raise RefusedCall(5, common_pb2.REASON_RESERVATION_UNKNOWN)
        space = self._space(held[0])
        for key, part, slot, generation, _ in held[1]:
            self.blocks[space, key, part] = (slot, generation)
        return cache_pb2.CommitResponse(committed_blocks=len({key for key, *_ in held[1]}), done=True)

    def _abort(self, request: Any, owner: bytes) -> Any:
        self.aborted.append(request.reservation)
        self.reservations.pop(request.reservation, None)
        return cache_pb2.AbortResponse()

    def _lookup(self, request: Any, owner: bytes) -> Any:
        found = self._found(request)
        tokens = found * self.specs[request.namespace_id].block_tokens
        stop = 0 if found == len(request.keys) // 32 else common_pb2.REASON_NOT_CACHED
        here = cache_pb2.NodeMatch(tokens=tokens, tiers=common_pb2.TierTokens(host=tokens))
        other = cache_pb2.NodeMatch(node="other", tokens=2 * tokens)
        return cache_pb2.LookupResponse(nodes=[here, other], stop=common_pb2.Reason.ValueType(stop))

    def _prefetch(self, request: Any, owner: bytes) -> Any:
        tokens = self._found(request) * self.specs[request.namespace_id].block_tokens
        return admin_pb2.PrefetchResponse(ready_tokens=tokens, tokens=16, stop=common_pb2.REASON_LIMIT)

    def _pin(self, request: Any, owner: bytes) -> Any:
        self.pinned.append(request)
        tokens = len(request.keys) // 32 * 16
        return admin_pb2.PinResponse(pin=b"p" * 16, tokens=16, wanted_tokens=tokens, size_bytes=1 << 20)

    def _unpin(self, request: Any, owner: bytes) -> Any:
        if request.pin != b"p" * 16:
            raise RefusedCall(5, common_pb2.REASON_PIN_UNKNOWN)
        return admin_pb2.UnpinResponse()


def split(keys: bytes) -> list[bytes]:
    """Single keys."""
    return [keys[i : i + 32] for i in range(0, len(keys), 32)]


def run(part: int, first_block: int, held: list[tuple[int, int]]) -> common_pb2.PartRun:
    """A PartRun of (slot, generation)s."""
    slots, generations = zip(*held, strict=True)
    return common_pb2.PartRun(
        part=part, pool=0, first_block=first_block,
        slots=struct.pack(f"<{len(slots)}I", *slots), generations=struct.pack(f"<{len(slots)}Q", *generations),
    )  # fmt: skip


def grant(part: int, granted: list[tuple[int, int, int]]) -> cache_pb2.PartGrant:
    """A PartGrant of (block, slot, generation)s."""
    blocks, slots, generations = zip(*granted, strict=True)
    return cache_pb2.PartGrant(
        part=part, pool=0, blocks=struct.pack(f"<{len(slots)}I", *blocks),
        slots=struct.pack(f"<{len(slots)}I", *slots), generations=struct.pack(f"<{len(slots)}Q", *generations),
    )  # fmt: skip


def wait_until(condition: Any, timeout_s: float = 10.0) -> None:
    """Wait for a condition with a deadline; polls at 2 ms."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("the condition did not come true in time")
        pause.wait(0.002)


class _Refusal(grpc.Status):
    """What a refused gRPC call ends with."""

    def __init__(self, error: common_pb2.Error) -> None:
        status = common_pb2.Status(code=error.code, message=error.message)
        status.details.add().Pack(error)
        self.code = next(code for code in grpc.StatusCode if code.value[0] == error.code)
        self.details = error.message
        self.trailing_metadata = (("grpc-status-details-bin", status.SerializeToString()),)


def abort(context: Any, refused: RefusedCall) -> None:
    """End a gRPC call with an Error in its trailers."""
    context.abort_with_status(_Refusal(refused.error))
