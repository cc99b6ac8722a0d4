"""`prefixcache bench restart`: the names of its figures, that every block came back, and that it leaves nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from prefixcache.cli.bench import restart
from prefixcache.cli.bench.plan import QUICK

pytestmark = pytest.mark.slow


def test_a_killed_log_is_read_and_nothing_is_left(tmp_path: Path) -> None:
    told: list[str] = []
    plan = replace(QUICK, restart_blocks=10_000)
    result = restart.run(plan, told.append, tmp_path)["restart"]
    assert set(result) == {"blocks", "seconds", "first_hit_s"}
    assert result["blocks"] == 10_000
    assert 0 < result["seconds"] < math.inf
    assert 0 < result["first_hit_s"] < math.inf
    assert told[0] == "restart: 10,000 of 10,000 blocks written"
    assert not list(tmp_path.iterdir())
