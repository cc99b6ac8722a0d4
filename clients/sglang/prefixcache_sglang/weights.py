"""Weights that are changed in place: SGLang tells its storage backends nothing of it, so its updater is watched.

Rules:
1. After every call that may have changed weights, whoever watches is told, before the engine computes again: SGLang
   updates on the thread that also schedules.
2. The updater's methods are wrapped once, and found by name: a version without them is not watched, which `watch` says.
3. All ranks of an engine come to the same epochs without a word between them, and no two engines ever do: an epoch is
   made of the processes' common parent, by its start time and this boot's id, and of how many there were before.
"""

import functools
import hashlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_UPDATERS: Final = (
    ("sglang.srt.managers.scheduler_components.weight_updater", "SchedulerWeightUpdaterManager"),
    ("sglang.srt.managers.scheduler_update_weights_mixin", "SchedulerUpdateWeightsMixin"),
)
_METHODS: Final = (
    "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc", "end_weight_update", "flush_cache_after_weight_update",
)  # fmt: skip
_START_TIME_FIELD: Final = 19  # of /proc/PID/stat, counted behind the command's name

_lock = threading.Lock()
_watching: "weakref.WeakSet[Watcher]" = weakref.WeakSet()


class Watcher:
    """Calls `changed` whenever weights may have changed, as long as it is kept."""

    def __init__(self, changed: Callable[[], object]) -> None:
        self.changed = changed
        _watching.add(self)


def install() -> bool:
    """Watch this process's engine; whether it has an updater to watch. Imports nothing: an engine has long done so."""
    found = False
    with _lock:
        for module, name in _UPDATERS:
            updater = getattr(sys.modules.get(module), name, None)
            if updater is None:
                continue
            found = True
            for method in _METHODS:
                _wrap(updater, method)
    return found


def epoch_number(changes: int) -> int:
    """The weights epoch after that many changes, from 1 to 2^63 - 1; 0 before the first."""
    if not changes:
        return 0
    parent = os.getppid()
    stat = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8", errors="replace")
    started = stat.rpartition(")")[2].split()[_START_TIME_FIELD]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    digest = hashlib.sha256(f"sglang epoch {boot} {parent} {started} {changes}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1 or 1


def _wrap(updater: Any, name: str) -> None:
    method = updater.__dict__.get(name)
    if method is None or hasattr(method, "prefixcache_watched"):
        return

    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            for watcher in list(_watching):
                watcher.changed()

    watched.prefixcache_watched = True  # type: ignore[attr-defined] # a mark for ourselves
    setattr(updater, name, watched)
