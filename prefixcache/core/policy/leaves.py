"""Leaves in arrays, so that many taken at random can be looked at in one step.

Rules: places are dense; a removed leaf's place goes to the last one. A node's rank is its place.
Must not know: what makes a leaf worth keeping.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.radix import NOT_QUEUED, Node

_FIRST_CAPACITY: Final = 256


class LeafTable:
    """Each leaf with its tail's class and time of last use (seconds)."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._classes: NDArray[np.int64] = np.zeros(_FIRST_CAPACITY, np.int64)
        self._times: NDArray[np.float64] = np.zeros(_FIRST_CAPACITY)

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, place: int) -> Node:
        return self._nodes[place]

    def at(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """(classes, times) of the leaves at these places."""
        return self._classes[places], self._times[places]

    def add(self, node: Node, kind: int, time_s: float) -> None:
        place = len(self._nodes)
        if place == len(self._classes):
            self._classes = np.concatenate((self._classes, np.zeros(place, np.int64)))
            self._times = np.concatenate((self._times, np.zeros(place)))
        self._nodes.append(node)
        node.rank = place
        self._classes[place] = kind
        self._times[place] = time_s

    def change(self, node: Node, kind: int, time_s: float) -> None:
        self._classes[node.rank] = kind
        self._times[node.rank] = time_s

    def remove(self, node: Node) -> None:
        place = node.rank
        last = self._nodes.pop()
        if last is not node:
            self._nodes[place] = last
            last.rank = place
            end = len(self._nodes)
            self._classes[place] = self._classes[end]
            self._times[place] = self._times[end]
        node.rank = NOT_QUEUED
