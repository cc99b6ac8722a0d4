"""Which blocks the daemon holds no more, for those whom this engine told of them.

Rules: a thread follows the daemon's events for as long as the engine lives; the scheduler's thread only takes what it
found. Only where vLLM publishes events at all. After a gap, such as a restart of the daemon, what is missing from the
new snapshot is what was removed. It must not know vLLM.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from prefixcache_client import KnownBlocks, Watch, WatchEvent, WatchRefusedError
from prefixcache_client.events import EventKind

MAX_WAITING: Final = 1 << 18
"""Keys that wait to be told. An engine without requests takes none steps and tells nothing."""
_LOOK_S: Final = 1.0
_MOST_NAMESPACES: Final = 64


class Told(Protocol):
    """What hears of it."""

    def removed(self, keys: Iterable[bytes]) -> None:
        """These blocks cannot be hit any more."""

    def stored(self, keys: Iterable[bytes]) -> None:
        """These can, whoever stored them."""

    def lost(self) -> None:
        """Too much was removed to be told one by one."""


class Differences:
    """Events of one watch as keys that came and went, over gaps as well. Not thread-safe."""

    def __init__(self) -> None:
        self._known = KnownBlocks()
        self._before: set[bytes] = set()

    def apply(self, event: WatchEvent) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """(keys that came, keys that went) with the next event."""
        before = self._held() if event.kind in (EventKind.CLEARED, EventKind.SNAPSHOT_BEGIN) else set()
        self._known.apply(event)
        if event.kind is EventKind.SNAPSHOT_BEGIN:
            self._before |= before
        elif event.kind is EventKind.SNAPSHOT_END:
            gone = tuple(self._before - self._held())
            self._before = set()
            return (), gone
        elif event.kind is EventKind.CLEARED:
            return (), tuple(before - self._held())
        elif event.tier != "gpu":
            if event.kind is EventKind.STORED:
                return event.keys, ()
            if event.kind is EventKind.REMOVED:
                return (), event.keys
        return (), ()

    def _held(self) -> set[bytes]:
        return {key for tiers in self._known.tiers.values() for key in tiers}


class Removals:
    """Follows one daemon. `watch`: begins a watch of these fingerprints, asked anew at every connection."""

    def __init__(self, watch: Callable[[list[bytes]], Watch]) -> None:
        self._fingerprints: list[bytes] = []
        self._wanted: tuple[bytes, ...] = ()
        self._lock = threading.Lock()
        self._gone: dict[bytes, bool] = {}  # key -> whether it went, the latest last
        self._overflowed = False
        self._over = threading.Event()
        self._watch = watch(self._fingerprints)
        self._thread = threading.Thread(target=self._run, name="prefixcache-removals", daemon=True)
        self._thread.start()

    def follow(self, fingerprints: Iterable[bytes]) -> None:
        """The engine's namespaces now."""
        self._wanted = tuple(fingerprints)[-_MOST_NAMESPACES:]

    def tell(self, told: Told) -> None:
        """What was found since the last call, in its order."""
        if not self._gone and not self._overflowed:
            return
        with self._lock:
            gone, self._gone = self._gone, {}
            overflowed, self._overflowed = self._overflowed, False
        if overflowed:
            told.lost()
        removed = [key for key, went in gone.items() if went]
        stored = [key for key, went in gone.items() if not went]
        if stored:
            told.stored(stored)
        if removed:
            told.removed(removed)

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._watch.close()
        self._thread.join()

    def _run(self) -> None:
        differences = Differences()
        try:
            while not self._over.is_set():
                if self._wanted != tuple(self._fingerprints):
                    self._fingerprints[:] = self._wanted
                    self._watch.renew()
                if not self._fingerprints:
                    self._over.wait(_LOOK_S)
                elif (event := self._watch.next(_LOOK_S)) is not None:
                    self._note(*differences.apply(event))
        except WatchRefusedError:
            return  # an older daemon: nothing is known of removals

    def _note(self, came: tuple[bytes, ...], went: tuple[bytes, ...]) -> None:
        if not came and not went:
            return
        with self._lock:
            for keys, gone in ((came, False), (went, True)):
                for key in keys:
                    self._gone.pop(key, None)
                    self._gone[key] = gone
            if len(self._gone) > MAX_WAITING:
                self._gone.clear()
                self._overflowed = True
