"""Without $XDG_RUNTIME_DIR the default socket lies in the temporary folder, where anybody may make that folder
first. A worker took blocks from whoever listened there, and a daemon made its socket in a stranger's folder."""

import os
from pathlib import Path

import pytest

from prefixcache.server.config import ConfigError, load
from prefixcache.server.sockets import SocketPlace
from prefixcache_client import Client
from tests.e2e.processes import DaemonProcess
from tests.issues.conftest import PATIENT
from tests.issues.workers import TOKENS, namespace


@pytest.fixture
def strangers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder, as it looks to a user who is not its owner."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("PREFIXCACHE_ADDRESS", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    victim = os.geteuid() + 1
    folder = tmp_path / f"prefixcache-{victim}"
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, victim + 1, -1)  # what root made would be trusted
    monkeypatch.setattr("os.geteuid", lambda: victim)
    return folder


def test_a_worker_takes_nothing_from_there(strangers_folder: Path) -> None:
    running = DaemonProcess(strangers_folder)
    (strangers_folder / "daemon.sock").symlink_to(running.socket)
    (strangers_folder / "daemon.sock.local").symlink_to(running.local)
    try:
        with Client(options=PATIENT) as client:
            assert client.acquire(namespace(client), TOKENS).reason == "server_unavailable"
        with Client(f"unix://{running.socket}", PATIENT) as client:
            assert client.acquire(namespace(client), TOKENS).reason == "not_cached", "a place that was named is taken"
    finally:
        running.kill()


def test_a_daemon_does_not_go_there(strangers_folder: Path) -> None:
    with pytest.raises(ConfigError, match="belongs to another user"):
        SocketPlace(load({}, environ={}).config.socket)
