"""Loads and saves of one worker, behind its steps: two threads, and who may still read which request's pages.

Rules:
1. A load ends once, well or badly, and is reported whatever happens; a save that cannot be done is counted and dropped.
2. Nothing is read from a request's pages after `let_go` returned for it, and nothing waits there for the daemon: a save
   that has not begun to copy is called off, one that copies is waited for.
3. Saves happen in the order they were ordered in, so a block never comes before what is in front of it.

It must not know vLLM or tensors: what is done is a callable.
"""

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from prefixcache_client import CopyResult, StoreResult
from prefixcache_client.errors import Failure
from prefixcache_client.reasons import ALREADY_STORED, INTERNAL, QUEUE_FULL

CALLED_OFF: Final = "called_off"
LOAD_FAILED: Final = "load_failed"
MAX_TIMED: Final = 1024
MAX_VISIBLE: Final = 4096
"""As many as wait to be announced. Not every engine takes them."""

Load = Callable[[], CopyResult]
Save = Callable[["SaveTask"], StoreResult]


@dataclass(slots=True)
class SaveTask:
    """One save. `hold` is what its copy is done in."""

    request_id: str
    blocks: int
    save: Save
    lock: threading.Lock = field(default_factory=threading.Lock)
    called_off: bool = False
    number: int = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """While this is entered, the request's pages keep their content. Raises Failure when they do not any more."""
        with self.lock:
            if self.called_off:
                raise Failure(CALLED_OFF, "the request's pages have another owner")
            yield

    def call_off(self) -> None:
        """After this the pages are not read; waits for a copy under way, which waits for nobody."""
        with self.lock:
            self.called_off = True


@dataclass(slots=True)
class Counts:
    """What was moved, and what was not, by reason. Tokens, blocks and bytes since the last look.

    `load_seconds`: of each load, from its order to its end; at most MAX_TIMED, what is more is not timed.
    """

    loads: int = 0
    load_bytes: int = 0
    load_seconds: list[float] = field(default_factory=list)
    loads_failed: Counter[str] = field(default_factory=Counter)
    saved_blocks: int = 0
    save_bytes: int = 0
    not_saved_blocks: Counter[str] = field(default_factory=Counter)


class Transfers:
    """See the rules above. `load`, `save`, `let_go`, `ended` and `saving` are called by one thread, the engine's."""

    def __init__(self, save_queue: int, prepare: Callable[[], object], *, counts_refusals: bool = True) -> None:
        """`prepare`: called once by the loading thread before its first load. `counts_refusals`: blocks that the daemon
        does not want are counted here, and not by another rank, which is told the same."""
        self._prepare = prepare
        self._counts_refusals = counts_refusals
        self._save_queue = save_queue
        self._loads: queue.SimpleQueue[tuple[str, Load, float] | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[SaveTask | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[str, CopyResult]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: dict[str, list[SaveTask]] = {}
        self._waiting_count = 0
        self._counts = Counts()
        self._visible: deque[int] = deque(maxlen=MAX_VISIBLE)
        self._threads = [
            threading.Thread(target=self._load_all, name="prefixcache-load", daemon=True),
            threading.Thread(target=self._save_all, name="prefixcache-save", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def load(self, request_id: str, load: Load) -> None:
        """Have a load done."""
        self._loads.put((request_id, load, time.monotonic()))

    def load_now(self, load: Load) -> CopyResult:
        """Do it here and now; it is not reported by `ended`."""
        began = time.monotonic()
        result = self._do_load(load)
        self._count_load(result, began)
        return result

    def ended(self) -> list[tuple[str, CopyResult]]:
        """The loads that ended since the last call."""
        found = []
        while True:
            try:
                found.append(self._ended.get_nowait())
            except queue.Empty:
                return found

    def save(self, request_id: str, blocks: int, save: Save, number: int = 0) -> bool:
        """Have a save done, unless too many wait already; whether it will be. `number`: see `take_visible`."""
        with self._lock:
            if self._waiting_count >= self._save_queue:
                self._counts.not_saved_blocks[QUEUE_FULL] += blocks
                return False
            task = SaveTask(request_id, blocks, save, number=number)
            self._waiting.setdefault(request_id, []).append(task)
            self._waiting_count += 1
        self._saves.put(task)
        return True

    def not_saved(self, blocks: int, reason: str) -> None:
        """So many blocks were ordered to be saved and will not be."""
        with self._lock:
            self._counts.not_saved_blocks[reason] += blocks

    def saving(self, request_id: str) -> bool:
        """Whether a save of the request has not ended."""
        with self._lock:
            return request_id in self._waiting

    @property
    def busy(self) -> bool:
        """Whether any save has not ended."""
        return self._waiting_count > 0

    def let_go(self, request_id: str) -> None:
        """The request's pages get another owner now."""
        with self._lock:
            tasks = list(self._waiting.get(request_id, ()))
        for task in tasks:
            task.call_off()

    def take_visible(self) -> list[int]:
        """Numbers of the saves all of whose blocks are visible, since the last call; the last MAX_VISIBLE."""
        with self._lock:
            visible = list(self._visible)
            self._visible.clear()
        return visible

    def take_counts(self) -> Counts:
        """What was counted since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counts()
        return counts

    def close(self, timeout_s: float) -> None:
        """Finish what is under way, within a time; the threads end with the process otherwise."""
        self._loads.put(None)
        self._saves.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _load_all(self) -> None:
        self._prepare()
        while (task := self._loads.get()) is not None:
            request_id, load, ordered = task
            result = self._do_load(load)
            self._count_load(result, ordered)
            self._ended.put((request_id, result))

    def _do_load(self, load: Load) -> CopyResult:
        try:
            return load()
        except (ValueError, TypeError, LookupError, OSError, RuntimeError, MemoryError) as error:
            # A mistake of ours; the request is computed, and the log says what happened.
            return CopyResult(ok=False, tokens=0, size_bytes=0, reason=f"{INTERNAL}: {error}")

    def _count_load(self, result: CopyResult, began: float) -> None:
        took = time.monotonic() - began
        with self._lock:
            self._counts.loads += 1
            self._counts.load_bytes += result.size_bytes
            if len(self._counts.load_seconds) < MAX_TIMED:
                self._counts.load_seconds.append(took)
            if not result.ok:
                self._counts.loads_failed[result.reason.split(":")[0]] += 1

    def _save_all(self) -> None:
        while (task := self._saves.get()) is not None:
            try:
                result = task.save(task)
            except (ValueError, TypeError, LookupError, OSError, RuntimeError, MemoryError):
                result = StoreResult(0, 0, 0, {INTERNAL: task.blocks}, INTERNAL)
            self._end_save(task, result)

    def _end_save(self, task: SaveTask, result: StoreResult) -> None:
        with self._lock:
            self._counts.saved_blocks += result.stored_blocks
            self._counts.save_bytes += result.size_bytes
            if self._counts_refusals or result.reason:
                self._counts.not_saved_blocks.update(result.refused)
            if result.stored_blocks + result.refused.get(ALREADY_STORED, 0) >= task.blocks:
                self._visible.append(task.number)
            left = self._waiting[task.request_id]
            left.remove(task)
            if not left:
                del self._waiting[task.request_id]
            self._waiting_count -= 1
