"""The fakes around a planner: pool memory, the control page and the executor.

Faults they make, all chosen by the seed:
- copies, checksums and verifications end in any order, long after they began; copies fail, or fail after half of it;
- a copy into a GPU pool ends long after it began, slot by slot, or fails after some of it; a device is lost: what is
  under way to it fails later, and its bytes are anything from then on;
- a checksum is computed over bytes that may have changed meanwhile, or not at all;
- bytes rot while the daemon is down (warm restart);
- a writer writes at any moment until its own last word: after its reservation ran out, after its session ended;
- a writer stops (SIGSTOP) and goes on later; a process dies (SIGKILL) and the planner hears of it much later;
- a reader copies first and compares generations later, also after its lease ran out.
Memory holds no bytes but who wrote them, per slot and head, so that wrong bytes show as what they are.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import numpy as np

from prefixcache.core.commands import ComputeChecksum, CopySlots, PromoteSlots, SetGenerations, VerifyParts
from prefixcache.core.events import ChecksumDone, CopyDone, DeviceLost, Event, PromotionDone, VerifyDone
from prefixcache.core.ids import HOST_POOL, PoolId

Tag = tuple[int, bytes, int]  # namespace, key, part: what the bytes of one head of one part are
ROTTEN: Tag = (-1, b"rotten", 0)
HEADS = 2


class SimError(AssertionError):
    """The simulator saw something that must not be."""


class Memory:
    """Pool bytes and control page. A slot never written holds nothing anybody expects."""

    def __init__(self) -> None:
        self.heads: dict[int, list[Tag | None]] = {}
        self.control: dict[int, int] = {}
        self.dirty = False
        self.lost = False  # the device is gone

    def write(self, slot: int, heads: range, tag: Tag) -> None:
        content = self.heads.setdefault(slot, [None] * HEADS)
        for head in heads:
            content[head] = tag
        self.dirty = True

    def read(self, slot: int) -> tuple[Tag | None, ...]:
        return tuple(self.heads.get(slot, [None] * HEADS))

    def generation(self, slot: int) -> int:
        return self.control.get(slot, 0)

    def digest(self, slot: int) -> bytes:
        return hashlib.sha256(repr(self.read(slot)).encode()).digest()[:16]


@dataclass(eq=False)
class Job:
    """Something asynchronous under way."""

    command: CopySlots | PromoteSlots | ComputeChecksum | VerifyParts
    copied: int = 0


class Executor:
    """Carries out orders on `Memory`, in an order and with faults of the seed's choice. memories: by pool."""

    def __init__(self, memories: dict[PoolId, Memory], rng: random.Random) -> None:
        self.memories = memories
        self.memory = memories[HOST_POOL]
        self.rng = rng
        self.jobs: list[Job] = []

    def set_generations(self, command: SetGenerations) -> None:
        memory = self.memories[command.pool]
        for slot in command.slots.tolist():
            if memory.generation(slot) >= command.generation:
                raise SimError(f"slot {slot}: generation {command.generation} is not new")
            memory.control[slot] = command.generation

    def lose(self, pool: PoolId) -> Event:
        """A device fails for good."""
        memory = self.memories[pool]
        memory.lost = True
        for slot in memory.heads:
            memory.heads[slot] = [ROTTEN] * HEADS
        return DeviceLost(pool, "fell off the bus")

    def begin(self, command: CopySlots | PromoteSlots | ComputeChecksum | VerifyParts) -> None:
        self.jobs.append(Job(command))

    def step(self) -> Event | None:
        """Does a piece of some job; answers its Done event when it ended."""
        if not self.jobs:
            return None
        job = self.rng.choice(self.jobs)
        command = job.command
        if isinstance(command, CopySlots):
            return self._copy(job, command)
        if isinstance(command, PromoteSlots):
            return self._promote(job, command)
        self.jobs.remove(job)
        if isinstance(command, ComputeChecksum):
            return self._checksum(command)
        return self._verify(command)

    def _copy(self, job: Job, command: CopySlots) -> Event | None:
        failed = self.rng.random() < 0.15
        if job.copied < len(command.sources) and not failed:
            source, target = int(command.sources[job.copied]), int(command.targets[job.copied])
            self.memory.heads[target] = list(self.memory.read(source))
            self.memory.dirty = True
            job.copied += 1
            return None
        self.jobs.remove(job)
        return CopyDone(command.copy, ok=not failed)

    def _promote(self, job: Job, command: PromoteSlots) -> Event | None:
        source, target = self.memories[command.source_pool], self.memories[command.target_pool]
        failed = target.lost or self.rng.random() < 0.05
        pairs = [pair for part in command.parts for pair in zip(part.sources, part.targets, strict=True)]
        for slot, other in pairs[job.copied : job.copied + self.rng.choice((1, 2, 99))]:
            if not failed:
                target.heads[int(other)] = list(source.read(int(slot)))
                target.dirty = True
                job.copied += 1
        if job.copied < len(pairs) and not failed:
            return None
        self.jobs.remove(job)
        return PromotionDone(command.copy, ok=not failed)

    def _checksum(self, command: ComputeChecksum) -> Event:
        if self.rng.random() < 0.05:
            return ChecksumDone(command.namespace, command.part, command.rows, command.generations, None)
        packed = b"".join(self.memory.digest(int(slot)) for slot in command.slots)
        digests = np.frombuffer(packed, np.uint8).reshape(-1, 16)
        return ChecksumDone(command.namespace, command.part, command.rows, command.generations, digests)

    def _verify(self, command: VerifyParts) -> Event:
        failed = [
            (part.part, int(row))
            for part in command.parts
            for row, slot, digest in zip(part.rows, part.slots, part.digests, strict=True)
            if self.memory.digest(int(slot)) != digest.tobytes()
        ]
        return VerifyDone(command.check, tuple(failed))
