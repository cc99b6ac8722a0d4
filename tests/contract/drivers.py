"""The same calls over every transport, for one suite that runs over all of them.

A driver sends a request message by rpc name and answers the response message, or raises `Failure` with the contract's
Error. It is written from the proto files alone and shares no code with the server or the SDK.
"""

import socket
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from prefixcache.v1 import admin_pb2, cache_pb2, common_pb2, local_pb2

HEADER = struct.Struct("<IIBB")
_DEADLINE_S = 20.0


@dataclass
class Failure(Exception):
    """A refused call."""

    code: int
    reason: int
    message: str


class Driver(Protocol):
    """One client on one transport."""

    transport: str

    def call(self, rpc: str, request: Any) -> Any:
        """Answer the response message. Raises Failure."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


def raw(channel: grpc.Channel) -> Any:
    """The channel for calls in plain bytes, whose types the stubs do not know."""
    return channel


ADMIN = ("Pin", "Unpin", "Prefetch", "ListPins", "ListPrefixes", "Evict")  # AdminService; workers may make some as well


def response_type(rpc: str) -> Any:
    """The response class of an rpc."""
    return getattr(admin_pb2 if rpc in ADMIN else cache_pb2, f"{rpc}Response")


def failure_of(error: common_pb2.Error) -> Failure:
    """A wire error."""
    return Failure(error.code, error.reason, error.message)


class GrpcDriver:
    """gRPC over a unix socket or TCP."""

    def __init__(self, address: str, service: str = "prefixcache.v1.CacheService") -> None:
        self.transport = "grpc"
        self._service = service
        self.channel = grpc.insecure_channel(address)

    def call(self, rpc: str, request: Any) -> Any:
        method = self.channel.unary_unary(
            f"/{'prefixcache.v1.AdminService' if rpc in ADMIN else self._service}/{rpc}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response_type(rpc).FromString,
        )
        try:
            return method(request, timeout=_DEADLINE_S)
        except grpc.RpcError as error:
            raise grpc_failure(error) from error

    def close(self) -> None:
        self.channel.close()


def grpc_failure(error: Any) -> Failure:
    """The Error in a gRPC status."""
    for name, value in error.trailing_metadata() or ():
        if name == "grpc-status-details-bin":
            status = common_pb2.Status.FromString(value)
            inner = common_pb2.Error()
            assert status.details[0].Unpack(inner)
            assert inner.code == error.code().value[0] == status.code
            return failure_of(inner)
    return Failure(error.code().value[0], 0, error.details() or "")


class LocalDriver:
    """The framed unix socket, one call at a time."""

    def __init__(self, path: str) -> None:
        self.transport = "local"
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_DEADLINE_S)
        self.sock.connect(path)
        self._next = 0
        self.fds: list[int] = []

    def call(self, rpc: str, request: Any) -> Any:
        snake = "".join(f"_{letter}" if letter.isupper() else letter for letter in rpc).upper()
        payload = self.raw(int(local_pb2.Method.Value(f"METHOD{snake}")), request.SerializeToString())
        kind = local_pb2.MapPoolResponse if rpc == "MapPool" else response_type(rpc)
        return kind.FromString(payload)

    def raw(self, method: int, payload: bytes) -> bytes:
        """One frame there and one back. Raises Failure."""
        self._next += 1
        self.send_frame(self._next, method, payload)
        call, echoed, flags, answer = self.read_frame()
        assert call == self._next
        if flags & 2:
            raise failure_of(common_pb2.Error.FromString(answer))
        assert echoed == method
        assert flags & 1
        return answer

    def send_frame(self, call: int, method: int, payload: bytes, flags: int = 1) -> None:
        """Send a frame."""
        self.sock.sendall(HEADER.pack(len(payload), call, method, flags) + payload)

    def read_frame(self) -> tuple[int, int, int, bytes]:
        """(call, method, flags, payload) of the next frame; EOFError when the server hung up."""
        length, call, method, flags = HEADER.unpack(self._exactly(HEADER.size))
        return call, method, flags, self._exactly(length)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece, fds, _, _ = socket.recv_fds(self.sock, size - len(data), 8)
            self.fds.extend(fds)
            if not piece:
                raise EOFError
            data += piece
        return data

    def close(self) -> None:
        self.sock.close()
