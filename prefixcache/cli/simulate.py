"""`prefixcache simulate`: what a cache of some size would have been worth for a recorded trace.

Rules: options in, rows out; how a trace is replayed is the business of `prefixcache.sim`. Everything that can be wrong
with the options is found before the first replay, because replays take a while.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from prefixcache.cli.errors import CliError, bad_usage
from prefixcache.cli.output import Settings, size
from prefixcache.server.units import parse_size
from prefixcache.sim.capacity import capacities_blocks
from prefixcache.sim.plot import can_plot, save_plot
from prefixcache.sim.sweep import KNOWN_POLICIES, Plan, Row, sweep
from prefixcache.sim.trace import Trace, TraceError, read_trace

if TYPE_CHECKING:
    from rich.console import RenderableType

    from prefixcache.sim.replay import Progress


_TELL_EVERY_S: Final = 10.0


@dataclass(frozen=True)
class Options:
    """The options as they were given."""

    policies: str
    capacities: str
    block_tokens: int
    block_bytes: str | None
    gpu_capacity: str | None
    disk_capacities: str | None
    disk_bandwidth: str
    host_bandwidth: str
    prefill_tokens_per_s: float
    seed: int
    plot: Path | None
    skip_bad: bool


def run(settings: Settings, file: Path, options: Options) -> None:
    """Replay the trace and print one row per policy and capacity. Raises CliError."""
    policies = _policies(options.policies)
    if options.plot is not None:
        _check_plot(options.plot)
    try:
        trace = read_trace(file, skip_bad=options.skip_bad)
    except TraceError as error:
        hint = "--skip-bad goes on without malformed lines" if ", line " in str(error) else ""
        raise CliError(str(error), hint, reason="bad_trace") from error
    _warn(trace, options.block_tokens)
    plan = _plan(trace, policies, options)
    with _progress(trace, plan) as progress:
        try:
            rows = list(sweep(trace, plan, progress))
        except ValueError as error:
            raise bad_usage(str(error), "--capacity takes less, or --block-bytes a smaller block") from error
    if options.plot is not None:
        try:
            save_plot(rows, trace.name, options.plot)
        except OSError as error:
            raise CliError(f"cannot write {options.plot}: {error.strerror}", reason="cannot_write") from error
    told = {
        "requests": len(trace.requests), "tokens": trace.tokens, "unique_blocks": trace.unique_blocks,
        "skipped_lines": trace.skipped,
    }  # fmt: skip
    settings.emit({"rows": [row.as_json() for row in rows], "trace": told}, lambda: _draw(trace, rows))


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in KNOWN_POLICIES]
    if unknown or not names:
        told = f"there is no policy {unknown[0]!r}" if unknown else "--policy names none"
        raise bad_usage(told, f"policies are {', '.join(KNOWN_POLICIES)}")
    return names


def _plan(trace: Trace, policies: tuple[str, ...], options: Options) -> Plan:
    block_bytes = _rate("--block-bytes", options.block_bytes) if options.block_bytes is not None else None
    if block_bytes is None and (options.disk_capacities is not None or options.gpu_capacity is not None):
        hint = "say how many bytes a block takes with --block-bytes"
        raise bad_usage("--disk-capacity and --gpu-capacity: what tiers move at once depends on bytes", hint)
    disks: tuple[int, ...] = (0,)
    gpu = 0
    if options.disk_capacities is not None:
        disks = _capacities("--disk-capacity", options.disk_capacities, trace, block_bytes)
    if options.gpu_capacity is not None:
        gpu, *more = _capacities("--gpu-capacity", options.gpu_capacity, trace, block_bytes)
        if more:
            raise bad_usage("--gpu-capacity takes one size", "sweeps are over --capacity and --disk-capacity")
    return Plan(
        policies,
        _capacities("--capacity", options.capacities, trace, block_bytes),
        options.block_tokens,
        options.seed,
        options.prefill_tokens_per_s,
        block_bytes,
        disks,
        _rate("--disk-bandwidth", options.disk_bandwidth),
        _rate("--host-bandwidth", options.host_bandwidth),
        gpu,
    )


def _capacities(option: str, texts: str, trace: Trace, block_bytes: int | None) -> tuple[int, ...]:
    try:
        return capacities_blocks(texts, trace.unique_blocks, block_bytes, or_none=option != "--capacity")
    except ValueError as error:
        hint = "a share such as 0.05, blocks such as 2000, or bytes such as 4GiB with --block-bytes"
        raise bad_usage(f"{option}: {error}", hint) from error


def _rate(option: str, text: str) -> int:
    """A number of bytes that cannot be 0."""
    try:
        value = parse_size(text)
    except ValueError as error:
        raise bad_usage(f"{option}: {error}") from error
    if not value:
        raise bad_usage(f"{option} takes at least one byte")
    return value


def _check_plot(path: Path) -> None:
    if not can_plot():
        hint = "pip install 'prefixcache[plot]' brings it"
        raise CliError("--plot needs matplotlib, which is not installed", hint, reason="plot_missing")
    if not path.parent.is_dir():
        raise bad_usage(f"--plot: there is no folder {path.parent}")


def _warn(trace: Trace, block_tokens: int) -> None:
    if trace.skipped:
        typer.echo(f"warning: skipped {trace.skipped} malformed lines", err=True)
    if not trace.fits(block_tokens):
        text = f"warning: prompts of {trace.name} do not have the blocks that {block_tokens} tokens a block would make"
        typer.echo(f"{text}; is --block-tokens right?", err=True)


@contextmanager
def _progress(trace: Trace, plan: Plan) -> Iterator[Callable[[str], Progress]]:
    """On stderr: a bar on a terminal, elsewhere a line now and then when it takes long."""
    if not sys.stderr.isatty():
        yield _Lines(len(trace.requests)).begin
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        total = len(trace.requests) * len(plan.policies) * len(plan.capacities) * len(plan.disks)
        task = bars.add_task(trace.name, total=total)

        def begin(label: str) -> Progress:
            bars.update(task, description=label)
            return lambda requests: bars.advance(task, requests)

        yield begin


class _Lines:
    """A line when ten seconds have passed since the last."""

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._told_at = time.monotonic()

    def begin(self, label: str) -> Progress:
        done = 0

        def advance(requests: int) -> None:
            nonlocal done
            done += requests
            if time.monotonic() - self._told_at >= _TELL_EVERY_S:
                self._told_at = time.monotonic()
                typer.echo(f"{label}: {done:,} of {self._requests:,} requests", err=True)

        return advance


def _draw(trace: Trace, rows: list[Row]) -> list[RenderableType]:
    """What fits on a narrow terminal; --json has all of it."""
    from rich.table import Table

    title = f"{trace.name}: {len(trace.requests):,} requests, {trace.unique_blocks:,} unique blocks"
    tiers = [name for name in ("gpu", "disk") if any(tier.tier == name for row in rows for tier in row.tiers)]
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    heads = ["capacity", "share", "hits", "stored", "saved", "took"]
    if tiers:
        heads = ["memory", "disk", "hits", *(f"of {name}" for name in tiers), "to disk", "saved"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        cells = _tier_cells(row, tiers) if tiers else _memory_cells(row, trace)
        table.add_row(row.policy, f"{row.capacity_blocks:,}", *cells)
    return [table, "hits: share of tokens; saved: seconds of prefill, less loading; --json says more"]


def _memory_cells(row: Row, trace: Trace) -> list[str]:
    stored = f"{row.blocks_written:,}" if row.bytes_written is None else size(row.bytes_written)
    share = f"{row.capacity_blocks / max(trace.unique_blocks, 1):.1%}"
    return [share, f"{row.token_hit_ratio:.2%}", stored, f"{row.saved_prefill_s:,.0f} s", f"{row.seconds:.1f} s"]


def _tier_cells(row: Row, tiers: list[str]) -> list[str]:
    by_tier = {tier.tier: tier for tier in row.tiers}
    shares = [f"{by_tier[name].token_hit_ratio:.2%}" if name in by_tier else "-" for name in tiers]
    written = by_tier["disk"].bytes_written if "disk" in by_tier else None
    to_disk = "-" if written is None else size(written)
    return [f"{row.disk_blocks:,}", f"{row.token_hit_ratio:.2%}", *shares, to_disk, f"{row.saved_prefill_s:,.0f} s"]
