"""How block bytes get into and out of this process: through shared memory here (of the host or of this worker's GPU),
as streams in `streams`.

Both ways are one interface, so a lease does not know which it has. `load` is only done when the bytes are known to be
the leased ones: generations are compared after the copy, never before. No calls besides those of a stream, no
counting.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from prefixcache_client import coding
from prefixcache_client.blocks import BlockFormat
from prefixcache_client.errors import Failure, Unreachable
from prefixcache_client.pools import MappedPools
from prefixcache_client.reasons import INTERNAL, LEASE_LOST, RESERVATION_EXPIRED
from prefixcache_client.runs import SlotRun
from prefixcache_client.tensors import KvTensors
from prefixcache_offload.mapping import Bytes
from prefixcache_offload.memory import Memory

Planned = list[tuple[Memory, list[coding.AnyJob]]]
"""Moves by the pool they are from or to."""


class BytePath(Protocol):
    """Moves blocks between a session's slots and a caller's tensors. They raise Failure; ValueError for bad tensors."""

    def load(self, form: BlockFormat, lease: bytes, runs: Sequence[SlotRun], tensors: KvTensors) -> int:
        """Copy leased blocks to `tensors`; the bytes copied. When it raises, the tensors hold anything."""

    def save(self, form: BlockFormat, reservation: bytes, runs: Sequence[SlotRun], tensors: KvTensors) -> int:
        """Fill reserved slots from `tensors`; the bytes copied. When it raises, nothing may be committed."""

    def view(self, form: BlockFormat, lease: bytes, run: SlotRun) -> Bytes:
        """The bytes of a run's only block, u8[part bytes], read-only for ever and readable for ever."""

    def intact(self, runs: Sequence[SlotRun]) -> bool:
        """Whether what was read from these slots until now is still what was leased."""


class MappedPath:
    """Shared memory: one copy, no call."""

    def __init__(self, pools: MappedPools) -> None:
        self._pools = pools

    def load(self, form: BlockFormat, lease: bytes, runs: Sequence[SlotRun], tensors: KvTensors) -> int:
        """See BytePath."""
        if self._pools.on_device:
            with self._pools.copying():
                return self._load(form, runs, tensors)
        return self._load(form, runs, tensors)

    def _load(self, form: BlockFormat, runs: Sequence[SlotRun], tensors: KvTensors) -> int:
        try:
            planned = self._plan(form, runs, tensors)
        except Unreachable as error:
            raise Failure(LEASE_LOST, str(error)) from error
        moved = copied(coding.load, planned)
        if not self._pools.unchanged(runs):
            raise Failure(LEASE_LOST, "a slot got another owner before its bytes were read")
        return moved

    def save(self, form: BlockFormat, reservation: bytes, runs: Sequence[SlotRun], tensors: KvTensors) -> int:
        """See BytePath."""
        moved = copied(coding.store, self._plan(form, runs, tensors))
        if not self._pools.unchanged(runs):
            raise Failure(RESERVATION_EXPIRED, "a reserved slot got another owner before it was filled")
        return moved

    def view(self, form: BlockFormat, lease: bytes, run: SlotRun) -> Bytes:
        """See BytePath."""
        return self._pools.read_only(run.pool, int(run.slots[0]), form.parts[run.part].bytes)

    def intact(self, runs: Sequence[SlotRun]) -> bool:
        """See BytePath."""
        return self._pools.unchanged(runs)

    def _plan(self, form: BlockFormat, runs: Sequence[SlotRun], tensors: KvTensors) -> Planned:
        """All moves before the first byte, so that a mistake in the tensors changes nothing."""
        planned: dict[int, tuple[Memory, list[coding.AnyJob]]] = {}
        for run in runs:
            memory = self._pools.memory(run, form.parts[run.part].bytes)
            _, jobs = planned.setdefault(run.pool, (memory, []))
            jobs += coding.plan(form, run, run.slots, tensors)
        return list(planned.values())


class MappedReads:
    """Reads by shared memory, writes by stream: for pools that only the daemon may write."""

    def __init__(self, mapped: MappedPath, streamed: BytePath) -> None:
        self.load = mapped.load
        self.view = mapped.view
        self.intact = mapped.intact
        self.save = streamed.save


def copied(copy: Callable[[Memory, Sequence[coding.AnyJob]], int], planned: Planned) -> int:
    """Carry out all moves and wait for those that a device does by itself; the bytes moved. Raises Failure.

    Only after that may generations be compared, or a buffer be used again.
    """
    try:
        moved = sum(copy(memory, jobs) for memory, jobs in planned)
        for pool, jobs in planned:
            pool.wait()  # copies off a device, whose target may be in host memory
            for memory in coding.memories(jobs):
                memory.wait()
    except OSError as error:
        raise Failure(INTERNAL, f"the kernel refused a copy: {error}") from error
    return moved
