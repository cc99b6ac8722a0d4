"""What a token of a prompt costs the engine to compute, seen from its scheduler: what a slower tier brings later than
that is not worth loading.

Rules:
1. A step begins when it is scheduled, or when the one before it ends, whichever is later: engines schedule one ahead.
2. Only steps that compute many tokens of prompts count: a step that decodes says what a step costs, not a token.
3. The median by tokens of the last such steps; nothing before there are a few, because the first ones compile.
Runs on the scheduler thread, in every step. It must not know vLLM, nor what the cost is used for.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Final

_LEAST_TOKENS: Final = 256
_PART_OF_PROMPT: Final = 16
"""A request that computes so many tokens in a step computes its prompt; drafts of one that decodes are fewer."""
_FEWEST_STEPS: Final = 4
_STEPS: Final = 32
_MOST_UNDER_WAY: Final = 16
"""Steps that never end (a version that does not tell) are forgotten."""


class ComputeCost:
    """Tell it every step's beginning and end. One thread; `s_per_token` may be read by others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: deque[tuple[int, float]] = deque(maxlen=_MOST_UNDER_WAY)
        self._last_end_s = clock()
        self._seen: deque[tuple[float, int]] = deque(maxlen=_STEPS)
        self.s_per_token = 0.0
        """0.0: not known yet."""

    def begins(self, tokens_by_request: Mapping[str, int], *, only_computes: bool = True) -> None:
        """A step was scheduled, maybe one without a token: it ends like any other. `only_computes`: nothing else takes
        time in it."""
        self._under_way.append((_of_prompts(tokens_by_request) if only_computes else 0, self._clock()))

    def ends(self) -> None:
        """The oldest step that was under way is over."""
        if not self._under_way:
            return
        now = self._clock()
        tokens, began_s = self._under_way.popleft()
        if tokens:
            self._seen.append(((now - max(began_s, self._last_end_s)) / tokens, tokens))
            if len(self._seen) >= _FEWEST_STEPS:
                self.s_per_token = self._median()
        self._last_end_s = now

    def _median(self) -> float:
        costs = sorted(self._seen)
        sums = list(accumulate(tokens for _, tokens in costs))
        return costs[bisect_left(sums, sums[-1] / 2)][0]


def _of_prompts(tokens_by_request: Mapping[str, int]) -> int:
    """The step's tokens where most are of prompts and there are many; 0 for any other step."""
    tokens = sum(tokens_by_request.values())
    if tokens < _LEAST_TOKENS:
        return 0
    of_prompts = sum(each for each in tokens_by_request.values() if each >= _PART_OF_PROMPT)
    return tokens if 2 * of_prompts > tokens else 0
