"""How results reach people and scripts: a rich table, or one JSON object.

What belongs here: the settings that all commands share, and printing. It must not know what is printed. Rich is
imported only when a table is drawn, because it costs more than most commands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

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


def share(part: float, whole: float) -> str:
    """A percentage for people, `-` of nothing."""
    return f"{100 * part / whole:.1f}%" if whole else "-"
