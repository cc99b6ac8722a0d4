"""What vLLM's CPU tier spills, and fetches back: chunks by key, between rows of its buffer and the daemon's memory.

Rules:
1. Everything here is in terms of keys and row numbers. Loads and stores run in lanes of their own, lookups on a third
   thread; the scheduler thread only hands over and collects.
2. A row that was loaded counts only when its lease's generations were compared after the copy; every other key of the
   job is told as failed and is not found again by the requests that asked for it.
3. `reset` waits until nothing touches the buffer, then moves to a weights epoch that nobody shares.

It must not know vLLM.
"""

import sys
from collections import Counter
from typing import Final

import numpy as np
import numpy.typing as npt

from prefixcache_client import Client, ForeignCache, Rows
from prefixcache_client.reasons import NOT_CACHED
from prefixcache_vllm.lanes import Job, Lane, Outcome
from prefixcache_vllm.lookups import Answers, Lookups
from prefixcache_vllm.options import Options

_SWITCH_S: Final = 0.0005
_STORE_PATIENCE_S: Final = 5.0
_LOADS_WAITING: Final = 256
_CLOSE_S: Final = 3.0

Buffer = npt.NDArray[np.uint8]


class Spill:
    """One engine's side of it. `rows`: u8[chunks, row bytes], vLLM's buffer."""

    def __init__(self, client: Client, cache: ForeignCache, rows: Buffer, options: Options) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        """Chunks by what was done with them and why not: ("loaded", ""), ("not_stored", "pool_full"), ..."""
        self._client = client
        self._cache = cache
        self._rows: Buffer | None = rows
        self.lookups = Lookups(self._look_up, options.ask_timeout_s, client.open)
        self._loads = Lane("load", self._load, _LOADS_WAITING, options.load_timeout_s)
        self._stores = Lane("store", self._store, options.save_queue, _STORE_PATIENCE_S)
        # The threads wait for the interpreter's lock beside an engine that steps without pause while they work.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))

    def load(self, number: int, keys: list[bytes], rows: npt.NDArray[np.int64]) -> None:
        """Fill these rows; told by `finished`."""
        self._loads.submit(number, keys, rows)

    def store(self, number: int, keys: list[bytes], rows: npt.NDArray[np.int64], parents: list[bytes]) -> None:
        """Store these rows; told by `finished`. `parents`: for each key the one in front of it, b"" for none; or []."""
        self._stores.submit(number, keys, rows, parents)

    def finished(self) -> list[Outcome]:
        """The jobs that ended since the last call."""
        loads, stores = self._loads.take(), self._stores.take()
        for outcome in loads:
            if not outcome.ok:
                done = set(outcome.done)
                self.lookups.missed(key for key in outcome.job.keys if key not in done)
            self._count("loaded", outcome)
        for outcome in stores:
            self.lookups.forget(outcome.done)
            self._count("stored", outcome)
        return loads + stores

    def take_counts(self) -> Counter[tuple[str, str]]:
        """What was counted since the last call."""
        counts, self.counts = self.counts, Counter()
        for reason, keys in self.lookups.reasons.items():
            counts["not_found", reason] += keys
        self.lookups.reasons.clear()
        return counts

    def drain(self) -> None:
        """Wait until nothing touches the buffer; what has not begun fails."""
        self._loads.drain()
        self._stores.drain()

    def reset(self) -> None:
        """As `drain`, and nothing that was stored before is found again by this engine."""
        self.drain()
        self._cache.ns.invalidate()
        self.lookups.reset()

    def close(self) -> None:
        """End the threads. Raises RuntimeError where one still uses the buffer, which must stay then."""
        self.lookups.close(_CLOSE_S)
        idle = [lane.close(_CLOSE_S) for lane in (self._loads, self._stores)]
        self._client.close()
        if not all(idle):
            raise RuntimeError("a transfer with the prefixcache daemon has not ended; its memory must stay")
        self._rows = None

    def _count(self, what: str, outcome: Outcome) -> None:
        self.counts[what, ""] += len(outcome.done)
        for reason, keys in outcome.not_done.items():
            self.counts[f"not_{what}", reason] += keys

    def _look_up(self, keys: list[bytes]) -> Answers:
        found = self._cache.lookup(keys)
        present = found.present.tolist()
        if found.tiers.get("disk"):  # vLLM will want them as soon as it has made room
            self._cache.prefetch([key for key, there in zip(keys, present, strict=True) if there])
        return Answers(present, found.reason)

    def _load(self, job: Job, left_s: float) -> Outcome:
        assert self._rows is not None
        left_s = max(left_s, 0.001)
        with self._cache.acquire(job.keys, timeout_s=left_s, load_timeout_s=left_s) as lease:
            result = lease.copy_to(Rows(self._rows, job.rows))
        done = [key for key, there in zip(job.keys, lease.copied.tolist(), strict=True) if there]
        missing = len(job.keys) - len(done)
        reason = result.reason or lease.reason or NOT_CACHED
        return Outcome(job, done, {reason: missing} if missing else {}, result.size_bytes)

    def _store(self, job: Job, left_s: float) -> Outcome:
        assert self._rows is not None
        result = self._cache.store(job.keys, Rows(self._rows, job.rows), parents=job.parents)
        done = [key for key, there in zip(job.keys, result.stored.tolist(), strict=True) if there]
        not_done = {reason: count for reason, count in result.refused.items() if reason != "already_stored"}
        return Outcome(job, done, not_done, result.size_bytes)
