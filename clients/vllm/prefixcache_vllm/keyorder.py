"""Keys of a store job in the order of their prompt. vLLM hands them over in the order of a set.

The daemon drops what comes last in a prompt first, if it is told what comes before what. It must not know vLLM.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

_GROUP_BYTES: Final = 4


def group_of(key: bytes) -> int:
    """The KV cache group in one of vLLM's offload keys."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def in_prefix_order(
    keys: Sequence[bytes],
    rows: npt.ArrayLike,
    position: Callable[[bytes], int | None],
    chained: Collection[int],
) -> tuple[list[bytes], npt.NDArray[np.int64], list[bytes]]:
    """(keys, rows, parents), the keys of each group by their end in the prompt (`position`, in tokens).

    A parent is the key in front of it in this job, b"" for a group's first and in groups that are not `chained`. Where
    a position is not known the order stays, without parents.
    """
    places = [position(key) for key in keys]
    taken = np.asarray(rows, dtype=np.int64)
    if any(place is None for place in places):
        return list(keys), taken, []
    order = sorted(range(len(keys)), key=lambda at: (group_of(keys[at]), places[at] or 0))
    ordered = [keys[at] for at in order]
    parents = []
    for before, key in zip([b"", *ordered], ordered, strict=False):
        joined = before and group_of(before) == group_of(key) and group_of(key) in chained
        parents.append(before if joined else b"")
    return ordered, taken[order], parents
