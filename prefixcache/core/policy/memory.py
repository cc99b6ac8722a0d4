"""What policies remember: columns by row for blocks that are there, ghosts for blocks that went.

Rules: columns grow with the namespace's table. Ghosts are bounded, the oldest goes first; a ghost is found by the
first bytes of its key, as a rare mistake costs a worse guess and nothing else. Must not know: any policy.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.ids import KEY_BYTES
from prefixcache.core.radix import Node

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace

GHOST_KEY_BYTES = 12
GHOSTS_PER_BLOCK = 4

Value = TypeVar("Value")


class Columns:
    """A structured array per namespace, one entry a row, zeros at first."""

    def __init__(self, dtype: list[tuple[str, str]]) -> None:
        self._dtype = np.dtype(dtype)
        self._arrays: dict[Namespace, NDArray[Any]] = {}

    def of(self, space: Namespace) -> NDArray[Any]:
        """The array of a namespace; good until the next call."""
        array = self._arrays.get(space)
        capacity = space.table.capacity
        if array is None or len(array) < capacity:
            grown = np.zeros(capacity, self._dtype)
            if array is not None:
                grown[: len(array)] = array
            self._arrays[space] = array = grown
        return array


class Ghosts(Generic[Value]):
    """What is kept of evicted blocks, oldest first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, key: bytes, value: Value) -> None:
        """Keeps `value` as the newest."""
        self._kept[key] = value
        self._kept.move_to_end(key)

    def pop(self, key: bytes) -> Value | None:
        """Takes what is kept of `key`."""
        return self._kept.pop(key, None)

    def get(self, key: bytes) -> Value | None:
        """Looks without taking."""
        return self._kept.get(key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def pop_oldest(self) -> Value:
        """Takes the oldest; there must be one."""
        return self._kept.popitem(last=False)[1]

    def trim(self, most: int) -> None:
        """Drops the oldest beyond `most`."""
        while len(self._kept) > most:
            self._kept.popitem(last=False)


class Population:
    """Counts a policy's live blocks; the most there ever were stand for the capacity."""

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0

    def add(self, count: int) -> None:
        self.live += count
        self.peak = max(self.peak, self.live)


def ghost_keys(keys: bytes) -> list[bytes]:
    """The name of each key as a ghost."""
    return [keys[at : at + GHOST_KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def tail_keys(node: Node, count: int) -> list[bytes]:
    """Names of the last `count` blocks of a node as ghosts, the tail first, which is the order they go in."""
    names = ghost_keys(node.edge[-count * KEY_BYTES :])
    names.reverse()
    return names
