"""Stores that happen behind the request: one thread, a bounded queue, and a count of what did not fit.

A full queue drops the new store instead of making the engine wait: blocks not stored cost a later request time,
waiting costs this one. It must not know what a store is.
"""

import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, NamedTuple

from prefixcache_client.results import StoreResult

_IDLE_S: Final = 5.0

_live: "weakref.WeakSet[Writer]" = weakref.WeakSet()


class _Task(NamedTuple):
    work: Callable[[], StoreResult]
    outcome: "Future[StoreResult]"


class Writer:
    """Runs stores in order. The thread is started at need and ends when it has been idle for a while."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self.start_empty()
        _live.add(self)

    def start_empty(self) -> None:
        """Forget everything: in a forked child the thread and its tasks are the parent's."""
        self._tasks: queue.Queue[_Task] = queue.Queue(self._bound)
        self._lock = threading.Lock()
        self._running = False

    def submit(self, work: Callable[[], StoreResult]) -> "Future[StoreResult] | None":
        """Have `work` done; None when the queue is full, or when the process can start no thread for it."""
        task = _Task(work, Future())
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            return None
        with self._lock:
            if self._running:
                return task.outcome
            try:
                threading.Thread(target=self._run, name="prefixcache-store", daemon=True).start()
            except RuntimeError:
                self.drain()
                return None
            self._running = True
        return task.outcome

    @property
    def waiting(self) -> int:
        """Stores not begun yet."""
        return self._tasks.qsize()

    def drain(self) -> None:
        """Drop what has not begun: their futures are cancelled."""
        while True:
            try:
                self._tasks.get_nowait().outcome.cancel()
            except queue.Empty:
                return

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._tasks.empty():
                        self._running = False
                        return
                continue
            if task.outcome.set_running_or_notify_cancel():
                _finish(task)


def _finish(task: _Task) -> None:
    try:
        task.outcome.set_result(task.work())
    except (ValueError, TypeError, OSError, RuntimeError, MemoryError) as error:
        # A mistake of the caller's, who asks the future; the thread goes on with the next store.
        task.outcome.set_exception(error)


def _after_fork_in_child() -> None:
    for writer in list(_live):
        writer.start_empty()


os.register_at_fork(after_in_child=_after_fork_in_child)
