"""Signs of life of the daemon's parts, from which alone its health is computed.

Rules: each part beats from the loop that does its work, never from a helper thread beside it, so a dead loop cannot
look alive. Reading needs no lock that a part could hold: health must answer while the planner hangs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartState:
    """One part as seen now."""

    part: str
    age_s: float
    alive: bool
    detail: str


class Heartbeats:
    """The last sign of life of every part. A part counts from its registration: one that never starts is dead, too."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, float] = {}
        self._limit: dict[str, float] = {}
        self._failed: dict[str, str] = {}

    def register(self, part: str, limit_s: float) -> Callable[[], None]:
        """Announce a part that must beat every `limit_s` at least; answers the function that is its sign of life."""
        self._limit[part] = limit_s
        self._seen[part] = self._clock()
        seen, clock = self._seen, self._clock

        def beat() -> None:
            seen[part] = clock()

        return beat

    def unregister(self, part: str) -> None:
        """The part ended as planned."""
        for table in (self._limit, self._seen, self._failed):
            table.pop(part, None)

    def fail(self, part: str, detail: str) -> None:
        """The part cannot work any more, whatever it beats."""
        self._failed[part] = detail

    def states(self) -> list[PartState]:
        """Every part, in order of registration."""
        now = self._clock()
        return [self._state(part, limit, now) for part, limit in list(self._limit.items())]

    def dead(self) -> list[PartState]:
        """The parts without a sign of life within their limit, or failed."""
        return [state for state in self.states() if not state.alive]

    def _state(self, part: str, limit_s: float, now: float) -> PartState:
        age = max(now - self._seen.get(part, now), 0.0)
        detail = self._failed.get(part, "")
        if not detail and age > limit_s:
            detail = f"no sign of life for {age:.1f} s (limit {limit_s:g} s)"
        return PartState(part, age, not detail, detail)
