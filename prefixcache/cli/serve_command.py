"""`prefixcache serve`: every key of the server's configuration as a flag, and the hand-over to the server.

Flags are made from the fields of `Config`, so that a new key needs no line here. It must not know any single key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixcache.cli.errors import CliError
from prefixcache.server.config import Config

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="TOML file; PREFIXCACHE_CONFIG otherwise.", show_default=False),
]


def with_config_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, whose `**flags` become one option per configuration key, each None when not given."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    keys = [
        _parameter(item.name, item.type, item.metadata["doc"], repeatable="repeatable" in item.metadata)
        for item in fields(Config)
    ]
    command.__signature__ = signature.replace(parameters=[*own, *keys])  # type: ignore[attr-defined]  # functions take any attribute
    del command.__annotations__["flags"]
    return command


def _parameter(key: str, kind: object, doc: str, *, repeatable: bool) -> inspect.Parameter:
    flag = key.replace("_", "-")
    text = f"{doc[0].upper()}{doc[1:]}."
    switch = kind in (bool, "bool")
    names = f"--{flag}/--no-{flag}" if switch else f"--{flag}"
    option: Any = typer.Option(names, help=text, show_default=False, metavar=None if switch else _metavar(key))
    plain: Any = list[str] | None if repeatable else str | None
    annotation: Any = Annotated[bool | None if switch else plain, option]
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(key: str) -> str:
    """What a flag takes, by how keys of its kind are named."""
    if key in {"listen", "http"}:
        return "HOST:PORT"
    if key.endswith("bytes"):
        return "SIZE"
    if key == "gpu":
        return "DEVICE=SIZE"
    return "TIME" if key.endswith(("ttl", "ttl_max", "timeout")) else key.rsplit("_", 1)[-1].upper()


def run(flags: dict[str, Any], file: Path | None) -> int:
    """Serve until a signal ends it, and return the exit code. Raises CliError for a configuration that cannot be."""
    from prefixcache.cli import config_command

    loaded = config_command.load(flags, file)
    from prefixcache.server import app
    from prefixcache.server.config import ConfigError

    try:
        return app.run(loaded)
    except ConfigError as error:
        hint = "`prefixcache status` shows a daemon that runs; `prefixcache serve --help` lists the flags"
        raise CliError(str(error), hint, reason="cannot_serve") from error
