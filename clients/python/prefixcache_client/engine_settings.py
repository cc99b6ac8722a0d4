"""Settings in an engine's own extra config: every key begins with `prefixcache.`, an unknown one is an error.

What the adapters have in common. An adapter's settings are a frozen dataclass with plain defaults whose types say what
is accepted. It must not know any engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from prefixcache.identity.keys import KEY_BYTES
from prefixcache_client.options import ClientOptions

PREFIX: Final = "prefixcache."


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What every adapter takes. `address`: of the daemon, "" for PREFIXCACHE_ADDRESS or the default socket. `tenant`: a
    name that separates; `tenant_key_file`: a file of 64 hex digits, a secret that separates better.
    `recompute_s_per_token`: what a token of a prompt costs this engine to compute; what would come later from disk is
    computed then. 0: not known."""

    address: str = ""
    tenant: str = ""
    tenant_key_file: str = ""
    recompute_s_per_token: float = 0.0

    def limits(self, ask_timeout_s: float, name: str, **others: Any) -> ClientOptions:
        """Options of a client of this engine. Raises ValueError for what cannot be."""
        return ClientOptions(
            timeout_s=ask_timeout_s, client_name=name, recompute_s_per_token=self.recompute_s_per_token, **others
        )

    def tenant_key(self) -> bytes | None:
        """The secret in `tenant_key_file`; None where there is none. Raises ValueError or OSError."""
        if not self.tenant_key_file:
            return None
        key = bytes.fromhex(Path(self.tenant_key_file).read_text(encoding="ascii").strip())
        if len(key) != KEY_BYTES:
            raise ValueError(f"{self.tenant_key_file} must hold {2 * KEY_BYTES} hex digits")
        return key


SettingsT = TypeVar("SettingsT", bound=EngineSettings)


def read_settings(kind: type[SettingsT], extra: Mapping[str, Any] | None) -> SettingsT:
    """An adapter's settings in an engine's extra config. Keys of others (without our prefix) are theirs.

    Raises ValueError for a key or a value that means nothing.
    """
    types = {field.name: _accepted(field.default) for field in fields(kind)}
    values: dict[str, Any] = {}
    for name, value in (extra or {}).items():
        if not name.startswith(PREFIX):
            continue
        key = name.removeprefix(PREFIX)
        if key not in types:
            raise ValueError(f"unknown setting {name!r}; known are {', '.join(PREFIX + each for each in types)}")
        if not isinstance(value, types[key]) or (isinstance(value, bool) and bool not in types[key]):
            raise ValueError(f"{name} must be {types[key][0].__name__}, got {value!r}")
        values[key] = value
    return kind(**values)


def _accepted(default: object) -> tuple[type, ...]:
    return (float, int) if isinstance(default, float) else (type(default),)
