"""What the SDK's calls answer. Plain data; each is true where something was gained."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What `Lease.copy_to` did. Unless `ok`, the target tensors hold anything beyond `tokens` and must be computed.

    `tokens`: valid tokens from token 0 of the prompt; fewer than promised, and not `ok`, where the rest did not come in
    time from a slower tier. `reason`: why not, "" when `ok`.
    """

    ok: bool
    tokens: int
    size_bytes: int
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What `Client.store` did. `stored_blocks` became visible by it.

    `refused`: blocks not stored, by reason (already_stored, being_written, pool_full, ...). `reason`: why the store as
    a whole ended early, "" when the server was asked for every block and answered.
    """

    stored_blocks: int
    stored_tokens: int
    size_bytes: int
    refused: dict[str, int] = field(default_factory=dict)
    reason: str = ""

    def __bool__(self) -> bool:
        return self.stored_blocks > 0


@dataclass(frozen=True, slots=True, eq=False)
class ForeignStore(StoreResult):
    """What `ForeignCache.store` did; a StoreResult. `stored`: bool[n], the keys that are known to be stored now."""

    stored: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))


@dataclass(frozen=True, slots=True, eq=False)
class ForeignLookup:
    """What `ForeignCache.lookup` found. `present`: bool[n], the keys that are stored. `reason`: why not all are.
    `tiers`: their tokens by tier."""

    present: npt.NDArray[np.bool_]
    reason: str = ""
    tiers: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.present.any())


@dataclass(frozen=True, slots=True)
class PinResult:
    """What `Client.pin` did. `pin`: its name for `Client.unpin`, b"" where nothing was pinned, and `reason` says why.

    `tokens` are held now, of `wanted_tokens` (whole blocks only); the others will be as they are stored. `size_bytes`:
    what all of them take in the daemon's memory.
    """

    pin: bytes
    tokens: int
    wanted_tokens: int
    size_bytes: int
    reason: str = ""

    def __bool__(self) -> bool:
        return bool(self.pin)


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """What `Client.prefetch` began: tokens that are coming up now, and those that are in memory already, from token 0.

    `reason`: why not all that is stored comes, or why nothing does.
    """

    tokens: int
    ready_tokens: int
    reason: str = ""

    def __bool__(self) -> bool:
        return self.tokens > 0


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What `Client.lookup` found: restorable tokens here, by tier, and on other nodes. `reason`: why it ends there.

    `load_s`: how long those on disk would take to come to memory, as the daemon estimates it now.
    """

    tokens: int
    tiers: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    load_s: float = 0.0

    def __bool__(self) -> bool:
        return self.tokens > 0
