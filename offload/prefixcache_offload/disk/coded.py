"""Which records of a segment are not raw, and how many pages those take: a caller that knows places cannot say.

7 bytes a record, in arrays that are sorted when they are first asked. The tier's lock guards every call.
"""

import numpy as np
import numpy.typing as npt

from prefixcache_offload.disk.records import Codec, Entries

_RAW = int(Codec.RAW)
_COLUMNS = np.dtype([("page", "<u4"), ("pages", "<u2"), ("codec", "u1")])


class CodedPlaces:
    """See the top of the file."""

    def __init__(self) -> None:
        self._pieces: list[npt.NDArray[np.void]] = []
        self._sorted = False

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, entries: Entries) -> None:
        """Note those that are not raw. entries: ENTRY[n]."""
        raw = entries["codec"] == _RAW
        if not raw.all():
            coded = entries[~raw]
            piece = np.zeros(len(coded), _COLUMNS)
            for name in ("page", "pages", "codec"):
                piece[name] = coded[name]
            self._pieces.append(piece)
            self._sorted = False

    def fill(self, entries: Entries, which: npt.NDArray[np.int64]) -> None:
        """Set codec and pages of those of entries[which], all of this segment, that are noted."""
        if not self:
            return
        if len(self._pieces) > 1 or not self._sorted:
            joined = np.concatenate(self._pieces)
            self._pieces = [joined[np.argsort(joined["page"], kind="stable")]]
            self._sorted = True
        known = self._pieces[0]
        at = np.minimum(np.searchsorted(known["page"], entries["page"][which]), len(known) - 1)
        hit = known["page"][at] == entries["page"][which]
        for name in ("pages", "codec"):
            entries[name][which[hit]] = known[name][at[hit]]
