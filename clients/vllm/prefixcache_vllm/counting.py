"""Counters of one engine's connector as flat numbers by name, to be added up over ranks and steps.

It must not know vLLM, nor where the numbers are shown.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from prefixcache_vllm.transfers import Counts

LOOKED_UP: Final = "looked_up_tokens"
LOADED: Final = "loaded_tokens"
Numbers = dict[str, int]


def worker_numbers(counts: Counts) -> Numbers:
    """What a worker moved since the last look; names without zeros."""
    numbers = {
        "loads": counts.loads,
        "load_bytes": counts.load_bytes,
        "saved_blocks": counts.saved_blocks,
        "save_bytes": counts.save_bytes,
    }
    return _nonzero(numbers | _named("load_failed", counts.loads_failed) | _named("not_saved", counts.not_saved_blocks))


def scheduler_numbers(
    totals: Mapping[str, int], reasons: Mapping[str, int], skipped: Mapping[str, int]
) -> Numbers:  # fmt: skip
    """What the scheduler's side decided, since it began."""
    return _nonzero(dict(totals) | _named("not_loaded", reasons) | _named("left_alone", skipped))


def difference(now: Numbers, before: Numbers) -> Numbers:
    """What was added since."""
    return _nonzero({name: value - before.get(name, 0) for name, value in now.items()})


def added(one: Numbers, other: Numbers) -> Numbers:
    """Both together."""
    return dict(Counter(one) + Counter(other))


def _named(kind: str, counts: Mapping[str, int]) -> Numbers:
    return {f"{kind}.{reason}": count for reason, count in counts.items()}


def _nonzero(numbers: Numbers) -> Numbers:
    return {name: value for name, value in numbers.items() if value}
