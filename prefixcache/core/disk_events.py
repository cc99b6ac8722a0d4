"""What can happen to the disk as a whole: what an earlier run left is told, it works or does not, it is another one.

Belongs here and must not know: as in events.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.ids import NamespaceId


@dataclass(slots=True)
class DiskRecovered:
    """Records of some segments that an earlier run left, of one namespace, newest first; what a tombstone revokes and
    what a newer record replaces is not among them. empty: segments in which nothing is, which take room all the same.
    Answer: nothing."""

    namespace: NamespaceId
    parts: NDArray[np.uint16]
    segments: NDArray[np.uint32]
    pages: NDArray[np.uint32]
    keys: bytes
    parents: bytes
    depths: NDArray[np.uint32]
    empty: tuple[int, ...] = ()


@dataclass(slots=True)
class RecoveryDone:
    """Every segment was told (complete: and could be read); what still lacks what stands in front of it never gets it.
    room_bytes: what the cap leaves for new segments, None where that is told by the first write. Answer: nothing."""

    complete: bool = True
    room_bytes: int | None = None


@dataclass(slots=True)
class SegmentLost:
    """A segment is gone with all that was in it; no job that concerns it is under way. Answer: nothing."""

    segment: int


@dataclass(slots=True)
class DiskForgotten:
    """The directory is another one, and off until DiskChanged: nothing that was told of the old one counts, its numbers
    of segments may come again, and what is in the new one is told as at a start (DiskRecovered, RecoveryDone). No job
    is under way. Answer: nothing."""


@dataclass(slots=True)
class DiskMeasured:
    """What a short look said of the disk, before anything was read in earnest. Answer: nothing."""

    read_bytes_per_s: float


@dataclass(slots=True)
class DiskChanged:
    """The disk works, or part of it does not, from now on. reason: why not, empty if all works. Answer: nothing."""

    reads_on: bool
    writes_on: bool
    reason: str = ""


@dataclass(slots=True)
class FlushStarted:
    """Write everything that only memory holds, as far as the disk takes it. Answer: nothing."""


@dataclass(slots=True)
class WorkResumed:
    """Nobody waits for an answer: one step of what MoreToDo spoke of. Answer: nothing, maybe another MoreToDo."""
