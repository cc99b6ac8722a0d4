"""Looks after the tier from outside its calls: calls that hang, a directory that has gone, and when to try again.

`Watchdog` never touches the disk, so it always gets to say that a call hangs; `Prober` does, and is watched itself.
"""

import threading
from collections.abc import Callable

from prefixcache_offload.disk.directory import Whereabouts
from prefixcache_offload.disk.health import HealthReport
from prefixcache_offload.disk.outcomes import Outcome, Trouble, trouble_of
from prefixcache_offload.disk.reader import Reader
from prefixcache_offload.disk.shared import Shared
from prefixcache_offload.disk.writer import Writer

_LONGEST_PAUSE_S = 0.5


class _Ticking:
    """A thread that calls `tick` every so often."""

    def __init__(self, shared: Shared, name: str) -> None:
        self._shared = shared
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more. A look that hangs is left behind."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_LONGEST_PAUSE_S)

    def tick(self) -> None:
        """Look once."""

    def _run(self) -> None:
        options = self._shared.options
        while not self._stop.wait(min(_LONGEST_PAUSE_S, options.stall_s / 4, options.retry_s / 2)):
            self.tick()


class Watchdog(_Ticking):
    """Finds calls that hang, ends what waits behind them, and tells of every change of health."""

    def __init__(self, shared: Shared, reader: Reader, writer: Writer) -> None:
        super().__init__(shared, "disk-watch")
        self._reader, self._writer = reader, writer
        self._told = 0
        self.on_change: Callable[[HealthReport], None] | None = None

    def tick(self) -> None:
        """Look once."""
        shared = self._shared
        self._find_stalls()
        with shared.lock:
            reads_off, writes_off = shared.health.reads_off, shared.health.writes_off
            changes, report = shared.health.changes, shared.health.report()
        if writes_off is not None and not shared.closing:
            self._writer.drop_all(Outcome.TIER_OFF)
        if reads_off is not None and not shared.closing:
            self._reader.drop_all(Outcome.TIER_OFF)
        if changes != self._told:
            self._told = changes
            if self.on_change is not None:
                self.on_change(report)

    def hanging(self) -> set[int]:
        """Jobs that wait for calls that were found to hang."""
        with self._shared.lock:
            return {job for call in self._shared.calls.values() if call.told for job in call.jobs}

    def thread_died(self) -> None:
        """A thread of the tier ended by an error of ours: nothing may wait for it."""
        with self._shared.lock:
            self._shared.health.fail(Trouble.THREAD_DIED)

    def _find_stalls(self) -> None:
        shared = self._shared
        with shared.lock:
            now = shared.clock()
            for call in shared.calls.values():
                if not call.told and now - call.started > call.limit_s:
                    call.told = True
                    shared.counters.stalls += 1
                    shared.health.fail(Trouble.STALLED)


class Prober(_Ticking):
    """Looks whether the directory is still there, and tries again when the tier is off."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared, "disk-probe")

    def tick(self) -> None:
        """Look once."""
        shared = self._shared
        with shared.lock:
            if shared.closing or any(call.told for call in shared.calls.values()):
                return
            off, due = shared.health.off, shared.health.retry_due()
        if not off:
            self._look()
        elif due:
            self._try_again()

    def _look(self) -> None:
        shared = self._shared
        with shared.calling():
            trouble = self._trouble()
        if trouble is not None:
            with shared.lock:
                shared.health.fail(trouble)

    def _trouble(self) -> Trouble | None:
        shared = self._shared
        if not shared.directory.still_there():
            return Trouble.DIRECTORY_GONE
        try:
            return Trouble.READ_ONLY if shared.disk.space(shared.directory.path).read_only else None
        except OSError as error:
            return trouble_of(error)

    def _try_again(self) -> None:
        """One try of all that failed before: the directory is there, has room, and takes a page and gives it back."""
        shared = self._shared
        try:
            with shared.calling():
                where = shared.directory.whereabouts()
                shared.replaced = where is Whereabouts.REPLACED
                space = shared.disk.space(shared.directory.path)
                well = where is Whereabouts.HERE and not space.read_only
                well = well and space.free_bytes >= shared.options.new_segment_bytes
                if well:
                    shared.directory.probe()
        except OSError:
            return
        if well:
            with shared.lock:
                shared.health.recovered()
