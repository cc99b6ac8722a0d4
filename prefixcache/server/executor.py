"""Carries out the planner's orders.

`SetGenerations` is done on the spot, because it must be before the reply leaves; whatever touches the bytes of slots
goes to one background thread and comes back as a Done event, exactly one for every order. The thread ends work it
cannot do with a Done that says so; it never keeps silent.
"""

import contextlib
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache_offload.checksum import DIGEST_BYTES, checksum
from prefixcache_offload.gpu import DevicePool
from prefixcache_offload.pool import HostPool

log = logging.getLogger(__name__)

Digests = npt.NDArray[np.uint8]
Work = Callable[[], e.Event]
_NICENESS: Final = 10
_IDLE_S: Final = 0.25
# Slots between two signs of life: a few milliseconds.
_BEAT_SLOTS: Final = 8


class Urgency(IntEnum):
    """What comes first. Somebody waits for a verification; nobody for a checksum."""

    NOW = 0
    SOON = 1
    LATER = 2


def _be_nice() -> None:
    """Engines on the same host come first; on Linux a priority belongs to a thread."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class Executor:
    """Owns the background thread; `orders` is the table for `loop.Owner`."""

    def __init__(
        self, pools: Mapping[int, HostPool], beat: Callable[[], None], devices: Mapping[int, DevicePool] | None = None
    ) -> None:
        """`devices`: pools of which only generations are written here."""
        self._pools = pools
        self._devices = devices or {}
        self._beat = beat
        self._queue: queue.PriorityQueue[tuple[Urgency, int, Work | None]] = queue.PriorityQueue()
        self._serials = itertools.count()
        self._report: Callable[[e.Event], object] | None = None
        self._thread = threading.Thread(target=self._run, name="prefixcache-executor", daemon=True)
        self._stopping = False
        self.orders: dict[type, Callable[..., None]] = {
            c.SetGenerations: self._set_generations,
            c.CopySlots: lambda order: self._put(Urgency.SOON, lambda: self._copy(order)),
            c.ComputeChecksum: lambda order: self._put(Urgency.LATER, lambda: self._compute(order)),
            c.VerifyParts: lambda order: self._put(Urgency.NOW, lambda: self._verify(order)),
        }

    def later(self, work: Work) -> None:
        """Report an event from the background thread, soon."""
        self._put(Urgency.SOON, work)

    @property
    def backlog(self) -> int:
        """Orders waiting."""
        return self._queue.qsize()

    def start(self, report: Callable[[e.Event], object]) -> None:
        """Start the thread; `report` takes the Done events."""
        self._report = report
        self._thread.start()

    def finish(self, timeout_s: float) -> bool:
        """Wait until every order is done; whether that came to be in time."""
        queue = self._queue
        with queue.all_tasks_done:
            return queue.all_tasks_done.wait_for(lambda: not queue.unfinished_tasks, timeout_s)

    def stop(self) -> None:
        """End the thread after the order it is at; those still waiting are dropped, as the planner ends as well."""
        self._stopping = True
        self._put(Urgency.NOW, None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        assert self._report is not None
        _be_nice()
        while not self._stopping:
            try:
                _, _, work = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                self._beat()
                continue
            if work is not None and not self._stopping:
                self._report(work())
            self._queue.task_done()
            self._beat()

    def _put(self, urgency: Urgency, work: Work | None) -> None:
        self._queue.put((urgency, next(self._serials), work))

    def _set_generations(self, order: c.SetGenerations) -> None:
        pool = self._pools.get(order.pool) or self._devices[order.pool]
        pool.control[order.slots] = order.generation

    def _copy(self, order: c.CopySlots) -> e.Event:
        pool = self._pools[order.pool]
        try:
            for source, target in zip(order.sources.tolist(), order.targets.tolist(), strict=True):
                np.copyto(pool.slot(target, order.slot_bytes), pool.slot(source, order.slot_bytes))
        except (IndexError, ValueError) as error:
            log.error("a slab could not be moved", extra={"facts": {"copy": order.copy, "error": error}})
            return e.CopyDone(order.copy, ok=False)
        return e.CopyDone(order.copy, ok=True)

    def _compute(self, order: c.ComputeChecksum) -> e.Event:
        # Slots that have changed hands meanwhile are not worth the time: so a backlog never costs more than the pool.
        current = order.slots >= 0
        with contextlib.suppress(IndexError):  # not in the pool: `_digests` says so
            current = self._pools[order.pool].check_generations(order.slots, order.generations)
        found = self._digests(order.pool, order.slots[current], order.size_bytes)
        digests = None
        if found is not None:
            digests = np.zeros((len(order.slots), DIGEST_BYTES), np.uint8)
            digests[current] = found
        return e.ChecksumDone(order.namespace, order.part, order.rows, order.generations, digests)

    def _verify(self, order: c.VerifyParts) -> e.Event:
        failed: list[tuple[int, int]] = []
        for part in order.parts:
            digests = self._digests(part.pool, part.slots, part.size_bytes)
            good = np.zeros(len(part.rows), bool) if digests is None else (digests == part.digests).all(axis=1)
            failed.extend((part.part, row) for row in part.rows[~good].tolist())
        return e.VerifyDone(order.check, tuple(failed))

    def _digests(self, pool_id: int, slots: npt.NDArray[np.uint32], size_bytes: int) -> Digests | None:
        """u8[n, 16] of the first `size_bytes` of each slot; None when a slot is not in the pool or the server ends."""
        pool = self._pools[pool_id]
        digests = np.empty((len(slots), DIGEST_BYTES), np.uint8)
        try:
            for index, slot in enumerate(slots.tolist()):
                if self._stopping:
                    return None
                digests[index] = np.frombuffer(checksum(pool.slot(slot, size_bytes)), np.uint8)
                if index % _BEAT_SLOTS == 0:
                    self._beat()
        except (IndexError, ValueError) as error:
            log.error("a checksum could not be computed", extra={"facts": {"slots": len(slots), "error": error}})
            return None
        return digests
