"""Storing what finished requests computed, on one thread of its own.

Rules:
1. Nothing here delays a request: work waits in a bounded line, and what does not fit is dropped with a counted reason.
2. Only whole blocks are stored, from the first that was computed here on.
3. A store's failure is counted and the rest goes on.

What belongs here: from a finished cache to `BlockStore.store`. It must not know how a prompt is looked up.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from prefixcache.identity.keychain import KeyChain
from prefixcache.identity.keys import KEY_BYTES
from prefixcache_transformers.batch import Prompt
from prefixcache_transformers.block_store import STORE_FAILURES, BlockStore
from prefixcache_transformers.cache_io import Snapshot

__all__ = ["Stats", "StoreJob", "StoreThread", "until_end"]

MAX_WAITING = 4
log = logging.getLogger("prefixcache_transformers")


@dataclass(slots=True)
class Stats:
    """Counts since the start. `looked_up`, `reused`, `computed`: prompt tokens; reused + computed = looked_up.

    `reasons`: why a request, or the rest of one, went without the cache.
    """

    requests: int = 0
    looked_up: int = 0
    reused: int = 0
    blocks_stored: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def computed(self) -> int:
        """Prompt tokens that the model had to compute."""
        return self.looked_up - self.reused


@dataclass(frozen=True, slots=True)
class StoreJob:
    """One row to store: its states reach `limit` tokens; `generated` are ids behind the prompt, or None."""

    row: int
    prompt: Prompt
    chain: KeyChain
    generated: torch.Tensor | None
    limit: int

    def keys(self) -> bytes:
        """Keys of the whole blocks of prompt and generated tokens; the prompt's chain is left as it is."""
        if self.generated is None:
            return self.chain.keys
        going_on = KeyChain.import_state(self.chain.export_state())
        return self.chain.keys + going_on.append(self.generated.cpu().numpy().astype("uint32"))


class StoreThread:
    """Stores snapshots in the order in which they come. `add` is for one thread, the rest for any."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefixcache-store")
        self._waiting: list[Future[None]] = []
        self._lock = threading.Lock()

    def add(
        self, store: BlockStore, snapshot: Snapshot, jobs: Sequence[StoreJob], *, max_waiting: int = MAX_WAITING
    ) -> None:
        """Have these rows stored soon, or count `store_backlog` where `max_waiting` snapshots wait already."""
        with self._lock:
            self._waiting = [future for future in self._waiting if not future.done()]
            if len(self._waiting) >= max_waiting:
                self._stats.reasons["store_backlog"] += 1
                return
            self._waiting.append(self._thread.submit(self._run, store, snapshot, jobs))
            self._waiting[-1].add_done_callback(self._note_defect)

    def flush(self) -> None:
        """Wait until everything added so far is stored or refused."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        wait(waiting)

    def close(self) -> None:
        """Store what is waiting, and end."""
        self._thread.shutdown(wait=True)

    def _note_defect(self, future: Future[None]) -> None:
        """What is no failure of the store is a fault in here: told loudly, and still no request's problem."""
        error = future.exception()
        if error is not None:
            self._stats.reasons["store_defect"] += 1
            log.error("storing failed", exc_info=error)

    def _run(self, store: BlockStore, snapshot: Snapshot, jobs: Sequence[StoreJob]) -> None:
        for job in jobs:
            keys = job.keys()
            first = snapshot.first_block(job.prompt.pad)
            last = min(len(keys) // KEY_BYTES, job.limit // snapshot.block_tokens)
            try:
                for parts in snapshot.parts(job.row, job.prompt.pad, range(first, last)):
                    self._stats.blocks_stored += store.store(keys[: last * KEY_BYTES], parts)
            except STORE_FAILURES:
                self._stats.reasons["store_failed"] += 1


def until_end(generated: torch.Tensor, eos_ids: Sequence[int]) -> torch.Tensor:
    """Generated ids [tokens] up to the first end token; what follows is padding."""
    if not eos_ids:
        return generated
    ends = torch.isin(generated, torch.tensor(eos_ids, device=generated.device)).nonzero()
    return generated[: int(ends[0]) + 1] if len(ends) else generated
