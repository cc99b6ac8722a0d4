"""The one owner of the planner: every event goes through `Owner.call`, one at a time.

Rules:
1. A lock, not a thread of its own: handing an event to another thread and back costs more than most events.
2. Orders are executed in the planner's order, inside the lock, before the reply leaves; those that move bytes only
   start something there (`executor`).
3. An exception out of the planner is a bug that may have left it inconsistent: nothing is decided after it.
4. Time never goes back, and while the server itself writes into a slot (`hold_time`) the planner's time does not
   pass the moment that write began. So no reservation can run out under a write of ours, however long the thread was
   not scheduled.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Protocol

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache.server.errors import CallError
from prefixcache.v1 import common_pb2 as pb

log = logging.getLogger(__name__)

Reply = c.Reply | Future[c.Reply]
_REPLIES: Final = frozenset(c.Reply.__args__)


class Core(Protocol):
    """What the owner needs of a planner."""

    def handle(self, event: e.Event, now: float) -> list[c.Command]:
        """Decide."""
        ...


class Owner:
    """Drives the planner. `orders` maps a command type to what carries it out; types without an entry are ignored."""

    def __init__(
        self, planner: Core, orders: dict[type, Callable[..., None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._planner = planner
        self._orders = orders
        self.clock = clock
        self._lock = threading.RLock()
        self._waiters: dict[bytes, Future[c.Reply]] = {}
        self._writes: list[float] = []
        # Not empty once an event has failed half-way: what the planner knows may be wrong from then on, and wrong bytes
        # are worse than none.
        self.failure = ""
        # The planner's time; read it with `lock` held.
        self.now = clock()

    @property
    def lock(self) -> threading.RLock:
        """For reading what the planner counts, and for tables that change with it."""
        return self._lock

    def call(self, event: e.Event) -> c.Reply | None:
        """Handle `event`; answer its reply, or None where there is none.

        Tables that must never disagree with the planner are changed with `lock` held around this call.
        """
        with self._lock:
            return self._handle(event)

    def acquire(self, event: e.AcquireRequested) -> Reply:
        """Handle an acquire; a future where its bytes must be verified first. Call it with `lock` held."""
        reply = self._handle(event)
        if reply is not None:
            return reply
        return self._waiters.setdefault(event.lease, Future())

    def hold_time(self) -> float:
        """Stop the planner's time for one short write into a slot; call it with `lock` held, then `let_time_pass`."""
        self._writes.append(self.now)
        return self.now

    def let_time_pass(self, held: float) -> None:
        """The write that `hold_time` answered `held` for is over."""
        with self._lock:
            self._writes.remove(held)

    def _handle(self, event: e.Event) -> c.Reply | None:
        if self.failure:
            raise CallError(pb.REASON_INTERNAL, "the planner has failed; the server must be restarted")
        now = self.clock()
        if self._writes:
            now = min(now, self._writes[0])
        if now > self.now:
            self.now = now
        whole = False
        try:
            commands = self._planner.handle(event, self.now)
            whole = True
        finally:
            if not whole:
                self.failure = f"{type(event).__name__} failed"
        if len(commands) == 1 and type(commands[0]) in _REPLIES:
            return self._route(commands[0]) if self._waiters else commands[0]  # type: ignore[arg-type, return-value]
            # just checked
        return self._execute(commands)

    def _execute(self, commands: list[c.Command]) -> c.Reply | None:
        answer: c.Reply | None = None
        for command in commands:
            order = self._orders.get(type(command))
            if order is not None:
                order(command)
            elif type(command) in _REPLIES:
                answer = self._route(command) or answer  # type: ignore[arg-type]  # just checked
        return answer

    def _route(self, reply: c.Reply) -> c.Reply | None:
        """None if the reply is for somebody who waits since an earlier event."""
        subject = getattr(reply, "lease", None) or getattr(reply, "subject", None)
        waiter = self._waiters.pop(subject, None) if subject else None
        if waiter is None:
            return reply
        waiter.set_result(reply)
        return None


class Timer:
    """A thread that lets time pass: it wakes the planner and every chore that was added, and beats for both."""

    def __init__(self, owner: Owner, beat: Callable[[], None], period_s: float = 0.1) -> None:
        self._owner = owner
        self._beat = beat
        self._period_s = period_s
        self._chores: list[Callable[[], None]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefixcache-timer", daemon=True)

    def add(self, chore: Callable[[], None]) -> None:
        """Call `chore` every period, outside the lock. It must be quick and must not raise."""
        self._chores.append(chore)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        event = e.TimePassed()
        while not self._stopping.wait(self._period_s):
            if not self._owner.failure:
                self._owner.call(event)
                self._beat()
            for chore in self._chores:
                chore()
