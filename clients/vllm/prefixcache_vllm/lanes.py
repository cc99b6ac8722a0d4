"""Jobs that move bytes behind the scheduler's back: one thread a lane, and every job ends in bounded time.

Rules:
1. A job that was submitted ends once, well or badly, and is told by `take` once.
2. A job that has not begun by its deadline fails with `deadline`, whatever the thread is busy with; one that has begun
   is never broken off, because it writes into memory that gets another owner when it has ended. What it waits for has
   the rest of its time for a deadline, so it ends soon after.
3. More than `bound` waiting jobs are not taken: they fail at once with `queue_full`.

It must not know vLLM or what a job does.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache_client.reasons import DEADLINE, INTERNAL, QUEUE_FULL
from prefixcache_vllm.transfers import CALLED_OFF

_LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """Keys, and the rows of the engine's buffer they are moved to or from (i64[n]). `parents`: a key for each, b"" for
    none; or no list."""

    number: int
    keys: list[bytes]
    rows: npt.NDArray[np.int64]
    parents: list[bytes]
    deadline: float


class Outcome(NamedTuple):
    """How a job ended. `done`: keys whose bytes were moved; `not_done`: the others' number by reason."""

    job: Job
    done: list[bytes]
    not_done: dict[str, int]
    size_bytes: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether all of it was done."""
        return len(self.done) == len(self.job.keys)


Do = Callable[[Job, float], Outcome]
"""Carries out a job, with so many seconds left."""


class Lane:
    """See the rules above. `submit`, `take`, `drain` and `close` are called by one thread."""

    def __init__(
        self, name: str, do: Do, bound: int, patience_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`patience_s`: from a job's submission to its deadline."""
        self._do = do
        self._bound = bound
        self._patience_s = patience_s
        self._clock = clock
        self._lock = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running = False
        self._closed = False
        self._ended: list[Outcome] = []
        self._thread = threading.Thread(target=self._run, name=f"prefixcache-{name}", daemon=True)
        self._thread.start()

    def submit(
        self, number: int, keys: list[bytes], rows: npt.NDArray[np.int64], parents: list[bytes] | None = None
    ) -> None:
        """Have a job done."""
        job = Job(number, keys, rows, parents or [], self._clock() + self._patience_s)
        with self._lock:
            if self._closed or len(self._waiting) >= self._bound:
                self._ended.append(failed(job, CALLED_OFF if self._closed else QUEUE_FULL))
                return
            self._waiting.append(job)
            self._lock.notify_all()

    def take(self) -> list[Outcome]:
        """The jobs that ended since the last call."""
        if not self._waiting and not self._ended:
            return []
        with self._lock:
            now = self._clock()
            while self._waiting and self._waiting[0].deadline <= now:
                self._ended.append(failed(self._waiting.popleft(), DEADLINE))
            ended, self._ended = self._ended, []
        return ended

    def drain(self, timeout_s: float | None = None) -> bool:
        """Call off what waits, and wait for the job under way; whether it has ended. Nothing is touched after that."""
        until = None if timeout_s is None else self._clock() + timeout_s
        with self._lock:
            self._ended += [failed(job, CALLED_OFF) for job in self._waiting]
            self._waiting.clear()
            while self._running and (until is None or self._clock() < until):
                self._lock.wait(_LOOK_S)
            return not self._running

    def close(self, timeout_s: float) -> bool:
        """No more jobs; whether the last one has ended in time."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        idle = self.drain(timeout_s)
        if idle:
            self._thread.join(timeout_s)
        return idle

    def _run(self) -> None:
        while (job := self._next()) is not None:
            began = self._clock()
            try:
                outcome = self._do(job, job.deadline - began)
            except (ValueError, TypeError, LookupError, OSError, RuntimeError, MemoryError):
                outcome = failed(job, INTERNAL)  # a mistake of ours; the engine computes
            with self._lock:
                self._ended.append(outcome._replace(seconds=self._clock() - began))
                self._running = False
                self._lock.notify_all()

    def _next(self) -> Job | None:
        with self._lock:
            while not self._closed:
                if self._waiting:
                    self._running = True
                    return self._waiting.popleft()
                self._lock.wait()
            return None


def failed(job: Job, reason: str) -> Outcome:
    """Nothing of it was done."""
    return Outcome(job, [], {reason: len(job.keys)})
