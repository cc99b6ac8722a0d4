"""Addresses and where they come from."""

import tempfile

import pytest

from prefixcache_client.address import default_socket, parse_address


@pytest.mark.parametrize(
    ("text", "socket", "target"),
    [
        ("unix:///run/p.sock", "/run/p.sock", "unix:/run/p.sock"),
        ("unix:/run/p.sock", "/run/p.sock", "unix:/run/p.sock"),
        ("unix:p.sock", "p.sock", "unix:p.sock"),
        ("/run/p.sock", "/run/p.sock", "unix:/run/p.sock"),
        ("cache.example:9000", "", "cache.example:9000"),
        ("[::1]:9000", "", "[::1]:9000"),
    ],
)
def test_forms(text: str, socket: str, target: str) -> None:
    address = parse_address(text)
    assert (address.socket_path, address.target) == (socket, target)
    assert address.local_path == (socket + ".local" if socket else "")


@pytest.mark.parametrize("text", ["nonsense", "unix://", "host:", ":80", "host:0", "host:65536", "host:http"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="address"):
        parse_address(text)


def test_environment_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXCACHE_ADDRESS", "host:1")
    assert parse_address().target == "host:1"
    assert parse_address("other:2").target == "other:2"
    monkeypatch.delenv("PREFIXCACHE_ADDRESS")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert parse_address().socket_path == "/run/user/7/prefixcache/daemon.sock"


@pytest.mark.parametrize(("uid", "expected"), [(0, "/run/prefixcache/daemon.sock"), (7, None)])
def test_default_without_a_runtime_folder(monkeypatch: pytest.MonkeyPatch, uid: int, expected: str | None) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: uid)
    assert default_socket() == (expected or f"{tempfile.gettempdir()}/prefixcache-7/daemon.sock")
