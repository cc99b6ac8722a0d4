"""Looks after the tier from outside its calls: calls that hang, a directory that has gone, and when to try again.

Never waits for the disk itself while a call hangs, so it always gets to say so.
"""

import threading
from collections.abc import Callable

from prefixcache_offload.disk.health import HealthReport
from prefixcache_offload.disk.outcomes import Outcome, Trouble, trouble_of
from prefixcache_offload.disk.reader import Reader
from prefixcache_offload.disk.shared import Shared
from prefixcache_offload.disk.writer import Writer

_TICK_S = 0.5


class Watchdog:
    """One thread, or `tick` called by hand."""

    def __init__(self, shared: Shared, reader: Reader, writer: Writer) -> None:
        self._shared, self._reader, self._writer = shared, reader, writer
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._told = 0
        self.on_change: Callable[[HealthReport], None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._run, name="disk-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more. A probe that hangs is left behind."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_TICK_S)

    def _run(self) -> None:
        pause = min(_TICK_S, self._shared.options.stall_s / 4, self._shared.options.retry_s / 2)
        while not self._stop.wait(pause):
            self.tick()

    def tick(self) -> None:
        """Look once."""
        hanging = self._find_stalls()
        if not hanging and not self._shared.closing:
            self._look_at_directory()
            with self._shared.lock:
                due = self._shared.health.retry_due()
            if due:
                self._try_again()
        with self._shared.lock:
            off = self._shared.health.reads_off, self._shared.health.writes_off
        if off[1] is not None and not self._shared.closing:
            self._writer.drop_all(Outcome.TIER_OFF)
        if off[0] is not None and not self._shared.closing:
            self._reader.drop_all(Outcome.TIER_OFF)
        self._tell()

    def thread_died(self) -> None:
        """A thread of the tier ended by an error of ours: nothing may wait for it."""
        with self._shared.lock:
            self._shared.health.fail(Trouble.THREAD_DIED)

    def _find_stalls(self) -> bool:
        shared = self._shared
        with shared.lock:
            now = shared.clock()
            late = [call for call in shared.calls.values() if now - call.started > shared.options.stall_s]
            for call in late:
                if not call.told:
                    call.told = True
                    shared.counters.stalls += 1
            if late:
                shared.health.fail(Trouble.STALLED)
        return bool(late)

    def _look_at_directory(self) -> None:
        shared = self._shared
        if shared.health.off:
            return
        gone = not shared.directory.still_there()
        read_only = not gone and self._read_only()
        with shared.lock:
            if gone:
                shared.health.fail(Trouble.DIRECTORY_GONE)
            elif read_only:
                shared.health.fail(Trouble.READ_ONLY)

    def _read_only(self) -> bool:
        try:
            return self._shared.disk.space(self._shared.directory.path).read_only
        except OSError:
            return False

    def _try_again(self) -> None:
        """One try of all that failed before: the directory is there, has room, and takes a page and gives it back."""
        shared = self._shared
        if not shared.directory.still_there():
            return
        try:
            space = shared.disk.space(shared.directory.path)
            if space.read_only or space.free_bytes < shared.options.new_segment_bytes:
                return
            shared.directory.probe()
        except OSError as error:
            with shared.lock:
                shared.health.fail(trouble_of(error))
            return
        with shared.lock:
            shared.health.recovered()

    def _tell(self) -> None:
        with self._shared.lock:
            changes, report = self._shared.health.changes, self._shared.health.report()
        if changes != self._told:
            self._told = changes
            if self.on_change is not None:
                self.on_change(report)
