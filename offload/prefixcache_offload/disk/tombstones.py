"""What has been cleared: which records are revoked, by namespace, key and sequence.

A tombstone revokes everything it names whose sequence is smaller than its own. It is kept until no segment is left that
can hold such a record. Only sets and comparisons; where tombstones are written is not known here.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache_offload.disk.records import KEY_BYTES, Bytes, Entries, Mask

_ODD = np.uint64(0x9E3779B97F4A7C15)
Words = npt.NDArray[np.uint64]


class Tombstone(NamedTuple):
    """namespace 0: all. keys: u8[n, 32], n = 0: all of the namespace. segment: where it lies,
    0 while it is on its way."""

    revokes: int
    namespace: int
    keys: Bytes
    segment: int


def tags(namespaces: Words, keys: Bytes) -> Words:
    """u64[n], as good as unique for (namespace, key): keys are SHA-256."""
    first: Words = np.ascontiguousarray(keys[:, :8]).view("<u8").reshape(-1)
    return first ^ (namespaces.astype(np.uint64) * _ODD)


class Tombstones:
    """All that are in force."""

    def __init__(self) -> None:
        self._all: list[Tombstone] = []
        self._index: tuple[Words, Bytes, Words] | None = None

    def __len__(self) -> int:
        return len(self._all)

    def add(self, tombstone: Tombstone) -> None:
        """Put one in force; the same one again (found on disk, appended again) replaces its place."""
        for i, known in enumerate(self._all):
            if known.revokes == tombstone.revokes and known.namespace == tombstone.namespace:
                self._all[i] = tombstone._replace(segment=max(known.segment, tombstone.segment))
                break
        else:
            self._all.append(tombstone)
        self._index = None

    def within(self, segment: int) -> list[Tombstone]:
        """Those that lie in a segment."""
        return [t for t in self._all if t.segment == segment]

    def discard(self, segment: int) -> None:
        """Those of a segment are no longer needed."""
        self._all = [t for t in self._all if t.segment != segment]
        self._index = None

    def revoked(self, entries: Entries) -> Mask:
        """bool[n]: which records are cleared."""
        sequences = entries["sequence"]
        gone: Mask = np.zeros(len(entries), np.bool_)
        for tombstone in self._all:
            if not len(tombstone.keys):
                named = (entries["namespace"] == tombstone.namespace) | (tombstone.namespace == 0)
                gone |= named & (sequences < tombstone.revokes)
        tag, keys, revokes = self._indexed()
        if tag.size and len(entries):
            wanted = tags(entries["namespace"], entries["key"])
            at = np.minimum(np.searchsorted(tag, wanted), tag.size - 1)
            hit = (tag[at] == wanted) & (sequences < revokes[at])
            gone |= hit & (keys[at] == entries["key"]).all(axis=1)
        return gone

    def _indexed(self) -> tuple[Words, Bytes, Words]:
        """(tags ascending, keys, revokes) of every named key; of equal keys the widest revocation is first."""
        if self._index is None:
            named = [t for t in self._all if len(t.keys)]
            keys = np.concatenate([t.keys for t in named]) if named else np.zeros((0, KEY_BYTES), np.uint8)
            counts = [len(t.keys) for t in named]
            spaces = np.repeat(np.array([t.namespace for t in named], np.uint64), counts)
            revokes = np.repeat(np.array([t.revokes for t in named], np.uint64), counts)
            tag = tags(spaces, keys)
            order = np.lexsort((np.iinfo(np.uint64).max - revokes, tag))
            self._index = tag[order], keys[order], revokes[order]
        return self._index
