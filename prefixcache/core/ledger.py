"""The closed sum (design rule 6) and every other count the core keeps.

Rules: `looked_up == sum(hit) + sum(miss) + pending` after every event; a token leaves `pending` once, when its lease
ends. Counts only grow, except `pending`. Must not know: who asks, in which form it is shown.
"""

from __future__ import annotations

from collections import Counter

from prefixcache.core.ids import NamespaceId, Tier
from prefixcache.core.reasons import DiskDrop, Miss, PinEnd, PromotionSkip, Skip


class TokenLedger:
    """Tokens looked up and what became of them."""

    __slots__ = ("hit", "looked_up", "miss", "pending")

    def __init__(self) -> None:
        self.looked_up = 0
        self.hit = [0] * len(Tier)
        self.miss: Counter[Miss] = Counter()
        self.pending = 0

    def look_up(self, tokens: int, partial_tokens: int) -> None:
        """`tokens` are looked up, of which the last `partial_tokens` make no whole block."""
        self.looked_up += tokens
        if partial_tokens:
            self.miss[Miss.PARTIAL_BLOCK] += partial_tokens

    def add(self, other: TokenLedger) -> None:
        """Counts what `other` has counted as well."""
        self.looked_up += other.looked_up
        self.hit = [mine + theirs for mine, theirs in zip(self.hit, other.hit, strict=True)]
        self.miss.update(other.miss)
        self.pending += other.pending

    def is_closed(self) -> bool:
        """Whether the sum closes right now."""
        return self.looked_up == sum(self.hit) + self.miss.total() + self.pending and self.pending >= 0


class Stats:
    """All counters. Unit in the name; `blocks_skipped` is by reason."""

    def __init__(self) -> None:
        self.ledgers: dict[NamespaceId, TokenLedger] = {}
        self.forgotten_tokens = TokenLedger()  # of namespaces that are no more
        self.acquires = 0
        self.lookups = 0
        self.blocks_stored = 0
        self.blocks_evicted = 0
        self.blocks_cleared = 0
        self.parts_failed_verification = 0
        self.blocks_skipped: Counter[Skip] = Counter()
        self.leases_expired = 0
        self.reservations_expired = 0
        self.slots_quarantined = 0  # now, not ever
        self.slots_moved = 0
        self.prefetches = 0
        self.blocks_prefetched = 0
        self.prefetch_stops: Counter[Miss] = Counter()
        self.pins_ended: Counter[PinEnd] = Counter()
        self.refused: Counter[str] = Counter()
        self.disk_drops: Counter[DiskDrop] = Counter()
        self.blocks_demoted = 0  # written to disk
        self.blocks_loaded = 0  # brought back from it
        self.blocks_recovered = 0
        self.promotions_skipped: Counter[PromotionSkip] = Counter()

    @property
    def tokens(self) -> TokenLedger:
        """The closed sum over all namespaces, as a value of its own."""
        total = TokenLedger()
        for ledger in (self.forgotten_tokens, *self.ledgers.values()):
            total.add(ledger)
        return total

    def open_ledger(self, namespace: NamespaceId) -> TokenLedger:
        """The ledger of a new namespace."""
        return self.ledgers.setdefault(namespace, TokenLedger())

    def forget_ledger(self, namespace: NamespaceId) -> None:
        """A namespace without leases goes; what it counted stays in the sum."""
        self.forgotten_tokens.add(self.ledgers.pop(namespace))
