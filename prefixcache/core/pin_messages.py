"""Pins and prefetches: what is asked of the core (as in `events`) and what it answers (as in `commands`).

Belongs here: plain values. Must not know: what the planner makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from prefixcache.core.ids import NamespaceId, PinId
from prefixcache.core.reasons import Miss, PinEnd


@dataclass(slots=True)
class PinRequested:
    """A prefix (`keys`: its chain from block 0) is to stay, as far as it is stored and as it is stored. The same prefix
    pinned again is the same pin, with the new label and time. ttl_s None: until it is ended or cleared.
    Answer: Pinned (names the id that counts) | Refused (it would not fit the budget)."""

    pin: PinId
    namespace: NamespaceId
    keys: bytes
    label: str = ""
    ttl_s: float | None = None


@dataclass(slots=True)
class UnpinRequested:
    """Answer: Unpinned | Refused."""

    pin: PinId


@dataclass(slots=True)
class PrefetchRequested:
    """Somebody will ask for this prefix: what is on disk only should come to memory. No lease, no pin, no session.
    Answer: Prefetched | Refused."""

    namespace: NamespaceId
    keys: bytes


@dataclass(slots=True)
class Pinned:
    """The first `held_blocks` of `blocks` are stored and stay; the others will as they are stored. size_bytes: slots of
    all of them, whoever else pins them. expires_at: `inf` for ever."""

    pin: PinId
    held_blocks: int
    blocks: int
    size_bytes: int
    expires_at: float


@dataclass(slots=True)
class Unpinned:
    pin: PinId
    held_blocks: int


@dataclass(slots=True)
class PinEnded:
    """A pin ended without Unpin."""

    pin: PinId
    reason: PinEnd


@dataclass(slots=True)
class Prefetched:
    """Blocks in memory from block 0 on; those coming behind them; why it is not all that is stored."""

    ready_blocks: int
    coming_blocks: int
    stop: Miss | None


PinEvent: TypeAlias = PinRequested | UnpinRequested | PrefetchRequested
PinReply: TypeAlias = Pinned | Unpinned | Prefetched
