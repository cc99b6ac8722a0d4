"""What the storage backend's extra config may say: every key begins with `prefixcache.`, an unknown one is an error.

Plain data. It must not know SGLang.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from prefixcache.identity.keys import KEY_BYTES

PREFIX: Final = "prefixcache."


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of the backend; times in seconds.

    `address`: of the daemon, "" for PREFIXCACHE_ADDRESS or the default socket. `model`: the checkpoint's folder, where
    the engine's own `--model-path` does not lead to one. `tenant`: a name that separates; `tenant_key_file`: a file of
    64 hex digits, a secret that separates better. `ask_timeout_s`: how long one question may take, `load_timeout_s`
    what has to come from disk, `store_timeout_s` one step of a store.
    """

    address: str = ""
    model: str = ""
    tenant: str = ""
    tenant_key_file: str = ""
    ask_timeout_s: float = 0.5
    load_timeout_s: float = 1.0
    store_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        if self.ask_timeout_s <= 0 or self.store_timeout_s <= 0 or self.load_timeout_s < 0:
            raise ValueError(f"{PREFIX}ask_timeout_s and {PREFIX}store_timeout_s must be above 0")

    def tenant_key(self) -> bytes | None:
        """The secret in `tenant_key_file`; None where there is none. Raises ValueError or OSError."""
        if not self.tenant_key_file:
            return None
        key = bytes.fromhex(Path(self.tenant_key_file).read_text(encoding="ascii").strip())
        if len(key) != KEY_BYTES:
            raise ValueError(f"{self.tenant_key_file} must hold {2 * KEY_BYTES} hex digits")
        return key


_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    field.name: (float, int) if isinstance(field.default, float) else (str,) for field in fields(Options)
}


def read_options(extra: Mapping[str, Any] | None) -> Options:
    """The options in the backend's extra config. Keys without our prefix are SGLang's.

    Raises ValueError for a key or a value that means nothing.
    """
    values: dict[str, Any] = {}
    for name, value in (extra or {}).items():
        if not name.startswith(PREFIX):
            continue
        key = name.removeprefix(PREFIX)
        if key not in _TYPES:
            raise ValueError(f"unknown setting {name!r}; known are {', '.join(PREFIX + each for each in _TYPES)}")
        if not isinstance(value, _TYPES[key]) or isinstance(value, bool):
            raise ValueError(f"{name} must be {_TYPES[key][0].__name__}, got {value!r}")
        values[key] = value
    return Options(**values)
