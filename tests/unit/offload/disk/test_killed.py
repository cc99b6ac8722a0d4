"""kill -9 for real: at every step of write, seal, clear, free, re-append, restart; at any moment with threads."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.offload.disk.killed_log import Told
from tests.unit.offload.disk.log import SMALL, Log, numbers_of

MODULE = "tests.unit.offload.disk.killed_log"
TIMEOUT_S = 240.0


def check(folder: Path, told: Told) -> None:
    options = replace(SMALL, cap_bytes=512 << 10)
    log = Log(None, options, str(folder))
    found = log.recover()
    there = set(numbers_of(found))
    assert log.check(found) == there, "a record was told that is not whole"
    assert set(told.stored) <= there, "what had ended well is lost"
    assert there <= set(range(14)) - set(told.cleared)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= options.cap_bytes
    log.tier.close()
    again = Log(None, options, str(folder))
    assert set(numbers_of(again.recover())) == there
    assert not again.tier.recovery.counters.scanned
    again.tier.close()


@pytest.mark.slow
def test_killed_at_every_step(tmp_path: Path) -> None:
    line = [sys.executable, "-m", MODULE, str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(text) for text in done.stdout.splitlines()]
    assert len(rows) >= 50
    assert all(row["killed"] for row in rows)
    for row in rows:
        folder = Path(row["folder"])
        check(folder / "data", Told(**json.loads((folder / "told.json").read_text())))


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 7, 30])
def test_killed_at_any_moment_with_threads(lines: int, tmp_path: Path) -> None:
    line = [sys.executable, "-m", MODULE, str(tmp_path / "data"), "threads"]
    stored: set[int] = set()
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(lines):
            stored |= set(json.loads(child.stdout.readline()))
        child.kill()
        for text in child.stdout:
            if text.endswith("\n"):
                stored |= set(json.loads(text))
    log = Log(None, replace(SMALL, cap_bytes=64 << 20), str(tmp_path / "data"))
    found = log.recover()
    assert log.check(found) == set(numbers_of(found))
    assert stored <= set(numbers_of(found))
    log.tier.close()
