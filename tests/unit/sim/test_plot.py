"""The picture of a sweep, where matplotlib is there to draw it."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixcache.sim.plot import can_plot, save_plot
from prefixcache.sim.sweep import Plan, sweep
from tests.unit.sim.traces import BLOCK_TOKENS, made_up


@pytest.mark.skipif(not can_plot(), reason="needs matplotlib (the extra `plot`)")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_sweep_becomes_a_png(tmp_path: Path) -> None:
    trace = made_up(100, 8)
    rows = list(sweep(trace, Plan(("lru", "optimum"), (5, 20, 50), BLOCK_TOKENS)))
    path = tmp_path / "sweep.png"
    save_plot(rows, trace.name, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert path.stat().st_size > 10_000
    with pytest.raises(OSError, match="No such file"):
        save_plot(rows, trace.name, tmp_path / "nowhere" / "sweep.png")
