"""`prefixcache bench disk`: the names of its figures, both limits, and that it leaves nothing. Never how fast."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from prefixcache.cli.bench import disk
from prefixcache.cli.bench.plan import QUICK
from prefixcache.cli.errors import CliError


@pytest.mark.parametrize("limit", ["preadv", "fio"])
def test_both_sides_are_measured_and_nothing_is_left(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit == "fio" and shutil.which("fio") is None:
        pytest.skip("fio is not installed here")
    if limit == "preadv":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    told = disk.run(QUICK, lambda text: None, tmp_path)["disk"]
    assert told.pop("limit") == limit
    daemons = {"demotion_gb_per_s", "demoted_gb_per_s", "first_bytes_ms", "first_block_ms", "plain_read_ms"}
    daemons |= {f"acquire_p99_{beside}_us" for beside in ("idle", "demotion", "storing", "demoting")}
    daemons |= {f"echo_p99_{beside}_us" for beside in ("idle", "writing")}
    rates = {"read_gb_per_s", "write_gb_per_s", "limit_read_gb_per_s", "limit_write_gb_per_s"}
    assert set(told) == rates | daemons | {"write_amplification"}
    assert all(math.isfinite(rate) and rate > 0 for rate in told.values())
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(CliError) as told:
        disk.run(QUICK, lambda text: None, tmp_path)
    assert told.value.reason == "no_space"
