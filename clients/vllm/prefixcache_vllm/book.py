"""What of each request is asked for, found, loading and saved: the scheduler side's memory, without vLLM.

Rules:
1. A request is asked for once; the scheduler, which asks in every step, is answered from memory. It asks anew only when
   the engine's own hit got shorter than what was leased, or when the lease is about to end.
2. What is found is given back once: when it was loaded, when the request goes, or when the epoch changes.
3. Leases of requests that do not run yet hold at most a share of the daemon's memory. A question counts as if all that
   it asks for were found; what has no room beside such guesses waits for their answers, which come in a moment. What
   has no room beside answers asks for less, or for nothing (`pin_budget`).
4. Saved is what was ordered to be saved; each block is ordered once per request.

The clock is an argument.
"""

from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from prefixcache_client import LeaseTicket, Namespace
from prefixcache_vllm.asking import Ask, Asker, Hint, Question
from prefixcache_vllm.chain import RequestChain
from prefixcache_vllm.transfers import LOAD_FAILED

LEASE_MARGIN_S: Final = 2.0
"""A lease that ends sooner is not begun with."""
ASKS_PER_REQUEST: Final = 4
"""After so many, a request is computed: something shortens its leases faster than it gets to run."""

PIN_BUDGET: Final = "pin_budget"
TOO_LATE: Final = "deadline"
NOTHING_NEW: Final = "nothing_new"


class Phase(Enum):
    """Where a request is between its arrival and its first computed token."""

    NEW = auto()
    ASKED = auto()
    FOUND = auto()  # perhaps nothing
    LOADING = auto()
    RUNNING = auto()


@dataclass(slots=True)
class Entry:
    """One request. `saved_blocks`: blocks from 0 that are stored or were ordered to be. `waits_from`: since when the
    engine is told to ask later; None while it is not."""

    request_id: str
    namespace: Namespace
    chain: RequestChain
    phase: Phase = Phase.NEW
    ask: Ask | None = None
    ticket: LeaseTicket | None = None
    hint: Hint | None = None
    waits_from: float | None = None
    asks: int = 0
    from_token: int = 0
    saved_blocks: int = 0
    saves: int = 0
    failed: bool = False
    stale: bool = False
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """`keep_last`: tokens that the engine must compute itself. `ask_timeout_s`, `pinned_share`: see Options."""

    block_tokens: int
    block_bytes: int
    ask_timeout_s: float
    pinned_share: float
    keep_last: int = 0


class RequestBook:
    """All requests the engine knows. One thread."""

    def __init__(self, limits: Limits, asker: Asker) -> None:
        self._limits = limits
        self._asker = asker
        self._entries: dict[str, Entry] = {}
        self._pinned: dict[str, int] = {}
        self._guessed: set[str] = set()
        self.reasons: Counter[str] = Counter()
        """Why nothing was loaded, by reason: one count per request and decision."""
        self.counted = False
        """Whether anything was decided since this was last set to False. A question is told of with its answer."""
        self.lookups = 0
        self.hits = 0
        self.looked_up_tokens = 0
        self.loaded_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def pinned_bytes(self) -> int:
        """Bytes leased for requests that do not run yet."""
        return sum(self._pinned.values())

    def count(self, reason: str) -> None:
        """Something was not loaded."""
        self.reasons[reason] += 1
        self.counted = True

    def get(self, request_id: str) -> Entry | None:
        """What is known of a request."""
        return self._entries.get(request_id)

    def fingerprints(self) -> set[bytes]:
        """Of the namespaces that requests began in."""
        return {entry.chain.fingerprint for entry in self._entries.values()}

    def enter(self, entry: Entry) -> Entry:
        """A request is seen for the first time, or for the first time in a new epoch: what was found for it before is
        given back."""
        before = self._entries.get(entry.request_id)
        if before is not None:
            self._no_hint(before)
            self._give_back(before, 0)
        self._entries[entry.request_id] = entry
        return entry

    def waits(self, entry: Entry, now: float) -> bool:
        """Whether the answer is still on its way, and in time; or a load, of which nobody knows yet how it ended.

        A request that was preempted in the step that loads comes back while the load is under way: its pages are others
        now, and nothing would be loaded into them.
        """
        if entry.phase is Phase.LOADING:
            return True
        if entry.phase is not Phase.ASKED or entry.stale:
            return False
        assert entry.ask is not None
        return entry.ask.answer() is None and self._in_time(entry, now)

    def matched(self, entry: Entry, tokens: int, local_tokens: int, now: float) -> int | None:
        """How many tokens beyond `local_tokens` can be loaded of a request of `tokens` tokens; None: ask again later.

        `local_tokens`: what the engine has itself. The chain's tokens must be there, `tokens` of them.
        """
        if entry.phase is Phase.RUNNING:  # it was preempted (and saves called off), or its load failed
            entry.phase = Phase.NEW
            entry.saved_blocks = 0
        if entry.failed:  # counted when it failed
            entry.phase = Phase.FOUND
            return 0
        if entry.phase is Phase.NEW:
            return self._ask(entry, tokens, local_tokens, now)
        if self.waits(entry, now):
            return None
        if entry.phase is Phase.ASKED:
            assert entry.ask is not None
            entry.saved_blocks = 0  # nothing is ordered before it runs; what an earlier answer found may be gone
            found = entry.ask.answer()
            if found is None:
                return self._nothing(entry, TOO_LATE)
            entry.ticket, entry.phase, entry.waits_from = found.ticket, Phase.FOUND, None
            if found.ticket is None:
                return self._nothing(entry, found.reason or "not_cached")
            self._pinned[entry.request_id] = found.ticket.blocks * self._limits.block_bytes
            self._guessed.discard(entry.request_id)
            entry.saved_blocks = found.ticket.blocks
        return self._from_memory(entry, tokens, local_tokens, now)

    def placed(self, entry: Entry, external_tokens: int) -> LeaseTicket | None:
        """The engine has made room for `external_tokens` tokens from `entry.from_token` on; what to load them with."""
        ticket = entry.ticket
        self._unpin(entry)
        if entry.phase is Phase.LOADING:
            return None
        if external_tokens <= 0 or ticket is None:
            self._give_back(entry, entry.from_token)
            entry.phase = Phase.RUNNING
            return None
        entry.phase = Phase.LOADING
        return ticket

    def loaded(self, request_id: str, tokens: int) -> None:
        """A load has ended; `tokens` of the prompt are there now, 0 when it failed."""
        entry = self._entries.get(request_id)
        if entry is None or entry.phase is not Phase.LOADING:
            return
        if tokens:
            self.hits += 1
            self.counted = True
            self.loaded_tokens += tokens - entry.from_token
        else:
            entry.failed = True
            entry.saved_blocks = 0  # what was ordered in the meantime was not saved, and what was found may be gone
            self.count(LOAD_FAILED)
        self._give_back(entry, tokens)
        entry.phase = Phase.RUNNING
        if entry.gone:
            del self._entries[request_id]

    def to_save(self, entry: Entry, tokens: int) -> range:
        """The blocks that are whole once the first `tokens` tokens are computed and were not ordered before."""
        whole = tokens // self._limits.block_tokens
        first = entry.saved_blocks
        if entry.stale or whole <= first:
            return range(0)
        entry.saved_blocks = whole
        entry.saves += 1
        return range(first, whole)

    def forget(self, request_id: str) -> Entry | None:
        """The request is gone; what was known of it. A lease that is being copied from is given back by `loaded`."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        self._unpin(entry)
        self._no_hint(entry)
        if entry.phase is Phase.LOADING:
            entry.gone = entry.stale = True  # the workers are still copying
            return entry
        self._give_back(entry, 0)
        return self._entries.pop(request_id)

    def new_epoch(self) -> None:
        """Nothing found or computed so far may be used or saved any more."""
        for entry in self._entries.values():
            entry.stale = True
            self._unpin(entry)
            self._no_hint(entry)
            if entry.phase is not Phase.LOADING:
                self._give_back(entry, 0)

    def _ask(self, entry: Entry, tokens: int, local_tokens: int, now: float) -> int | None:
        limits = self._limits
        size = limits.block_tokens
        usable = min(tokens - limits.keep_last, tokens) // size
        first = local_tokens // size
        if usable * size <= local_tokens:
            return self._nothing(entry, NOTHING_NEW)
        if entry.waits_from is None:
            entry.waits_from = now
        pool = self._asker.pool_bytes
        if pool:
            # All from block 0 on: what is in front of a leased block cannot leave either.
            room = max(0, int(pool * limits.pinned_share) - self.pinned_bytes) // limits.block_bytes
            if usable > room and self._guessed and self._in_time(entry, now):
                return None
            usable = min(usable, room)
        if usable * size <= local_tokens or entry.asks >= ASKS_PER_REQUEST:
            return self._nothing(entry, PIN_BUDGET)
        self._no_hint(entry)
        entry.ask = Ask(Question(entry.namespace, entry.chain, tokens, first * size, usable * size))
        entry.asks += 1
        entry.phase = Phase.ASKED
        self.lookups += 1
        self.looked_up_tokens += tokens - first * size
        self._pinned[entry.request_id] = usable * limits.block_bytes
        self._guessed.add(entry.request_id)
        self._asker.submit(entry.ask)
        return None

    def _from_memory(self, entry: Entry, tokens: int, local_tokens: int, now: float) -> int | None:
        ticket, size = entry.ticket, self._limits.block_tokens
        if ticket is None:
            return 0
        if local_tokens < ticket.from_block * size or ticket.ends_at - now < LEASE_MARGIN_S:
            self._give_back(entry, 0)
            entry.phase = Phase.NEW
            return self._ask(entry, tokens, local_tokens, now)
        entry.from_token = local_tokens
        return max(0, min(ticket.blocks * size, tokens - self._limits.keep_last) - local_tokens)

    def _nothing(self, entry: Entry, reason: str) -> int:
        if entry.phase is not Phase.FOUND or entry.ask is not None:
            self.count(reason)
        self._give_back(entry, 0)
        entry.phase, entry.waits_from = Phase.FOUND, None
        return 0

    def _give_back(self, entry: Entry, used_tokens: int) -> None:
        ask, entry.ask, entry.ticket = entry.ask, None, None
        self._unpin(entry)
        if ask is not None:
            self._asker.give_back(ask, used_tokens)

    def _unpin(self, entry: Entry) -> None:
        self._pinned.pop(entry.request_id, None)
        self._guessed.discard(entry.request_id)

    def _in_time(self, entry: Entry, now: float) -> bool:
        return entry.waits_from is None or now - entry.waits_from < self._limits.ask_timeout_s

    @staticmethod
    def _no_hint(entry: Entry) -> None:
        """What was to be prefetched is asked for itself, or not needed."""
        if entry.hint is not None:
            entry.hint.wanted, entry.hint = False, None
