"""The limit that `acquire` is measured against: a server that only sends back what it was sent.

Runs in a process of its own (`python -m prefixcache.cli.bench.echo TRANSPORT SOCKET`) until its standard input ends,
and prints one line when it listens. Two forms:
- grpc: a bare `grpc.server` on a thread pool with one generic handler and no (de)serialising;
- local: one blocking unix stream socket, a connection at a time, frames of u32 length and payload.
It must not know what the bytes mean.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc

METHOD: Final = "/prefixcache.bench.Echo/Echo"
_LENGTH: Final = struct.Struct("<I")
_THREADS: Final = 4
_MAX_MESSAGE: Final = 64 << 20
_OPTIONS: Final = (
    ("grpc.max_send_message_length", _MAX_MESSAGE),
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.enable_http_proxy", 0),
)

Echo = Callable[[bytes], bytes]


@contextmanager
def grpc_echo(folder: Path) -> Iterator[Echo]:
    """A function that sends bytes to a bare gRPC server on a unix socket in `folder` and returns the answer."""
    path = folder / "echo-grpc.sock"
    with _server("grpc", path), grpc.insecure_channel(f"unix://{path}", options=list(_OPTIONS)) as channel:
        call: Echo = channel.unary_unary(METHOD, None, None)
        yield call


@contextmanager
def local_echo(folder: Path) -> Iterator[Echo]:
    """The same over a bare blocking unix socket."""
    path = folder / "echo-local.sock"
    with _server("local", path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))

        def call(payload: bytes) -> bytes:
            connection.sendall(_LENGTH.pack(len(payload)) + payload)
            return _receive_frame(connection)

        yield call


@contextmanager
def _server(transport: str, path: Path) -> Iterator[None]:
    command = [sys.executable, "-m", __name__, transport, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise RuntimeError(f"the {transport} echo server did not start")
            yield
        finally:
            process.stdin.close()
            process.wait()


def serve_grpc(path: str) -> None:
    """Answer until standard input ends."""
    handler = grpc.method_handlers_generic_handler(
        "prefixcache.bench.Echo", {"Echo": grpc.unary_unary_rpc_method_handler(lambda request, context: request)}
    )
    server = grpc.server(ThreadPoolExecutor(_THREADS), options=list(_OPTIONS))
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"unix://{path}")
    server.start()
    print("listening", flush=True)
    sys.stdin.read()
    server.stop(None).wait()


def serve_local(path: str) -> None:
    """Answer one connection until it ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(1)
        print("listening", flush=True)
        connection, _ = listener.accept()
        with connection:
            while True:
                try:
                    payload = _receive_frame(connection)
                except EOFError:
                    return
                connection.sendall(_LENGTH.pack(len(payload)) + payload)


def _receive_frame(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    return bytes(_receive(connection, length))


def _receive(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    got = 0
    while got < length:
        count = connection.recv_into(view[got:])
        if not count:
            raise EOFError
        got += count
    return data


if __name__ == "__main__":
    os.umask(0o077)
    {"grpc": serve_grpc, "local": serve_local}[sys.argv[1]](sys.argv[2])
