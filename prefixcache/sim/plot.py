"""A sweep as a picture: token hit ratio over capacity, one line per policy and disk.

Rules: matplotlib is imported here and nowhere else, and only when a picture is wanted; it draws into a file without any
display. Must not know: traces, the planner.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from prefixcache.sim.sweep import OPTIMUM, Row


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def save_plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Writes a PNG. Raises OSError where the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for policy, disk in dict.fromkeys((row.policy, row.disk_blocks) for row in rows):
        line = [row for row in rows if (row.policy, row.disk_blocks) == (policy, disk)]
        mine = sorted((row.capacity_blocks, 100 * row.token_hit_ratio) for row in line)
        style = "--" if policy == OPTIMUM else "-"
        label = f"{policy}, {disk:,} on disk" if disk else policy
        axes.plot([blocks for blocks, _ in mine], [ratio for _, ratio in mine], style, marker="o", label=label)
    axes.set_xscale("log")
    capacities = sorted({row.capacity_blocks for row in rows})
    axes.set_xticks(capacities, [f"{blocks:,}" for blocks in capacities])
    axes.minorticks_off()
    axes.set_xlabel("capacity of memory, blocks")
    axes.set_ylabel("token hit ratio, %")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png")
