"""Which blocks of a restart hang in the air: a parent of theirs was lost with a segment, a torn record or a clear.

Arrays in, a mask out; whether a group may live without its parents is for the caller to say.
"""

import numpy as np
import numpy.typing as npt

from prefixcache_offload.disk.records import Bytes, Entries, Mask
from prefixcache_offload.disk.tombstones import tags


def orphans(entries: Entries, held: Bytes | None = None) -> Mask:
    """bool[n]: blocks whose chain of parents is broken.

    entries: all that a restart told, in any order. A parent of all zeros is the root. held: u8[m, 32], further
    keys that count as present (roots of namespaces, blocks in other tiers). O(n log n) for chains of any length.
    """
    if not len(entries):
        return np.zeros(0, np.bool_)
    names, block = np.unique(tags(entries["namespace"], entries["key"]), return_inverse=True)
    parents = np.empty(names.size, np.uint64)
    parents[block] = tags(entries["namespace"], entries["parent"])
    rooted = np.zeros(names.size, np.bool_)
    rooted[block] = ~entries["parent"].any(axis=1) | _among(entries["parent"], held)
    above = np.minimum(np.searchsorted(names, parents), names.size - 1)
    known = names[above] == parents
    broken: Mask = ~rooted & ~known
    # Pointer jumping: after k rounds every block has asked its 2^k nearest ancestors.
    ancestor = np.where(known & ~rooted, above, np.arange(names.size))
    for _ in range(int(names.size).bit_length()):
        broken |= broken[ancestor]
        ancestor = ancestor[ancestor]
    result: Mask = broken[block]
    return result


def _among(keys: npt.NDArray[np.uint8], held: Bytes | None) -> Mask:
    if held is None or not len(held):
        return np.zeros(len(keys), np.bool_)
    zero = np.uint64(0)
    found: Mask = np.isin(tags(np.full(len(keys), zero), keys), tags(np.full(len(held), zero), held))
    return found
