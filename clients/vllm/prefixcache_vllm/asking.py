"""Asking the daemon without making the engine's scheduler wait: a few threads, one Acquire per question.

Rules:
1. `submit`, `give_back` and `Ask.answer` never block. The scheduler thread does nothing else here: prompts are hashed,
   questions put into bytes and answers read on these threads.
2. Whoever finds an answer that nobody wants any more gives the lease back; a lease is given back once.
3. An answer that is late is not waited for: the one who asks decides when it is too late, and calls `forget`.

It must not know vLLM or what the answer is used for.
"""

import queue
import threading
import time
from dataclasses import dataclass
from typing import Final, Protocol

from prefixcache_client import Client, Lease, LeaseTicket, Namespace, PromptKeys
from prefixcache_client.reasons import INTERNAL
from prefixcache_vllm.chain import RequestChain
from prefixcache_vllm.cost import ComputeCost

_THREADS: Final = 3
"""Enough that a question for blocks on disk does not hold up the next ones."""

_HINTS_PAUSE_S: Final = 10.0
_MISTAKES: Final = (ValueError, TypeError, LookupError, OSError, RuntimeError, MemoryError)
"""Ours, or of an engine that took such tokens: the request is computed, and the thread goes on."""


@dataclass(slots=True)  # not frozen: that makes it three times as dear, on the scheduler thread
class Question:
    """What of a prompt is wanted. `tokens`: of the whole prompt; `max_tokens`: the longest prefix of use."""

    namespace: Namespace
    chain: RequestChain
    tokens: int
    from_token: int
    max_tokens: int

    @property
    def prompt(self) -> PromptKeys:
        """The prompt, hashed. Raises ValueError or TypeError for token ids that are none."""
        return PromptKeys(self.chain.keys(self.tokens // self.chain.block_tokens), self.tokens)


@dataclass(frozen=True, slots=True)
class Found:
    """An answer: a ticket to copy with, or None and why not."""

    ticket: LeaseTicket | None
    reason: str = ""


@dataclass(slots=True)
class Hint:
    """A question that will be asked. `wanted`: False once it was, or when nobody will. `only_keys`: nobody will, but
    the prompt's keys are needed."""

    question: Question
    wanted: bool = True
    only_keys: bool = False


class Ask:
    """One question under way. Thread-safe."""

    __slots__ = ("_found", "_lease", "_lock", "_unwanted", "question")

    def __init__(self, question: Question) -> None:
        self.question = question
        self._lock = threading.Lock()
        self._found: Found | None = None
        self._lease: Lease | None = None
        self._unwanted = False

    def answer(self) -> Found | None:
        """What was found; None while nothing is known."""
        return self._found

    def came(self, found: Found, lease: Lease | None) -> Lease | None:
        """The answer is here. Answers the lease back where nobody wants it any more."""
        with self._lock:
            if self._unwanted:
                return lease
            self._lease, self._found = lease, found
            return None

    def forget(self) -> Lease | None:
        """Nobody wants the answer. The lease, if there is one already: to be released by the caller."""
        with self._lock:
            self._unwanted = True
            lease, self._lease = self._lease, None
            return lease


class Asker(Protocol):
    """Who answers; the book is tested with one of its own."""

    def submit(self, ask: Ask) -> None:
        """Have it answered, some time."""

    def give_back(self, ask: Ask, used_tokens: int) -> None:
        """The answer is not needed any more, or never was; `used_tokens` of the prompt were."""

    def hint(self, hint: Hint) -> None:
        """This will be asked soon: the prompt may be hashed, what is on a slower tier may come up already, and what is
        in memory should not leave now. Nothing is leased."""

    pool_bytes: int
    """Bytes of the daemon's memory, 0 while unknown."""


class DaemonAsker:
    """Asks the daemon through the SDK."""

    def __init__(
        self, client: Client, timeout_s: float, load_timeout_s: float, cost: ComputeCost | None = None
    ) -> None:
        """cost: of computing a token, as far as it is known by then; None: the client knows."""
        self._client = client
        self._cost = cost
        self._timeouts = (timeout_s, load_timeout_s)
        self._work: queue.SimpleQueue[tuple[Ask, int | None] | Hint | None] = queue.SimpleQueue()
        self._hints_from = 0.0
        self.pool_bytes = 0
        """See Asker; as of the last answer."""
        self._threads = [
            threading.Thread(target=self._run, name=f"prefixcache-ask-{number}", daemon=True)
            for number in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, ask: Ask) -> None:
        """See Asker."""
        self._work.put((ask, None))

    def give_back(self, ask: Ask, used_tokens: int) -> None:
        """See Asker."""
        found = ask.answer()
        if found is None or found.ticket is not None:  # else nothing is held: it is not worth waking a thread for
            self._work.put((ask, used_tokens))

    def hint(self, hint: Hint) -> None:
        """See Asker."""
        if hint.only_keys or time.monotonic() >= self._hints_from:
            self._work.put(hint)

    def close(self) -> None:
        """End the threads; what is still asked is answered or dropped with the client."""
        for _ in self._threads:
            self._work.put(None)

    def _run(self) -> None:
        self._client.open()  # now rather than at the first question; a daemon need not be there
        self.pool_bytes = self._client.pool_bytes
        while (task := self._work.get()) is not None:
            if isinstance(task, Hint):
                if task.wanted:  # a request that need not wait is asked for at once
                    self._foresee(task)
                continue
            ask, used_tokens = task
            unwanted = self._answer(ask) if used_tokens is None else ask.forget()
            if unwanted is not None:
                unwanted.release(used_tokens or 0)

    def _foresee(self, hint: Hint) -> None:
        try:
            prompt = hint.question.prompt
            if hint.only_keys:
                return
            found = self._client.prefetch(hint.question.namespace, prompt, timeout_s=self._timeouts[0])
        except _MISTAKES:
            return  # told when it is asked
        if found.reason:
            # No slower tier, no daemon, or enough on its way: hints would only cost.
            self._hints_from = time.monotonic() + _HINTS_PAUSE_S

    def _answer(self, ask: Ask) -> Lease | None:
        question = ask.question
        timeout_s, load_timeout_s = self._timeouts
        try:
            lease = self._client.acquire(
                question.namespace,
                question.prompt,
                max_tokens=question.max_tokens,
                from_token=question.from_token,
                timeout_s=timeout_s,
                load_timeout_s=load_timeout_s,
                recompute_s_per_token=None if self._cost is None else self._cost.s_per_token,
            )
        except _MISTAKES:
            return ask.came(Found(None, INTERNAL), None)
        self.pool_bytes = self._client.pool_bytes
        ticket = lease.ticket()
        if ticket is None:
            lease.release(0)
        return ask.came(Found(ticket, lease.reason), lease if ticket is not None else None)
