"""What `kv_connector_extra_config` may say: every key begins with `prefixcache.`, an unknown one is an error.

Plain data. It must not know vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from prefixcache.identity.keys import DEFAULT_BLOCK_TOKENS
from prefixcache_client.engine_settings import PREFIX, EngineSettings, read_settings
from prefixcache_offload.codecs.formats import FORMATS, RAW

_LOADS: Final = ("async", "sync")
_CODECS: Final = (RAW, *FORMATS)


@dataclass(frozen=True, slots=True)
class Options(EngineSettings):
    """Settings of the connector beside those that all adapters have; times in seconds.

    `block_tokens`: tokens of a block; the same in all engines that share. `prompt_only`: generated tokens are not
    stored. `load`: "async" lets other requests run while blocks are loaded, "sync" loads inside the step.
    `ask_timeout_s`: how long a request may wait for the daemon's answer. `load_timeout_s`: how long it may wait for
    blocks on a slower tier. `pinned_share`: of the daemon's memory, at most this much is kept for requests that do not
    run yet. `save_queue`: stores that may wait. `codec`: "raw", or "int8" or "int4", which lose a little and hold two
    or three times the tokens; engines share only with those of the same codec. `recompute_s_per_token` is
    learnt from the engine's steps where it is 0.
    """

    block_tokens: int = DEFAULT_BLOCK_TOKENS
    prompt_only: bool = False
    load: str = "async"
    ask_timeout_s: float = 0.5
    load_timeout_s: float = 0.45
    pinned_share: float = 0.25
    save_queue: int = 256
    codec: str = RAW

    def __post_init__(self) -> None:
        if self.load not in _LOADS:
            raise ValueError(f"{PREFIX}load must be one of {', '.join(_LOADS)}, got {self.load!r}")
        if self.codec not in _CODECS:
            raise ValueError(f"{PREFIX}codec must be one of {', '.join(_CODECS)}, got {self.codec!r}")
        if self.block_tokens < 1 or self.save_queue < 1:
            raise ValueError(f"{PREFIX}block_tokens and {PREFIX}save_queue must be at least 1")
        if self.ask_timeout_s <= 0 or self.load_timeout_s < 0 or not 0 < self.pinned_share <= 1:
            raise ValueError(f"{PREFIX}ask_timeout_s must be above 0, and {PREFIX}pinned_share in (0, 1]")


def read_options(extra: Mapping[str, Any]) -> Options:
    """The options in an engine's extra config. Raises ValueError for a key or a value that means nothing."""
    return read_settings(Options, extra)
