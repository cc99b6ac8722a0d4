"""The baselines of `bench acquire` echo exactly what they get, and their processes end with them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from prefixcache.cli.bench.echo import grpc_echo, local_echo


@pytest.mark.parametrize("open_echo", [grpc_echo, local_echo])
def test_echoes_small_and_large_and_leaves_no_process(open_echo, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]  # parametrised
    before = set(psutil.Process().children())
    with open_echo(tmp_path) as call:
        started = set(psutil.Process().children()) - before
        for size in (1, 1024, 65536, 1 << 20):
            payload = os.urandom(size)
            assert call(payload) == payload
    assert len(started) == 1
    assert not any(process.is_running() for process in started)
