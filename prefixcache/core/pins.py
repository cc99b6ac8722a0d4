"""A pinned prefix: blocks that an operator wants kept, stored or not yet.

Belongs here: plain state. Must not know: the tree's rules, budgets, who pins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixcache.core.ids import KEY_BYTES, PinId

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace
    from prefixcache.core.radix import Pin


class PrefixPin:
    """`keys` is the whole prefix; its first `depth` blocks are stored and held by `pins` (one of the tree's, or none).
    The rest is held as it is stored. `term`: when it ends by itself."""

    __slots__ = ("depth", "keys", "label", "pin", "pins", "space", "term")

    def __init__(self, pin: PinId, space: Namespace, keys: bytes, label: str, term: Term) -> None:
        self.pin = pin
        self.space = space
        self.keys = keys
        self.label = label
        self.term = term
        self.depth = 0
        self.pins: list[Pin] = []
        term.pin = self

    @property
    def blocks(self) -> int:
        """Blocks wanted."""
        return len(self.keys) // KEY_BYTES

    def key(self, block: int) -> bytes:
        return self.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES]

    def each_key(self) -> list[bytes]:
        """Every key of it, from block 0."""
        return [self.keys[at : at + KEY_BYTES] for at in range(0, len(self.keys), KEY_BYTES)]


class Term:
    """Until when a pin was last asked to hold (`inf`: for ever). Renewed by another term, so that time may get shorter
    as well."""

    __slots__ = ("deadline", "ended", "pin")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.ended = False
        self.pin: PrefixPin
