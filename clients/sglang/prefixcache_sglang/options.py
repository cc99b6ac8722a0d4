"""What the storage backend's extra config may say: every key begins with `prefixcache.`, an unknown one is an error.

Plain data. It must not know SGLang.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefixcache_client.engine_settings import PREFIX, EngineSettings, read_settings


@dataclass(frozen=True, slots=True)
class Options(EngineSettings):
    """Settings of the backend beside those that all adapters have; times in seconds.

    `model`: the checkpoint's folder, where the engine's own `--model-path` does not lead to one. `ask_timeout_s`: how
    long one question may take, `load_timeout_s` what has to come from disk, `store_timeout_s` one step of a store.
    """

    model: str = ""
    ask_timeout_s: float = 0.5
    load_timeout_s: float = 1.0
    store_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        if self.ask_timeout_s <= 0 or self.store_timeout_s <= 0 or self.load_timeout_s < 0:
            raise ValueError(f"{PREFIX}ask_timeout_s and {PREFIX}store_timeout_s must be above 0")


def read_options(extra: Mapping[str, Any] | None) -> Options:
    """The options in the backend's extra config. Raises ValueError for a key or a value that means nothing."""
    return read_settings(Options, extra)
