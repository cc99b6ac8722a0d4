"""`prefixcache bench`: runs the sections asked for and prints one object or tables.

What belongs here: order, progress on standard error, and what happens to a section that cannot run. The names in the
object are a promise to scripts. It must not measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from prefixcache.cli.bench import report
from prefixcache.cli.bench.plan import QUICK, Plan, Progress
from prefixcache.cli.errors import CliError
from prefixcache.cli.output import Settings

Section = Callable[[Plan, Progress], dict[str, Any]]
ORDER: Final = ("acquire", "load", "store", "index", "overhead", "disk", "restart", "codec")


def run(settings: Settings, wanted: set[str], *, quick: bool) -> None:
    """Measure and print. Of several sections one that cannot run here is told in `skipped`; alone it is an error."""
    sections = [name for name in ORDER if name in wanted or not wanted or "all" in wanted]
    plan = QUICK if quick else Plan()
    told: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    with _progress() as progress:
        for group in _grouped(sections):
            try:
                told |= _section(group)(plan, progress)
            except CliError as error:
                if len(sections) == 1 or error.reason != "missing_package":
                    raise
                skipped |= dict.fromkeys(group, error.message)
    if skipped:
        told["skipped"] = skipped
    settings.emit(told, lambda: report.draw(told))


def _grouped(sections: list[str]) -> list[tuple[str, ...]]:
    """`load` and `store` share one worker, so asking for both runs it once."""
    copies = tuple(name for name in sections if name in ("load", "store"))
    others: list[tuple[str, ...]] = [(name,) for name in sections if name not in copies]
    return [copies, *others] if copies else others


def _section(names: tuple[str, ...]) -> Section:
    """The measuring function, imported now: each drags in what it measures."""
    match names[0]:
        case "acquire":
            from prefixcache.cli.bench import acquire

            return acquire.run
        case "load" | "store":
            from prefixcache.cli.bench import transfer

            return lambda plan, progress: transfer.run(plan, progress, names)
        case "index":
            from prefixcache.cli.bench import index

            return index.run
        case "codec":
            from prefixcache.cli.bench import codec

            return codec.run
        case "disk":
            from prefixcache.cli.bench import disk

            return disk.run
        case "restart":
            from prefixcache.cli.bench import restart

            return restart.run
        case _:
            from prefixcache.cli.bench import overhead

            return overhead.run


@contextmanager
def _progress() -> Iterator[Progress]:
    """A spinner with a line of text on standard error; nothing where that is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting") as status:
        yield lambda text: status.update(text)
