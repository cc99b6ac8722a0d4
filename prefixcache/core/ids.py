"""Names of things and the few constants every part of the core shares.

Belongs here: aliases, sizes of names, tiers. Must not know: events, commands, any state.
Aliases instead of `NewType`: these values are made on the critical path, where a call costs more than the lookup.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

SessionId: TypeAlias = bytes
LeaseId: TypeAlias = bytes
ReservationId: TypeAlias = bytes
PinId: TypeAlias = bytes
NamespaceId: TypeAlias = int
PoolId: TypeAlias = int

Slots: TypeAlias = NDArray[np.uint32]
"""Places of parts in a pool: byte offset / SLOT_GRANULE, dtype u32."""
Generations: TypeAlias = NDArray[np.uint64]
"""The generation each slot of a `Slots` array has to show in the control page, dtype u64, same length."""
Rows: TypeAlias = NDArray[np.uint32]
"""Row numbers of a namespace's block table, dtype u32. Only good together with the generation: rows are reused."""

KEY_BYTES = 32
ID_BYTES = 16
SLOT_GRANULE = 4096
NO_SLOT = 0xFFFF_FFFF
"""Never a valid slot: a pool would have to be 16 TiB for it."""
HOST_POOL: PoolId = 0


class Tier(IntEnum):
    """Where a part can be, fastest first. The number indexes every per-tier tuple."""

    GPU = 0
    HOST = 1
    DISK = 2
    PEER = 3


class GroupKind(StrEnum):
    """Which blocks of a prefix a layer group needs: all, those of the last window, or the state at the end."""

    FULL = "full"
    SLIDING = "sliding"
    STATE = "state"


class NamespaceKind(StrEnum):
    """`tokens`: keys are a chain. `foreign`: opaque keys, parents given or none, Acquire answers a bitmap."""

    TOKENS = "tokens"
    FOREIGN = "foreign"
