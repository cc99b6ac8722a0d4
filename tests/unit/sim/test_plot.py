"""The picture of a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixcache.sim.plot import can_plot, save_plot
from prefixcache.sim.sweep import Plan, sweep
from tests.unit.sim.traces import BLOCK_TOKENS, made_up


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_sweep_becomes_a_png(tmp_path: Path) -> None:
    assert can_plot()  # matplotlib belongs to the extra `dev`
    trace = made_up(100, 8)
    plan = Plan(("lru", "optimum"), (5, 20, 50), BLOCK_TOKENS, block_bytes=1 << 20, disks=(0, 60))
    rows = list(sweep(trace, plan))
    path = tmp_path / "sweep.png"
    save_plot(rows, trace.name, path)
    drawn = path.read_bytes()
    assert drawn.startswith(b"\x89PNG\r\n")
    assert len(drawn) > 10_000
    save_plot(rows[:3], trace.name, path)
    assert path.read_bytes() != drawn  # another sweep is another picture
    with pytest.raises(OSError, match="No such file"):
        save_plot(rows, trace.name, tmp_path / "nowhere" / "sweep.png")
