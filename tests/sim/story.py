"""What happened in a seed, a line per event and command, short enough to be read."""

from __future__ import annotations

import dataclasses

import numpy as np

from prefixcache.core.commands import Command
from prefixcache.core.events import Event
from prefixcache.core.ids import ID_BYTES


def tell(history: list[tuple[float, Event, list[Command]]]) -> list[str]:
    lines = []
    for at, event, commands in history:
        lines.append(f"{at:8.1f} {_short(event)}")
        lines += [f"         -> {_short(command)}" for command in commands]
    return lines


def _short(thing: object) -> str:
    """One line; keys and ids by their first bytes, arrays as lists."""
    if isinstance(thing, bytes):
        return thing[:3].hex() + f"~{len(thing)}" if len(thing) > ID_BYTES else thing.lstrip(b"\0").hex()
    if isinstance(thing, np.ndarray):
        return str(thing.tolist())
    if isinstance(thing, (tuple, list)):
        return "[" + ", ".join(_short(each) for each in thing) + "]"
    if dataclasses.is_dataclass(thing):
        fields = (f"{field.name}={_short(getattr(thing, field.name))}" for field in dataclasses.fields(thing))
        return f"{type(thing).__name__}({', '.join(fields)})"
    return str(thing)[:200]
