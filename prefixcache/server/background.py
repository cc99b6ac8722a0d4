"""Events that nobody waits for the answer of, and what the planner left for later: one at a time, between calls.

Rules: whoever drives this (the local channel's thread) does one step and then looks for calls again, so a call waits
for one step at most, and the threads that move bytes wait for no lock. Events keep the order in which they were posted;
those that somebody waits for go before the others. A step is also done after every round of calls, so nothing starves.
Without a driver everything is done at once, by whoever posts it. Must not know: what an event means.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache.server.errors import CallError
from prefixcache.server.loop import Owner

log = logging.getLogger(__name__)

_URGENT = (e.RecordsRead, e.VerifyDone)


class Background:
    """See the module's rules."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._urgent: deque[e.Event] = deque()
        self._posted: deque[e.Event] = deque()
        self._has_more = False  # the planner waits for WorkResumed
        self._wake: Callable[[], None] | None = None
        self._driver = 0  # the driving thread
        self._is_woken = False
        self._is_working = False  # without a driver

    @property
    def backlog(self) -> int:
        """Events waiting."""
        return len(self._urgent) + len(self._posted)

    def drive(self, wake: Callable[[], None]) -> None:
        """The calling thread will call `step` from now on, soon after `wake` was called, until it calls `leave`."""
        self._driver, self._wake = threading.get_ident(), wake

    def leave(self) -> None:
        """Nobody drives any more: what waits is done now, what comes at once."""
        self._wake = None
        self._work_off()

    def post(self, event: e.Event) -> None:
        """Have an event handled soon, in the order of posts. Callable from any thread, which waits for nothing."""
        (self._urgent if isinstance(event, _URGENT) else self._posted).append(event)
        self._begin()

    def note_more(self, _: c.MoreToDo) -> None:
        """The planner's order: it left something for later."""
        self._has_more = True
        if self._wake is None or threading.get_ident() != self._driver:
            self._begin()

    def call(self, event: e.Event) -> None:
        """Handle `event` now, behind all that was posted before it."""
        with self._owner.lock:
            while self.backlog:
                self.step()
            self._owner.call(event)

    def step(self) -> bool:
        """Handle one event, or let the planner go on; whether more may wait. Raises what the planner does."""
        self._is_woken = False  # before looking: who posts behind the look wakes again
        if not (self._urgent or self._posted or self._has_more):
            return False
        with self._owner.lock:  # so that nothing that is taken later is handled before
            if self._urgent:
                self._handle(self._urgent.popleft())
            elif self._posted:
                self._handle(self._posted.popleft())
            elif self._has_more:
                self._has_more = False
                self._handle(e.WorkResumed())
        return True

    def _begin(self) -> None:
        wake = self._wake
        if wake is None:
            self._work_off()
        elif not self._is_woken:
            self._is_woken = True
            wake()

    def _work_off(self) -> None:
        with self._owner.lock:
            if not self._is_working:  # else one further up this thread's calls goes on
                self._is_working = True
                try:
                    while self.step():
                        pass
                finally:
                    self._is_working = False

    def _handle(self, event: e.Event) -> None:
        if self._owner.failure:
            return
        try:
            self._owner.call(event)
        except CallError:
            log.error("the planner has failed", extra={"facts": {"event": type(event).__name__}})
