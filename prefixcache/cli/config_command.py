"""`prefixcache config show`: every setting of the daemon, its value, and who set it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prefixcache.cli.errors import bad_usage
from prefixcache.cli.output import Settings
from prefixcache.server import config

if TYPE_CHECKING:
    from rich.console import RenderableType


def load(flags: Mapping[str, str | None], file: Path | None) -> config.Loaded:
    """The configuration that a daemon started with these flags would have. Raises CliError."""
    try:
        return config.load(flags, file=file)
    except config.ConfigError as error:
        raise bad_usage(str(error), "`prefixcache config show` lists every key") from error


def show(settings: Settings, flags: Mapping[str, str | None], file: Path | None) -> None:
    """Print every key with its value and origin."""
    listed = load(flags, file).describe()
    told = {item.key: {"value": item.value, "origin": item.source, "variable": item.env} for item in listed}
    settings.emit(told, lambda: _draw(listed))


def _draw(listed: list[config.Setting]) -> list[RenderableType]:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("key", "value", "origin", "what it is"):
        table.add_column(column)
    for item in listed:
        style = "dim" if item.source == "default" else None
        table.add_row(item.key, escape(item.value) or "-", escape(item.source), escape(item.doc), style=style)
    return [table]
