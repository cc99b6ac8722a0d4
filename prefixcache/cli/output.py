"""How results reach people and scripts: a rich table, or one JSON object.

What belongs here: the settings that all commands share, and printing. It must not know what is printed. Rich is
imported only when a table is drawn, because it costs more than most commands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        help="Daemon to ask: unix:///PATH or HOST:PORT. Default: PREFIXCACHE_ADDRESS, else this user's own daemon.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Settings:
    """What every command takes, before or behind its name."""

    as_json: bool = False
    address: str | None = None

    @classmethod
    def of(cls, context: typer.Context, *, as_json: bool = False, address: str | None = None) -> Settings:
        """Settings given to this command, completed by those given before its name."""
        before = context.obj if isinstance(context.obj, Settings) else cls()
        return cls(as_json=as_json or before.as_json, address=address or before.address)

    def emit(self, data: Mapping[str, object], draw: Callable[[], list[RenderableType]]) -> None:
        """Print `data` as one JSON object, or what `draw` makes of it."""
        if self.as_json:
            typer.echo(json.dumps(data))
            return
        from rich.console import Console

        console = Console()
        for item in draw():
            console.print(item)


def size(size_bytes: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def table(*columns: str) -> Table:
    """A table for people, which fits 80 columns: only its first column is folded where a name is long. Numbers, which
    come behind the first two columns, stand to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        side: Literal["left", "right"] = "left" if number < 2 else "right"
        drawn.add_column(column, justify=side, no_wrap=number > 0, overflow="fold", min_width=0 if number else 12)
    return drawn


def count(number: int) -> str:
    """A number for people: exact below a million, else `12.3M`."""
    if number < 1_000_000:
        return f"{number:,}"
    return f"{number / 1e6:,.1f}M" if number < 1e9 else f"{number / 1e9:,.1f}G"


def span(seconds: float) -> str:
    """A time for people: `23 h`, `5 min`, `12 s`."""
    for step, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * step:
            return f"{seconds / step:.0f} {unit}"
    return f"{seconds:.0f} s"


def share(part: float, whole: float) -> str:
    """A percentage for people, `-` of nothing."""
    return f"{100 * part / whole:.1f}%" if whole else "-"
