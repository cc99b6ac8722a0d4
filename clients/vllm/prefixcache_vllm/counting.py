"""Counters of one engine's connector as flat numbers by name, to be added up over ranks and steps.

Rules: a number is a count since the last look, or, for `LOAD_SECONDS`, the list of what was timed since. A reason
stands behind a dot (`not_loaded.deadline`). It must not know vLLM, nor where the numbers are shown.
"""

from collections.abc import Mapping
from typing import Any, Final

from prefixcache_vllm.transfers import Counts

LOAD_SECONDS: Final = "load_seconds"
DRAFT: Final = "draft_"
"""What the names of a draft model's numbers begin with."""
_TOTALS: Final[Mapping[str, str]] = {
    "lookups": "Requests that the daemon was asked for",
    "hits": "Requests of which something was loaded",
    "looked_up_tokens": "Tokens that the daemon was asked for",
    "loaded_tokens": "Tokens loaded from the daemon instead of computed",
    "loads": "Loads begun, on all ranks",
    "load_bytes": "Bytes loaded, on all ranks",
    "saved_blocks": "Blocks stored",
    "saved_tokens": "Tokens stored",
    "save_bytes": "Bytes stored, on all ranks",
}
_REASONED: Final[Mapping[str, str]] = {
    "not_loaded": "Requests of which nothing was loaded",
    "left_alone": "Requests that are not cached",
    "load_failed": "Loads that failed, so that their tokens were computed",
    "not_saved": "Blocks that were not stored",
}
_NOT_LOADED_DRAFT: Final = DRAFT + "not_loaded"


def _with_drafts(texts: Mapping[str, str]) -> Mapping[str, str]:
    return dict(texts) | {DRAFT + name: f"Of draft models: {text}" for name, text in texts.items()}


TOTALS: Final[Mapping[str, str]] = _with_drafts(_TOTALS)
REASONED: Final[Mapping[str, str]] = _with_drafts(_REASONED)
Numbers = dict[str, Any]
"""Counts are ints, LOAD_SECONDS is a list of floats."""


def worker_numbers(counts: Counts, block_tokens: int) -> Numbers:
    """What a worker moved since the last look; names without zeros. Of several ranks the one that made a block visible
    has counted it, so each block's tokens are counted once."""
    numbers = {
        "loads": counts.loads,
        "load_bytes": counts.load_bytes,
        "saved_blocks": counts.saved_blocks,
        "saved_tokens": counts.saved_blocks * block_tokens,
        "save_bytes": counts.save_bytes,
        LOAD_SECONDS: counts.load_seconds,
    }
    return _nonzero(numbers | _named("load_failed", counts.loads_failed) | _named("not_saved", counts.not_saved_blocks))


def scheduler_numbers(
    totals: Mapping[str, int], reasons: Mapping[str, int], skipped: Mapping[str, int], without_draft: Mapping[str, int]
) -> Numbers:
    """What the scheduler's side decided, since it began."""
    drafts = _named(_NOT_LOADED_DRAFT, without_draft)
    return {**totals, **_named("not_loaded", reasons), **_named("left_alone", skipped), **drafts}


def of_drafts(numbers: Numbers) -> Numbers:
    """The same under a draft model's names, without how long its loads took."""
    return {DRAFT + name: value for name, value in numbers.items() if name != LOAD_SECONDS}


def difference(now: Numbers, before: Numbers) -> Numbers:
    """What was added since; names without zeros."""
    return {name: new for name, value in now.items() if (new := value - before.get(name, 0))}


def added(one: Numbers, other: Numbers) -> Numbers:
    """Both together."""
    both = dict(one)
    for name, value in other.items():
        both[name] = both[name] + value if name in both else value
    return both


def for_a_log_line(numbers: Numbers) -> dict[str, int | float]:
    """One value by name; of what was timed the longest and the mean."""
    line = {name: value for name, value in numbers.items() if name != LOAD_SECONDS}
    if times := numbers.get(LOAD_SECONDS):
        line["load_seconds_mean"] = round(sum(times) / len(times), 4)
        line["load_seconds_max"] = round(max(times), 4)
    return dict(sorted(line.items()))


def _named(kind: str, counts: Mapping[str, int]) -> Numbers:
    return {f"{kind}.{reason}": count for reason, count in counts.items()}


def _nonzero(numbers: Numbers) -> Numbers:
    return {name: value for name, value in numbers.items() if value}
