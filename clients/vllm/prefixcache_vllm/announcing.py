"""Which blocks of ours became visible through this engine, with their tokens, for those who route by prefixes.

Rules: announced is only what the workers said is stored, in the order they said it. What is not confirmed is forgotten
when too much of it waits. vLLM's form of an event is made in `events`; nothing of vLLM here.
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

    `lora`, `salt`: of the request, "" for none.
    """

    keys: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    block_tokens: int
    lora: str = ""
    salt: str = ""

    def hashes(self) -> list[bytes]:
        """The keys one by one."""
        return [self.keys[at : at + KEY_BYTES] for at in range(0, len(self.keys), KEY_BYTES)]


class Announcements:
    """Saves by number: told when they are ordered, announced when they are confirmed."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, StoredBlocks] = OrderedDict()
        self._ready: list[StoredBlocks] = []

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

    def take(self) -> list[StoredBlocks]:
        """What was confirmed since the last call."""
        ready, self._ready = self._ready, []
        return ready
