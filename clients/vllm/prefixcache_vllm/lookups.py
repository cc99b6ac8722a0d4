"""Which of vLLM's keys the daemon has, asked in batches on a thread of its own and answered out of memory.

Rules:
1. The scheduler thread never waits: `lookup` answers yes, no or "not known yet", and after `timeout_s` no.
2. Keys of one step, and of all steps that passed while the daemon was asked, are one question.
3. An answer lives as long as a request that asked for it; what turned out otherwise (`missed`, `forget`) is corrected.

All methods are called by the scheduler thread. It must not know vLLM or how the daemon is asked.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from prefixcache_client.reasons import DEADLINE, INTERNAL

_MOST_AT_ONCE: Final = 16_384


class Answers(NamedTuple):
    """Whether each key is there, and why those that are not are not."""

    present: Sequence[bool]
    reason: str


Ask = Callable[[list[bytes]], Answers]
_Batch = list[tuple[bytes, int]]


@dataclass(slots=True)
class _Known:
    """What is known of a key: `answer` None while it is asked. `number` tells this question from earlier ones."""

    number: int
    asked_at: float
    answer: bool | None = None
    requests: set[str] = field(default_factory=set)


class Lookups:
    """See the rules above. `prepare`: called once by the thread, before the first question."""

    def __init__(
        self, ask: Ask, timeout_s: float, prepare: Callable[[], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.reasons: Counter[str] = Counter()
        """Keys that were not found, by reason."""
        self._ask = ask
        self._timeout_s = timeout_s
        self._prepare = prepare
        self._clock = clock
        self._known: dict[bytes, _Known] = {}
        self._by_request: dict[str, set[bytes]] = {}
        self._number = 0
        self._batch: _Batch = []
        self._questions: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[_Batch, Answers]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="prefixcache-lookup", daemon=True)
        self._thread.start()

    def lookup(self, key: bytes, request_id: str) -> bool | None:
        """Whether the daemon has it; None when that should be asked again."""
        self._take_answers()
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known(self._number, self._clock())
            self._batch.append((key, self._number))
            self._number += 1
        if request_id not in known.requests:
            known.requests.add(request_id)
            self._by_request.setdefault(request_id, set()).add(key)
        if known.answer is None and self._clock() - known.asked_at >= self._timeout_s:
            known.answer = False
            self.reasons[DEADLINE] += 1
        return known.answer

    def flush(self) -> None:
        """Have asked what was looked up since the last call."""
        if self._batch:
            self._questions.put(self._batch)
            self._batch = []

    def missed(self, keys: Iterable[bytes]) -> None:
        """These are not there, whatever was answered: whoever is told yes again would try again for ever."""
        for key in keys:
            known = self._known.get(key)
            if known is not None:
                known.answer = False
                known.number = -1  # an answer under way does not count any more

    def forget(self, keys: Iterable[bytes]) -> None:
        """These may be there by now: the next who wants to know asks anew."""
        for key in keys:
            known = self._known.get(key)
            if known is not None and known.answer is False:
                self._drop(key, known)

    def finished(self, request_id: str) -> None:
        """The request asks no more."""
        for key in self._by_request.pop(request_id, ()):
            known = self._known[key]
            known.requests.discard(request_id)
            if not known.requests:
                del self._known[key]

    def reset(self) -> None:
        """Nothing that was asked or answered holds any more."""
        self._known.clear()
        self._by_request.clear()
        self._batch = []

    def close(self, timeout_s: float) -> None:
        """End the thread, within a time."""
        self._questions.put(None)
        self._thread.join(timeout_s)

    def __len__(self) -> int:
        """Keys that something is known of."""
        return len(self._known)

    def _drop(self, key: bytes, known: _Known) -> None:
        del self._known[key]
        for request_id in known.requests:
            self._by_request[request_id].discard(key)

    def _take_answers(self) -> None:
        while not self._answers.empty():
            batch, answers = self._answers.get_nowait()
            for (key, number), present in zip(batch, answers.present, strict=True):
                known = self._known.get(key)
                if known is None or known.number != number:
                    continue
                if known.answer is None and not present:
                    self.reasons[answers.reason] += 1
                known.answer = bool(present)

    def _run(self) -> None:
        self._prepare()
        while (batch := self._questions.get()) is not None:
            while len(batch) < _MOST_AT_ONCE and not self._questions.empty():
                more = self._questions.get_nowait()
                if more is None:
                    return
                batch = batch + more
            try:
                answers = self._ask([key for key, _ in batch])
            except (ValueError, TypeError, LookupError, OSError, RuntimeError, MemoryError):
                answers = Answers([False] * len(batch), INTERNAL)  # a mistake of ours; the keys are computed
            self._answers.put((batch, answers))
