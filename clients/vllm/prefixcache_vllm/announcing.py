"""Which blocks of ours became visible through this engine, with their tokens, for those who route by prefixes; and
which of all blocks are gone.

Rules: announced is only what the workers said is stored, in the order they said it. What is not confirmed is forgotten
when too much of it waits. A block that is gone before its announcement is announced and taken back, never the other way
round. vLLM's form of an event is made in `events`; nothing of vLLM here.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from prefixcache.identity.keys import KEY_BYTES

MAX_WAITING: Final = 4096


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Blocks that follow each other. `keys`: packed; `parent`: the key in front of them, None for a prompt's start.

    `lora`, `lora_id`, `salt`: of the request, "" and None for none. `first_token`: position of the first token in the
    request. `images`: (identifier, first token, tokens) of what takes the place of placeholder tokens.
    """

    keys: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    block_tokens: int
    lora: str = ""
    salt: str = ""
    lora_id: int | None = None
    first_token: int = 0
    images: tuple[tuple[str, int, int], ...] = ()

    def hashes(self) -> list[bytes]:
        """The keys one by one."""
        return [self.keys[at : at + KEY_BYTES] for at in range(0, len(self.keys), KEY_BYTES)]


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """Blocks that cannot be hit any more. `keys` empty: any of them may be gone, more than could be told."""

    keys: tuple[bytes, ...]


Announcement = StoredBlocks | RemovedBlocks


class Announcements:
    """Saves by number: told when they are ordered, announced when they are confirmed."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, StoredBlocks] = OrderedDict()
        self._gone_early: set[bytes] = set()  # keys of what waits that are gone already
        self._ready: list[Announcement] = []

    def ordered(self, number: int, blocks: StoredBlocks) -> None:
        """A save was ordered."""
        self._waiting[number] = blocks
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)

    def confirmed(self, numbers: Iterable[int]) -> None:
        """These saves are visible to everybody."""
        for number in numbers:
            blocks = self._waiting.pop(number, None)
            if blocks is not None:
                self._ready.append(blocks)
                if gone := tuple(key for key in blocks.hashes() if key in self._gone_early):
                    self._ready.append(RemovedBlocks(gone))
        if not self._waiting:
            self._gone_early.clear()

    def removed(self, keys: Iterable[bytes]) -> None:
        """These blocks are gone, whoever stored them."""
        gone = tuple(keys)
        self._ready.append(RemovedBlocks(gone))
        if self._waiting:
            waiting = {key for blocks in self._waiting.values() for key in blocks.hashes()}
            self._gone_early |= waiting.intersection(gone)

    def stored(self, keys: Iterable[bytes]) -> None:
        """These blocks are there (again): what waits of them will be announced to stay."""
        self._gone_early.difference_update(keys)

    def lost(self) -> None:
        """More is gone than can be told."""
        self._ready.append(RemovedBlocks(()))

    def take(self) -> list[Announcement]:
        """What was confirmed, and what went, since the last call."""
        ready, self._ready = self._ready, []
        return ready
