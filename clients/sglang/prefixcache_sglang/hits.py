"""How long a prefix can be restored when a page consists of several pools' bytes.

SGLang takes a prefix length only if every pool allows it: all pages up to there (`all_pages`), or a whole window of the
last ones (`trailing_pages`). Lengths that one pool allows may lie apart, and ranks intersect them, so all are told.

Plain numbers. It must not know SGLang or the cache.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Truths = npt.NDArray[np.bool_]

ALL_PAGES = "all_pages"
TRAILING_PAGES = "trailing_pages"


def leading(present: Truths) -> int:
    """How many are there from the first on."""
    return int(present.argmin()) if not present.all() else int(present.size)


def allowed(policy: str, present: Truths, window: int) -> list[int] | None:
    """The prefix lengths that a pool allows, ascending; None for a policy that never limits. `window`: pages."""
    if policy == ALL_PAGES:
        return list(range(1, leading(present) + 1))
    if policy == TRAILING_PAGES:
        return list(_windows(present, max(1, window)))
    return None


def _windows(present: Truths, window: int) -> Iterator[int]:
    """Lengths whose last `window` pages, or all where there are fewer, are there."""
    run = 0
    for length, there in enumerate(present.tolist(), start=1):
        run = run + 1 if there else 0
        if run >= min(window, length):
            yield length
