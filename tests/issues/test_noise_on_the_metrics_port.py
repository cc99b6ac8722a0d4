"""Whoever sent something else than HTTP to the metrics port got a traceback into the daemon's log each time: a port
scan, a TLS client or a bored user could fill it."""

from __future__ import annotations

import logging
import socket
import urllib.request
from pathlib import Path

import pytest

from tests.contract.conftest import start_daemon, stop_daemon

NOISE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of a TLS handshake
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x00" * 64 + b"\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    b"GET " + b"/" * 20_000 + b" HTTP/1.1\r\n\r\n",
    b"PUT /metrics HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
)


def test_it_is_refused_without_a_word_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    daemon = start_daemon(tmp_path)
    url = next(each for each in daemon.addresses if each.startswith("http"))
    host, _, port = url.removeprefix("http://").rpartition(":")
    caplog.set_level(logging.INFO)
    caplog.clear()
    for noise in NOISE:
        with socket.create_connection((host, int(port)), timeout=20) as peer:
            peer.sendall(noise)
            answer = peer.recv(64)
        assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400")) or not answer, answer
    with urllib.request.urlopen(url + "/healthz", timeout=20) as healthy:
        assert healthy.status == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO] == []
    stop_daemon(daemon)
