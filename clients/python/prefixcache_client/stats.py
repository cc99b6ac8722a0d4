"""Counters of one client: what was asked, what came of it, and why not.

Thread-safe by one lock held for nanoseconds. It must not know how anything is done.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field

from prefixcache_client.reasons import PARTIAL_BLOCK


@dataclass(frozen=True, slots=True)
class ClientStats:
    """A snapshot. Tokens unless the name says otherwise.

    `looked_up` = `hit` + the sum of `missed` (by reason). A token whose copy failed moves from `hit` to `missed`.
    """

    looked_up: int
    hit: int
    missed: dict[str, int]
    acquires: int
    stored_blocks: int
    not_stored_blocks: dict[str, int]
    bytes_loaded: int
    bytes_stored: int
    connects: int
    leases_left_open: int
    breaker: str
    breaker_opened: int
    transport: str
    failures: dict[str, int] = field(default_factory=dict)


class Counters:
    """Where the parts of a client count."""

    def __init__(self) -> None:
        self._make_lock()
        self.looked_up = 0
        self.hit = 0
        self.missed: Counter[str] = Counter()
        self.acquires = 0
        self.stored_blocks = 0
        self.not_stored_blocks: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.bytes_loaded = 0
        self.bytes_stored = 0
        self.connects = 0
        self.leases_left_open = 0

    def _make_lock(self) -> None:
        # Reentrant: the garbage collector may count a forgotten lease while this thread counts something else.
        self._lock = threading.RLock()

    def acquired(self, hit: int, missed: int, reason: str, partial: int) -> None:
        """An acquire looked up `hit + missed + partial` tokens; `partial` lie behind the last whole block."""
        with self._lock:
            self.acquires += 1
            self.looked_up += hit + missed + partial
            self.hit += hit
            if missed:
                self.missed[reason] += missed
            if partial:
                self.missed[PARTIAL_BLOCK] += partial

    def lost(self, tokens: int, reason: str) -> None:
        """Tokens already counted as hit could not be used."""
        with self._lock:
            self.hit -= tokens
            self.missed[reason] += tokens

    def loaded(self, size_bytes: int) -> None:
        """Bytes were copied to a caller."""
        with self._lock:
            self.bytes_loaded += size_bytes

    def stored(self, blocks: int, size_bytes: int, refused: dict[str, int]) -> None:
        """A store ended."""
        with self._lock:
            self.stored_blocks += blocks
            self.bytes_stored += size_bytes
            self.not_stored_blocks.update(refused)

    def failed(self, reason: str) -> None:
        """A call got no usable answer."""
        with self._lock:
            self.failures[reason] += 1

    def connected(self) -> None:
        """A session was opened."""
        with self._lock:
            self.connects += 1

    def left_open(self) -> None:
        """A lease was not released by its holder."""
        with self._lock:
            self.leases_left_open += 1

    def snapshot(self, breaker: str, breaker_opened: int, transport: str) -> ClientStats:
        """All counters of one moment."""
        with self._lock:
            return ClientStats(
                looked_up=self.looked_up,
                hit=self.hit,
                missed=dict(self.missed),
                acquires=self.acquires,
                stored_blocks=self.stored_blocks,
                not_stored_blocks=dict(self.not_stored_blocks),
                bytes_loaded=self.bytes_loaded,
                bytes_stored=self.bytes_stored,
                connects=self.connects,
                leases_left_open=self.leases_left_open,
                breaker=breaker,
                breaker_opened=breaker_opened,
                transport=transport,
                failures=dict(self.failures),
            )

    def reset_after_fork(self) -> None:
        """In a forked child: a lock that another thread held is held for ever."""
        self._make_lock()
