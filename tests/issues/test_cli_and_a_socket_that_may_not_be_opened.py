"""`prefixcache status` said "no daemon answers" also where the daemon's socket belongs to another user, and asked
whoever listened in a default folder that somebody else had made."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefixcache.cli import daemon
from prefixcache.cli.main import app


def status(*more: str) -> dict[str, str]:
    result = CliRunner().invoke(app, ["status", "--json", *more], prog_name="prefixcache")
    assert result.exit_code == 1
    error: dict[str, str] = json.loads(result.stdout)["error"]
    return error


def test_no_permission_is_told_apart_from_no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"unix://{tmp_path}/d.sock"
    assert status("--address", address)["reason"] == "server_unavailable"

    class Forbidden(socket.socket):
        def connect(self, address: object) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(daemon.socket, "socket", Forbidden)
    error = status("--address", address)
    assert (error["reason"], error["message"]) == ("permission_denied", f"no permission to open {address}")
    assert "user who runs the daemon" in error["hint"]


def test_a_default_folder_of_somebody_else_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("PREFIXCACHE_ADDRESS", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    victim = os.geteuid() + 1
    folder = tmp_path / f"prefixcache-{victim}"
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, victim + 1, -1)
    monkeypatch.setattr("os.geteuid", lambda: victim)
    error = status()
    assert error["reason"] == "foreign_folder"
    assert "belongs to another user" in error["message"]
