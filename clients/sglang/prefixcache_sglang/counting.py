"""What one backend did and did not do, in pages, and why. Thread-safe: SGLang asks, loads and stores on threads of
their own. It must not know SGLang.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Transferred:
    """One load or store that moved something."""

    pages: int
    size_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second."""
        return self.size_bytes / max(self.seconds, 1e-9) / 1e9


@dataclass(slots=True)
class Numbers:
    """Pages since the backend was made. `asked` = `found` + what is in `not_found`."""

    asked: int = 0
    found: int = 0
    loaded: int = 0
    stored: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    not_found: Counter[str] = field(default_factory=Counter)
    not_loaded: Counter[str] = field(default_factory=Counter)
    not_stored: Counter[str] = field(default_factory=Counter)


class Counts:
    """Where the parts of a backend count. `recent` is kept for SGLang's own metrics, and bounded."""

    _MOST_RECENT = 1024

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = Numbers()
        self._loads: list[Transferred] = []
        self._stores: list[Transferred] = []

    def asked(self, found: int, missing: int, reason: str) -> None:
        """A question was answered for `found + missing` pages."""
        with self._lock:
            self._numbers.asked += found + missing
            self._numbers.found += found
            if missing:
                self._numbers.not_found[reason] += missing

    def loaded(self, done: Transferred, missing: int, reason: str) -> None:
        """A load ended."""
        with self._lock:
            self._numbers.loaded += done.pages
            self._numbers.loaded_bytes += done.size_bytes
            if missing:
                self._numbers.not_loaded[reason] += missing
            if done.pages and len(self._loads) < self._MOST_RECENT:
                self._loads.append(done)

    def stored(self, done: Transferred, refused: dict[str, int]) -> None:
        """A store ended; `done` are the pages that became visible by it."""
        with self._lock:
            self._numbers.stored += done.pages
            self._numbers.stored_bytes += done.size_bytes
            self._numbers.not_stored.update(refused)
            if done.pages and len(self._stores) < self._MOST_RECENT:
                self._stores.append(done)

    def numbers(self) -> Numbers:
        """A copy of all numbers at one moment."""
        with self._lock:
            now = self._numbers
            return Numbers(
                now.asked, now.found, now.loaded, now.stored, now.loaded_bytes, now.stored_bytes,
                Counter(now.not_found), Counter(now.not_loaded), Counter(now.not_stored),
            )  # fmt: skip

    def take_recent(self) -> tuple[list[Transferred], list[Transferred]]:
        """(loads, stores) since the last call."""
        with self._lock:
            taken = self._loads, self._stores
            self._loads, self._stores = [], []
            return taken
