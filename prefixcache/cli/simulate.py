"""`prefixcache simulate`: what a cache of some size would have been worth for a recorded trace.

Rules: options in, rows out; how a trace is replayed is the business of `prefixcache.sim`. Everything that can be wrong
with the options is found before the first replay, because replays take a while.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from prefixcache.cli.errors import CliError, bad_usage
from prefixcache.cli.output import Settings, size
from prefixcache.server.units import parse_size
from prefixcache.sim.capacity import capacity_blocks
from prefixcache.sim.plot import can_plot, save_plot
from prefixcache.sim.sweep import KNOWN_POLICIES, Plan, Row, sweep
from prefixcache.sim.trace import Trace, TraceError, read_trace

if TYPE_CHECKING:
    from rich.console import RenderableType

    from prefixcache.sim.replay import Progress


@dataclass(frozen=True)
class Options:
    """The options as they were given."""

    policies: str
    capacities: str
    block_tokens: int
    block_bytes: str | None
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
    with _progress(trace, plan, quiet=settings.as_json) as progress:
        rows = list(sweep(trace, plan, progress))
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
    try:
        block_bytes = parse_size(options.block_bytes) if options.block_bytes is not None else None
        if block_bytes == 0:
            raise ValueError("a block takes at least one byte")
        texts = [text for text in options.capacities.split(",") if text.strip()]
        blocks = dict.fromkeys(capacity_blocks(text, trace.unique_blocks, block_bytes) for text in texts)
        if not blocks:
            raise ValueError("--capacity names none")
    except ValueError as error:
        hint = "a share such as 0.05, blocks such as 2000, or bytes such as 4GiB with --block-bytes"
        raise bad_usage(str(error), hint) from error
    return Plan(
        policies, tuple(blocks), options.block_tokens, options.seed, options.prefill_tokens_per_s, block_bytes
    )  # fmt: skip


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
def _progress(trace: Trace, plan: Plan, *, quiet: bool) -> Iterator[Callable[[str], Progress] | None]:
    """A bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        total = len(trace.requests) * len(plan.policies) * len(plan.capacities)
        task = bars.add_task(trace.name, total=total)

        def begin(label: str) -> Progress:
            bars.update(task, description=label)
            return lambda requests: bars.advance(task, requests)

        yield begin


def _draw(trace: Trace, rows: list[Row]) -> list[RenderableType]:
    from rich.table import Table

    title = f"{trace.name}: {len(trace.requests):,} requests, {trace.unique_blocks:,} unique blocks"
    with_bytes = rows[0].bytes_written is not None
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    heads = ["capacity", "share", "token hits", "block hits", "written", "saved prefill", "took"]
    for head in heads + (["bytes written", "bytes read"] if with_bytes else []):
        table.add_column(head, justify="right")
    for row in rows:
        cells = [
            row.policy, f"{row.capacity_blocks:,}", f"{row.capacity_blocks / max(trace.unique_blocks, 1):.1%}",
            f"{row.token_hit_ratio:.2%}", f"{row.block_hit_ratio:.2%}", f"{row.blocks_written:,}",
            f"{row.saved_prefill_s:,.0f} s", f"{row.seconds:.1f} s",
        ]  # fmt: skip
        if row.bytes_written is not None and row.bytes_read is not None:
            cells += [size(row.bytes_written), size(row.bytes_read)]
        table.add_row(*cells)
    return [table]
