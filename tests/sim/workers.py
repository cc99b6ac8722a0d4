"""Workers: what each remembers of its leases and reservations. They know what any client knows, no more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prefixcache.core.commands import Acquired, Arrived, Reserved, Run
from prefixcache.core.ids import KEY_BYTES, NO_SLOT
from tests.sim.fakes import HEADS, Memory, SimError, Tag


@dataclass
class Prompt:
    """A namespace and the keys of a prompt in it."""

    namespace: int
    keys: bytes
    parents: bytes | None = None

    def key(self, block: int) -> bytes:
        return self.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES]

    @property
    def blocks(self) -> int:
        return len(self.keys) // KEY_BYTES


@dataclass
class Reading:
    """A lease: first the bytes are copied, later their generations compared."""

    prompt: Prompt
    reply: Acquired
    copied: list[tuple[int, int, int, Tag, tuple[Tag | None, ...]]] | None = None
    """Pool, slot, generation, what is expected, what was there."""
    over: bool = False  # the planner ended it
    runs: list[Run] = field(default_factory=list)
    ready: int = 0
    done: bool = False  # nothing more will come

    def __post_init__(self) -> None:
        self.runs = list(self.reply.runs)
        self.ready = self.reply.ready_blocks
        self.done = self.ready == self.reply.planned_blocks

    def arrived(self, news: Arrived) -> None:
        """More can be read. Raises if it was told wrongly."""
        if self.done or news.ready_blocks < self.ready or news.ready_blocks > self.reply.planned_blocks:
            raise SimError("an arrival that was not promised")
        if news.stop is not None and not news.done:
            raise SimError("a lease is told why it ends before it does")
        if (news.ready_blocks == self.reply.planned_blocks) != (news.done and news.stop is None):
            raise SimError("a lease is told to be done too early, or not at all")
        if self.reply.present is not None:
            self._scattered(news)
            return
        self.runs += news.runs
        for part in {run.part for run in news.runs}:
            first = [run.first_block for run in news.runs if run.part == part]
            known = [run.first_block + len(run.slots) for run in self.reply.runs if run.part == part]
            follows = self.reply.from_block + self.ready
            if len(first) != 1 or first[0] < follows or (known and first[0] != follows):
                raise SimError("what arrived does not follow what was ready")
        self.ready, self.done = news.ready_blocks, news.done

    def _scattered(self, news: Arrived) -> None:
        """Of a foreign namespace: blocks that were promised and not told yet, in any order."""
        fresh, known = _places(news.runs), _places(self.runs)
        assert self.reply.present is not None
        promised = {self.reply.from_block + place for place in self.reply.present.nonzero()[0].tolist()}
        if fresh & known or not {place for _, place in fresh} <= promised:
            raise SimError("what arrived was not promised, or was there already")
        self.runs += news.runs
        parts = {part for part, _ in _places(self.runs)}
        if len(fresh) != (news.ready_blocks - self.ready) * len(parts):
            raise SimError("what arrived is miscounted")
        self.ready, self.done = news.ready_blocks, news.done

    def copy(self, memories: dict[int, Memory]) -> None:
        self.copied = []
        for run in self.runs:
            for place, (slot, generation) in enumerate(zip(run.slots.tolist(), run.generations.tolist(), strict=True)):
                expected = (self.prompt.namespace, self.prompt.key(run.first_block + place), run.part)
                self.copied.append((run.pool, slot, generation, expected, memories[run.pool].read(slot)))

    def compare(self, memories: dict[int, Memory]) -> bool:
        """Whether what was copied may be used; raises if that would be wrong bytes or a broken promise."""
        fine = True
        for pool, slot, generation, expected, content in self.copied or ():
            if memories[pool].generation(slot) != generation:
                if not self.over and not memories[pool].lost:
                    raise SimError(f"slot {slot} got another owner under a live lease")
                fine = False
            elif content != (expected,) * HEADS:
                raise SimError(f"wrong bytes in slot {slot}: {content} instead of {expected}")
        return fine


def _places(runs: Iterable[Run]) -> set[tuple[int, int]]:
    """(part, place)."""
    return {(run.part, run.first_block + index) for run in runs for index in range(len(run.slots))}


@dataclass
class Writing:
    """A reservation: pieces (entry, part, heads) still to be written, in any order."""

    prompt: Prompt
    reply: Reserved
    todo: list[tuple[int, int, range]] = field(default_factory=list)
    done: list[tuple[int, int, range]] = field(default_factory=list)
    told: int = 0  # how many of `done` were committed
    over: bool = False  # the planner ended it
    stopped_until: float = 0.0
    shared: bool = False

    def plan(self, heads: Iterable[int] = range(HEADS)) -> None:
        for grant in self.reply.grants:
            for entry, slot in enumerate(grant.slots.tolist()):
                if slot != NO_SLOT:
                    self.todo += [(entry, grant.part, range(head, head + 1)) for head in heads]

    def write(self, memory: Memory, piece: tuple[int, int, range]) -> None:
        entry, part, heads = piece
        slots = next(grant.slots for grant in self.reply.grants if grant.part == part)
        tag = (self.prompt.namespace, self.prompt.key(int(self.reply.blocks[entry])), part)
        memory.write(int(slots[entry]), heads, tag)
        self.todo.remove(piece)
        self.done.append(piece)


@dataclass
class Worker:
    """One process. `dead`: killed, the planner may not know yet. `gone`: its session ended in the planner."""

    session: bytes
    can_map: bool
    gpus: tuple[int, ...] = ()
    readings: dict[bytes, Reading] = field(default_factory=dict)
    writings: dict[bytes, Writing] = field(default_factory=dict)
    dead: bool = False
    gone: bool = False
