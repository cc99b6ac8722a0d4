"""What `kv_connector_extra_config` may say: every key begins with `prefixcache.`, an unknown one is an error.

Plain data. It must not know vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from prefixcache.identity.keys import DEFAULT_BLOCK_TOKENS, KEY_BYTES

PREFIX: Final = "prefixcache."
_LOADS: Final = ("async", "sync")


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of the connector; times in seconds.

    `address`: of the daemon, "" for PREFIXCACHE_ADDRESS or the default socket. `block_tokens`: tokens of a block; the
    same in all engines that share. `prompt_only`: generated tokens are not stored. `load`: "async" lets other requests
    run while blocks are loaded, "sync" loads inside the step. `tenant`: a name that separates;
    `tenant_key_file`: a file of 64 hex digits, a secret that separates better. `ask_timeout_s`: how long a request may
    wait for the daemon's answer. `load_timeout_s`: how long it may wait for blocks on a slower tier. `pinned_share`: of
    the daemon's memory, at most this much is kept for requests that do not run yet. `save_queue`: stores that may wait.
    """

    address: str = ""
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    prompt_only: bool = False
    load: str = "async"
    tenant: str = ""
    tenant_key_file: str = ""
    ask_timeout_s: float = 0.5
    load_timeout_s: float = 0.45
    pinned_share: float = 0.25
    save_queue: int = 256

    def __post_init__(self) -> None:
        if self.load not in _LOADS:
            raise ValueError(f"{PREFIX}load must be one of {', '.join(_LOADS)}, got {self.load!r}")
        if self.block_tokens < 1 or self.save_queue < 1:
            raise ValueError(f"{PREFIX}block_tokens and {PREFIX}save_queue must be at least 1")
        if self.ask_timeout_s <= 0 or self.load_timeout_s < 0 or not 0 < self.pinned_share <= 1:
            raise ValueError(f"{PREFIX}ask_timeout_s must be above 0, and {PREFIX}pinned_share in (0, 1]")

    def tenant_key(self) -> bytes | None:
        """The secret in `tenant_key_file`; None where there is none. Raises ValueError or OSError."""
        if not self.tenant_key_file:
            return None
        key = bytes.fromhex(Path(self.tenant_key_file).read_text(encoding="ascii").strip())
        if len(key) != KEY_BYTES:
            raise ValueError(f"{self.tenant_key_file} must hold {2 * KEY_BYTES} hex digits")
        return key


_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    field.name: (float, int) if isinstance(field.default, float) else (type(field.default),)
    for field in fields(Options)
}


def read_options(extra: Mapping[str, Any]) -> Options:
    """The options in an engine's extra config. Keys of others (without our prefix) are theirs.

    Raises ValueError for a key or a value that means nothing.
    """
    values: dict[str, Any] = {}
    for name, value in extra.items():
        if not name.startswith(PREFIX):
            continue
        key = name.removeprefix(PREFIX)
        if key not in _TYPES:
            raise ValueError(f"unknown setting {name!r}; known are {', '.join(PREFIX + each for each in _TYPES)}")
        if not isinstance(value, _TYPES[key]) or (isinstance(value, bool) and bool not in _TYPES[key]):
            raise ValueError(f"{name} must be {_TYPES[key][0].__name__}, got {value!r}")
        values[key] = value
    return Options(**values)
