"""The host pool: how it is made, pre-faulted, pinned and given up. Bytes only; which slot is whose, the planner knows.

With warm restart on, the pool lies in a file without a name; see prefixcache_offload.warm for its life.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from typing import Final

from prefixcache.core.ids import HOST_POOL, SLOT_GRANULE
from prefixcache.server.config import Config
from prefixcache_offload import warm
from prefixcache_offload.export import PoolDescriptor
from prefixcache_offload.pinning import Pinner, open_pinner
from prefixcache_offload.pool import HostPool
from prefixcache_offload.prefault import Prefault, PrefaultOptions, PrefaultState

log = logging.getLogger(__name__)

_MOST_SLAB: Final = 64 << 20
_LEAST_SLAB: Final = 2 << 20
_SLABS: Final = 16  # a small pool is still cut into so many, so that it can serve several part sizes


def slab_bytes(config: Config) -> int:
    """Bytes of a slab: as configured, else a sixteenth of the pool between 2 and 64 MiB."""
    if config.host_slab_bytes:
        return config.host_slab_bytes
    share = config.host_bytes // _SLABS // SLOT_GRANULE * SLOT_GRANULE
    return min(max(share, min(_LEAST_SLAB, config.host_bytes)), _MOST_SLAB)


def warm_place(config: Config) -> warm.WarmPlace:
    """Where this daemon's pool is kept: a name of its own for each socket."""
    name = hashlib.sha256(os.fsencode(config.socket)).hexdigest()[:16]
    return warm.WarmPlace(f"prefixcache-{os.geteuid()}-{name}", config.warm_dir)


class HostMemory:
    """The pool and what works on it."""

    def __init__(self, config: Config) -> None:
        """Make the pool; nothing is touched yet. Raises OSError or ValueError when it cannot be."""
        self._config = config
        self.slab_bytes = slab_bytes(config)
        self.size_bytes = config.host_bytes // SLOT_GRANULE * SLOT_GRANULE
        self.warm_file: warm.WarmFile | None = None
        self.pool = self._warm_pool() if config.warm_restart else self._fresh_pool()
        self.failure = ""
        self._prefault: Prefault | None = None
        self._pinner: Pinner | None = None

    @property
    def snapshot(self) -> bytes | None:
        """The planner's state that the pool's bytes belong to, where they come from an earlier run."""
        return self.warm_file.snapshot if self.warm_file is not None else None

    def start(self, on_ready: Callable[[int], None]) -> None:
        """Touch pages in the background; `on_ready(bytes)` is told how much of the pool is ready."""
        pinner = self._pinner = open_pinner(self.pool.mapping)
        options = PrefaultOptions(
            threads=self._config.host_prefault_threads,
            prepare=pinner.register if pinner.enabled else None,
        )
        self._prefault = Prefault(self.pool.mapping, self.slab_bytes, on_ready, self._failed, options)

    def state(self) -> tuple[str, str]:
        """("on" | "failing", why)."""
        return ("failing", self.failure) if self.failure else ("on", "")

    def is_growing(self) -> bool:
        """Whether more of the pool is still being made ready."""
        return self._prefault is not None and self._prefault.state is PrefaultState.RUNNING

    def wait_whole(self, timeout_s: float) -> bool:
        """Wait until every page is in memory; whether that came to be."""
        return self._prefault is not None and self._prefault.wait(timeout_s) is PrefaultState.DONE

    def save(self, snapshot: bytes) -> None:
        """Keep the pool for the next start. Raises OSError."""
        if self.warm_file is not None:
            self.warm_file.save(snapshot)

    def close(self) -> None:
        """Give everything up; it is gone when the last worker drops its mapping."""
        if self._prefault is not None:
            self._prefault.stop()
        if self._pinner is not None:
            self._pinner.close()
        self.pool.close()
        if self.warm_file is not None:
            self.warm_file.close()

    def _failed(self, error: OSError) -> None:
        self.failure = f"memory for the pool ran out: {error}; give a smaller host_bytes"
        log.error("the pool could not be made ready", extra={"facts": {"error": error}})

    def _fresh_pool(self) -> HostPool:
        return HostPool.create(HOST_POOL, self.size_bytes, self.slab_bytes, writable=self._config.host_writable)

    def _warm_pool(self) -> HostPool:
        place = warm_place(self._config)
        try:
            found = warm.attach(place, self.size_bytes, self.slab_bytes)
        except warm.WarmRefused as refused:
            log.warning("the pool of the last run is not used", extra={"facts": {"reason": str(refused)}})
            if refused.reason in (warm.WarmRefusal.FOREIGN, warm.WarmRefusal.IN_USE):
                return self._fresh_pool()
            found = None
        self.warm_file = found or warm.create(place, self.size_bytes, self.slab_bytes)
        about = PoolDescriptor(
            HOST_POOL, "host", self.size_bytes, self.slab_bytes, self._config.host_writable, sealed=False
        )
        return HostPool.over(about, os.dup(self.warm_file.fd))
