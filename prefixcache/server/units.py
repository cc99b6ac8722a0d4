"""Sizes, durations and addresses as people write them, both ways.

Text in, numbers out, and back. It must not know which option a value belongs to; callers add the name to the error.
"""

import re
from typing import Final

_SIZE_UNITS: Final = {
    "": 1, "b": 1,
    "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_TIME_UNITS: Final = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_DEVICE: Final = re.compile(r"cpu|cuda:[A-Za-z0-9-]+")
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_MAX_PORT: Final = 65535


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `512MiB`, `1.5G`, `4096`. Raises ValueError."""
    return int(_parse(text, _SIZE_UNITS, "a size such as 4GiB or 512MiB"))


def parse_duration(text: str) -> float:
    """Seconds of `30s`, `250ms`, `5m`, `1h`, `30`. Raises ValueError."""
    return _parse(text, _TIME_UNITS, "a duration such as 30s, 250ms or 5m")


def parse_bool(text: str) -> bool:
    """True of `true`, `yes`, `on`, `1`, False of their opposites. Raises ValueError."""
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"expected true or false, got {text!r}")


def parse_devices(text: str) -> list[tuple[str, int]]:
    """(device, bytes) of `cuda:0=8GiB,cuda:1=8GiB` or `cpu=64MiB`; empty text: none. Raises ValueError."""
    found = []
    for item in (item.strip() for item in text.split(",") if item.strip()):
        device, equals, size = item.partition("=")
        if not equals or not _DEVICE.fullmatch(device.strip()):
            raise ValueError(
                f"expected DEVICE=SIZE such as cuda:0=8GiB, cuda:GPU-<uuid>=8GiB or cpu=64MiB, got {item!r}"
            )
        found.append((device.strip(), parse_size(size)))
        if found[-1][1] <= 0:
            raise ValueError(f"the pool on {device.strip()} needs a size above 0")
    names = [device for device, _ in found]
    if len(set(names)) != len(names):
        raise ValueError("a device is listed twice; give it one size")
    return found


def parse_host_port(text: str) -> tuple[str, int]:
    """(host, port) of `HOST:PORT`, `:PORT` (127.0.0.1) or `[V6]:PORT`. Raises ValueError."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isdigit() or int(port) > _MAX_PORT:
        raise ValueError(f"expected HOST:PORT with a port from 0 to {_MAX_PORT}, got {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def format_host_port(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def format_size(size_bytes: int) -> str:
    """The shortest exact form: `4GiB`, `1536MiB`, `4097`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        step = _SIZE_UNITS[unit.lower()]
        if size_bytes and size_bytes % step == 0:
            return f"{size_bytes // step}{unit}"
    return str(size_bytes)


def format_duration(seconds: float) -> str:
    """The shortest exact form in seconds: `30s`, `0.25s`."""
    return f"{seconds:g}s"


def _parse(text: str, units: dict[str, int] | dict[str, float], wanted: str) -> float:
    match = _NUMBER.fullmatch(text)
    unit = units.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"expected {wanted}, got {text!r}")
    return float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
