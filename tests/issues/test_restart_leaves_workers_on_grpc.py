"""The daemon listened for gRPC before the local channel. A worker that came back in between, as all do after a restart,
found gRPC only and sent its blocks as streams from then on."""

import socket
from pathlib import Path

import pytest

from prefixcache.server.app import Daemon
from prefixcache.server.config import load
from prefixcache.server.grpc_server import GrpcServer


def test_whoever_finds_grpc_finds_the_local_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(load({"socket": str(tmp_path / "d.sock"), "http": "", "host_bytes": "8MiB"}, environ={}))
    listen, answered = GrpcServer.listen, []

    def checked(server: GrpcServer, address: str) -> int:
        with socket.socket(socket.AF_UNIX) as probe:
            answered.append(probe.connect_ex(daemon.place.local_path))
        return listen(server, address)

    monkeypatch.setattr(GrpcServer, "listen", checked)
    daemon.start()
    daemon.stop()
    assert answered == [0]
