"""The connector with a load path that can be held up; and it notes how long it keeps requests from being scheduled.

Loaded by a server instead of `prefixcache_vllm`. What it does is told and noted by files in the folder that
PREFIXCACHE_TEST_FOLDER names:
- `throttle`: while it is there, a load copies a part of its bytes, makes `loading`, and waits until `throttle` is gone;
- `held`: a line for each request, in seconds.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from prefixcache_client import coding
from prefixcache_offload.memory import Memory
from prefixcache_vllm.connector import PrefixCacheConnector as Connector
from tests.e2e.processes import wait_until

FOLDER: Final = Path(os.environ["PREFIXCACHE_TEST_FOLDER"])
LONGEST_S: Final = 60.0
_load = coding.load


def load(pool: Memory, jobs: Sequence[coding.AnyJob]) -> int:
    """As `coding.load`, in two halves with a wait between them."""
    throttle = FOLDER / "throttle"
    half = len(jobs) // 2
    moved = _load(pool, jobs[:half])
    if throttle.exists():
        (FOLDER / "loading").touch()
        wait_until(lambda: not throttle.exists(), LONGEST_S)
    return moved + _load(pool, jobs[half:])


coding.load = load


class PrefixCacheConnector(Connector):  # type: ignore[misc] # no vLLM where types are checked
    """See the module."""

    _asked_at: dict[str, float]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class."""
        asked_at = self.__dict__.setdefault("_asked_at", {})
        began = asked_at.setdefault(request.request_id, time.monotonic())
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0] is not None:
            with (FOLDER / "held").open("a") as held:
                held.write(f"{time.monotonic() - began}\n")
            del asked_at[request.request_id]
        return found
