"""The one frozen configuration: flags over environment over file over defaults.

Rules:
1. Every key is a field of `Config`, has the variable `PREFIXCACHE_` + its name in capitals, a key in the TOML file
   (flat, with `-` or `_`, or in tables: `[host] bytes` is `host_bytes`), and a flag (`--host-bytes`).
2. An unknown key is refused, with the name that was probably meant. A bad value names its key and where it came from.
3. Nothing below this file reads the environment.
"""

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from prefixcache.core.policy.names import DEFAULT as DEFAULT_POLICY
from prefixcache.core.policy.names import NAMES as POLICIES
from prefixcache.server import defaults, units

ENV_PREFIX: Final = "PREFIXCACHE_"
# Variables with our prefix that belong to clients and the command line, not to the daemon's configuration.
_FOREIGN_ENV: Final = frozenset({"address", "config"})
DEFAULT_HTTP: Final = "127.0.0.1:8440"


class ConfigError(Exception):
    """A configuration that cannot be used; the message says which key, from where, and what would do."""


def _key(default: Any, parse: Callable[[str], Any], show: Callable[[Any], str], doc: str) -> Any:
    factory = default if callable(default) else lambda: default
    return field(default_factory=factory, metadata={"parse": parse, "show": show, "doc": doc})


def _size(default: int | Callable[[], int], doc: str) -> Any:
    return _key(default, units.parse_size, units.format_size, doc)


def _time(default: float, doc: str) -> Any:
    return _key(default, units.parse_duration, units.format_duration, doc)


def _text(default: str | Callable[[], str], doc: str) -> Any:
    return _key(default, str, str, doc)


def _list(doc: str) -> Any:
    """Texts without commas, as one; the flag may be repeated, the file may have a list."""
    plain = _text("", doc)
    return field(default_factory=str, metadata={**plain.metadata, "repeatable": True})


def _count(default: int, doc: str) -> Any:
    return _key(default, int, str, doc)


def _switch(doc: str, *, default: bool) -> Any:
    return _key(default, units.parse_bool, lambda value: "true" if value else "false", doc)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every option of the daemon. Sizes in bytes, times in seconds."""

    socket: str = _text(lambda: str(defaults.socket_path()), "path of the gRPC socket; the local channel is beside it")
    listen: str = _text("", "HOST:PORT for gRPC over TCP; empty for none")
    http: str = _text(DEFAULT_HTTP, "HOST:PORT for /metrics, /healthz, /readyz, /stats.json; empty for none")
    host_bytes: int = _size(defaults.host_bytes, "bytes of the host memory pool")
    host_writable: bool = _switch("workers write through their own mapping of the pool", default=True)
    host_slab_bytes: int = _size(0, "bytes of one slab of the pool; 0 chooses by the pool's size")
    host_prefault_threads: int = _count(2, "threads that touch the pool's pages ahead of need")
    disk: str = _text("", "folder of the disk tier, one per daemon; empty for none")
    disk_bytes: int = _size(64 << 30, "most bytes of the disk tier, everything counted")
    disk_segment_bytes: int = _size(0, "bytes of one segment file; 0 chooses by disk_bytes, 256 MiB at most")
    disk_early_bytes: int = _size(1 << 40, "bytes a day for blocks written before memory is short; spares the SSD")
    disk_flush_timeout: float = _time(10.0, "how long a graceful stop writes what only memory holds")
    disk_stall: float = _time(5.0, "a disk call that takes longer turns the tier off until it works again")
    disk_retry: float = _time(5.0, "first pause before a disk tier that is off is tried again")
    disk_codec: str = _text(
        "auto", "form of blocks on disk: raw, lossless (smaller, bit exact), or auto: lossless where loads get faster"
    )
    gpu: str = _list("GPU memory for copies of hot blocks: DEVICE=SIZE, repeatable (cuda:0=8GiB; cpu=64MiB to try)")
    policy: str = _text(DEFAULT_POLICY, f"which cached block goes first: {', '.join(POLICIES)}")
    pin_bytes: int = _size(0, "bytes that pinned blocks may take; 0: a quarter of the pool, half of a smaller disk")
    pin_ttl: float = _time(86_400.0, "how long a pin holds that asks for no time")
    session_ttl: float = _time(30.0, "time to live of a gRPC session without a sign of life")
    session_ttl_max: float = _time(3600.0, "longest time to live a session may ask for")
    lease_ttl: float = _time(30.0, "time to live of a lease that asks for none")
    lease_ttl_max: float = _time(600.0, "longest time to live a lease may ask for")
    reservation_ttl: float = _time(60.0, "time to live of a reservation that asks for none")
    reservation_ttl_max: float = _time(600.0, "longest time to live a reservation may ask for")
    max_sessions: int = _count(4096, "sessions at once")
    max_namespaces: int = _count(1024, "namespaces known at once")
    max_leases: int = _count(4096, "leases of one session at once")
    max_reservations: int = _count(1024, "reservations of one session at once")
    max_keys: int = _count(1 << 17, "block keys in one call")
    max_message_bytes: int = _size(16 << 20, "bytes of one request")
    max_streams: int = _count(16, "ReadBlocks and WriteBlocks streams at once")
    max_watchers: int = _count(8, "WatchEvents streams at once")
    event_log_bytes: int = _size(16 << 20, "bytes of the last events, for watchers that are slow or come back")
    watch_full_keys: bool = _switch("tell whole block keys to watchers that name the namespace", default=True)
    grpc_threads: int = _count(8, "threads for unary gRPC calls")
    drain_timeout: float = _time(30.0, "how long a graceful stop waits for leases and reservations")
    any_user: bool = _switch("let other users' processes use the local channel", default=False)
    warm_restart: bool = _switch("keep the pool over a graceful stop (one trust domain only)", default=False)
    warm_dir: str = _text("/dev/shm", "folder on tmpfs that keeps the pool over a graceful stop")
    checksums: bool = _switch("compute each part's xxh3-128 in the background after commit", default=True)
    log_format: str = _text("human", "human or json")
    log_level: str = _text("info", "debug, info, warning or error")

    def __post_init__(self) -> None:
        _check(self)

    @property
    def pin_budget(self) -> int:
        """Bytes that pinned blocks may take: as configured, else so much that stores and the disk hardly feel it."""
        share = self.host_bytes // 4
        return self.pin_bytes or (min(share, self.disk_bytes // 2) if self.disk else share)


@dataclass(frozen=True, slots=True)
class Setting:
    """One key as `prefixcache config show` prints it."""

    key: str
    value: str
    source: str
    doc: str
    env: str
    default: str


@dataclass(frozen=True)
class Loaded:
    """A configuration and where each value came from: `default`, `file PATH`, `env NAME`, `flag --NAME`."""

    config: Config
    sources: Mapping[str, str]

    def is_explicit(self, key: str) -> bool:
        """Whether somebody set this key."""
        return self.sources[key] != "default"

    def describe(self) -> list[Setting]:
        """Every key with its value and where it came from, in the order of `Config`."""
        plain = Config()
        return [
            Setting(
                key=item.name,
                value=item.metadata["show"](getattr(self.config, item.name)),
                source=self.sources[item.name],
                doc=item.metadata["doc"],
                env=ENV_PREFIX + item.name.upper(),
                default=item.metadata["show"](getattr(plain, item.name)),
            )
            for item in fields(Config)
        ]


def load(
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Loaded:
    """Merge all sources. `flags` maps field names to text or values, None meaning "not given".

    `file` defaults to PREFIXCACHE_CONFIG; without either no file is read. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources = {item.name: "default" for item in fields(Config)}
    named = environ.get(ENV_PREFIX + "CONFIG")
    path = file or (Path(named) if named else None)
    if path is not None:
        _merge(values, sources, _read_file(path), lambda key: f"file {path}")
    _merge(values, sources, _read_environ(environ), lambda key: f"env {ENV_PREFIX}{key.upper()}")
    given = {key: value for key, value in (flags or {}).items() if value not in (None, [], ())}
    _merge(values, sources, given, lambda key: f"flag --{key.replace('_', '-')}")
    return Loaded(Config(**values), sources)


def _merge(
    values: dict[str, Any], sources: dict[str, str], new: Mapping[str, object], source: Callable[[str], str]
) -> None:
    known = {item.name: item for item in fields(Config)}
    for key, value in new.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known)}"
            raise ConfigError(f"unknown key {key!r} ({source(key)}){hint}")
        try:
            if known[key].metadata.get("repeatable") and isinstance(value, list | tuple):
                value = ",".join(map(str, value))
            values[key] = _convert(known[key].metadata["parse"], value)
        except ValueError as error:
            raise ConfigError(f"{key} ({source(key)}): {error}") from error
        sources[key] = source(key)


def _convert(parse: Callable[[str], Any], value: object) -> Any:
    if isinstance(value, bool):
        return parse("true" if value else "false")
    if isinstance(value, str | int | float | Path):
        return parse(str(value))
    raise ValueError(f"expected one value, got {type(value).__name__}")


def _read_file(path: Path) -> dict[str, object]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from error
    return _flatten(content, "")


def _flatten(table: Mapping[str, object], prefix: str) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in table.items():
        name = prefix + key.replace("-", "_")
        flat.update(_flatten(value, name + "_") if isinstance(value, dict) else {name: value})
    return flat


def _read_environ(environ: Mapping[str, str]) -> dict[str, object]:
    """Our variables. Clients have some with the same prefix, so an unknown one counts only if it looks meant."""
    known = [item.name for item in fields(Config)]
    found: dict[str, object] = {}
    for name, value in environ.items():
        key = name.removeprefix(ENV_PREFIX).lower()
        if name.startswith(ENV_PREFIX) and key not in _FOREIGN_ENV and difflib.get_close_matches(key, known, n=1):
            found[key] = value
    return found


def _check(config: Config) -> None:
    """Refuse values that parse but cannot work."""
    for item in fields(Config):
        value = getattr(config, item.name)
        if isinstance(value, int | float) and value <= 0 and item.name not in _MAY_BE_ZERO:
            raise ConfigError(f"{item.name} must be above 0, got {value}")
    for key in ("listen", "http"):
        if text := getattr(config, key):
            try:
                units.parse_host_port(text)
            except ValueError as error:
                raise ConfigError(f"{key}: {error}") from error
    _check_pool(config.host_bytes)
    if config.max_message_bytes < _LEAST_MESSAGE_BYTES:
        raise ConfigError(f"max_message_bytes must be at least {units.format_size(_LEAST_MESSAGE_BYTES)}")
    _check_pins(config)
    _one_of("disk_codec", config.disk_codec, ("auto", "raw", "lossless"))
    try:
        units.parse_devices(config.gpu)
    except ValueError as error:
        raise ConfigError(f"gpu: {error}") from error
    _one_of("policy", config.policy, POLICIES)
    _one_of("log_format", config.log_format, ("human", "json"))
    _one_of("log_level", config.log_level, ("debug", "info", "warning", "error"))
    _check_socket(config.socket)
    if config.warm_restart and not config.checksums:
        raise ConfigError("warm_restart needs checksums: what cannot be verified is not kept")


def _check_pool(size_bytes: int) -> None:
    if size_bytes > _MOST_POOL_BYTES:
        most, given = units.format_size(_MOST_POOL_BYTES), units.format_size(size_bytes)
        raise ConfigError(f"host_bytes must be at most {most}, got {given}")
    if size_bytes < _PAGE_BYTES:
        raise ConfigError(f"host_bytes must be at least {units.format_size(_PAGE_BYTES)}, got {size_bytes}")


def _check_pins(config: Config) -> None:
    """Pins must leave room for everything else, or nothing could be stored any more."""
    most = config.host_bytes * 9 // 10
    if config.pin_bytes > most:
        raise ConfigError(f"pin_bytes must leave a tenth of host_bytes free: {units.format_size(most)} at most")
    if config.disk and config.pin_bytes > config.disk_bytes // 2:
        most = config.disk_bytes // 2
        raise ConfigError(f"pin_bytes must fit half of disk_bytes: {units.format_size(most)} at most")


def _check_socket(path: str) -> None:
    if not path.startswith("/"):
        raise ConfigError(f"socket must be an absolute path, got {path!r}")
    if len(os.fsencode(path + ".local")) > _SOCKET_PATH_BYTES:
        raise ConfigError(f"socket: {path!r} with .local is longer than {_SOCKET_PATH_BYTES} bytes")


_MAY_BE_ZERO: Final = frozenset(
    {
        "host_slab_bytes", "pin_bytes", "disk_segment_bytes", "disk_early_bytes", "disk_flush_timeout", "host_writable",
        "any_user", "warm_restart", "checksums", "watch_full_keys",
    }
)  # fmt: skip
_LEAST_MESSAGE_BYTES: Final = 64 << 10
_PAGE_BYTES: Final = 4096
_MOST_POOL_BYTES: Final = _PAGE_BYTES << 32  # slots are u32 numbers of pages
_SOCKET_PATH_BYTES: Final = 107  # sun_path of Linux, without its final zero byte


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key} must be one of {', '.join(choices)}, got {value!r}")
