"""One seed: a planner, some workers, random events with faults; everything is checked after every step.

What is checked: `invariants.check`; that memory holds, for every visible part, the bytes committed under its key and
the generation the table says; that a lookup finds exactly what the published events say is there; that every request
has exactly one answer; that the planner's sums are those of the answers it gave.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

from prefixcache.core import invariants
from prefixcache.core.commands import (
    Acquired,
    Arrived,
    CancelReads,
    Change,
    Cleared,
    Command,
    Committed,
    ComputeChecksum,
    CopySlots,
    FreeSegment,
    LeaseEnded,
    MoreToDo,
    PromoteSlots,
    Published,
    ReadRecords,
    Refused,
    Released,
    Reply,
    ReservationEnded,
    Reserved,
    RevokeRecords,
    SetGenerations,
    SnapshotTaken,
    VerifyParts,
    WriteRecords,
)
from prefixcache.core.events import (
    AbortRequested,
    AcquireRequested,
    CapacityReady,
    ClearRequested,
    CommitRequested,
    Coverage,
    DiskChanged,
    DiskForgotten,
    DiskRecovered,
    DrainStarted,
    Event,
    FlushStarted,
    LeaseReleased,
    LeaseRenewed,
    LookupRequested,
    NamespaceOpened,
    PartFailedVerification,
    ProcessExited,
    RecoveryDone,
    ReserveRequested,
    SegmentLost,
    SessionEnded,
    SessionOpened,
    SnapshotRequested,
    SnapshotRestored,
    TimePassed,
    WorkResumed,
)
from prefixcache.core.ids import HOST_POOL, KEY_BYTES, NamespaceKind, Tier
from prefixcache.core.pin_messages import PinEnded
from prefixcache.core.planner import Planner
from prefixcache.core.policy.names import NAMES as POLICIES
from prefixcache.core.radix import VISIBLE, Node, subtree
from prefixcache.core.reasons import Refusal
from prefixcache.core.spec import DiskSpec, GpuSpec, Limits, PlannerConfig, PoolSpec
from prefixcache.core.table import HIGH, LOW, NORMAL
from tests.sim import audit
from tests.sim.disk import FakeDisk
from tests.sim.fakes import ROTTEN, Executor, Memory, SimError
from tests.sim.layouts import FLAVOURS, GRANULE, SPECS, STEPS, TOKENS, chain
from tests.sim.nonsense import Nonsense
from tests.sim.pins import Pins
from tests.sim.priorities import Priorities
from tests.sim.sharing import Sharing
from tests.sim.story import tell
from tests.sim.workers import Prompt, Reading, Worker, Writing

MOST_WORK = 20_000  # steps of what works on by itself; seeds take about a hundred at most
MOST_TURNS = 1_000  # of the planner's in a row, with nothing between them


class Simulator:
    """`run()` raises SimError or InvariantError if anything is wrong; `log` tells what happened."""

    def __init__(self, seed: int | random.Random, flavours: tuple[str, ...] = tuple(FLAVOURS)) -> None:
        self.rng = random.Random(seed) if isinstance(seed, int) else seed
        self.memory = Memory()
        self.memories: dict[int, Memory] = {HOST_POOL: self.memory}
        self.executor = Executor(self.memories, self.rng)
        self.now = 0.0
        self.history: list[tuple[float, Event, list[Command]]] = []
        self.dirty = True
        self.next_id = 0
        self.workers: list[Worker] = []
        self.visible: dict[int, set[bytes]] = {}
        self.on_disk_only: dict[int, set[bytes]] = {}  # of them, as published
        self.subtrees: list[Published] = []  # of this event: blocks that left with all below them
        self.copies: Counter[tuple[int, bytes]] = Counter()  # in GPU pools, as published: (namespace, key)
        self.sums: Counter[str] = Counter()
        self.waiting: dict[bytes, tuple[Worker, Prompt, AcquireRequested]] = {}
        self.has_more = False  # the planner waits to be resumed
        self.flavour = self.rng.choice(flavours)
        self.cleared: dict[int, set[bytes]] = {}  # keys that may not come back by themselves
        specs, self.rare_things = FLAVOURS[self.flavour]
        chosen = self.rng.sample(specs, min(len(specs), self.rng.choice((1, 2, 2, 3))))
        self.specs = {number: SPECS[number] for number in chosen}
        self.checksum = self.flavour == "restarts" or self.rng.random() < 0.3
        # Each seed has its own temper, or nothing would ever live long enough to be hit.
        self.trouble = self.rng.choice((0.05, 0.15, 0.5))
        self.diligence = self.rng.choice((0.2, 0.6, 0.9))
        self.slabs = self.rng.randint(2, 6 if "disk" not in self.flavour else 3)
        self.disk: FakeDisk | None = None
        self.leisure = 1.0  # how often the planner is resumed at the end of a step
        self.recovery: Iterator[list[Event]] | None = None
        self.pace, self.limits = (0, 1, 3, 6), (None, None, None, 2)
        if "disk" in self.flavour:
            self.disk = FakeDisk(self.memory, self.rng)
            self.leisure = self.rng.choice((0.2, 0.9, 1.0))
            self.trouble, self.diligence = self.rng.choice((0.15, 0.5)), self.rng.choice((0.6, 0.9))
            if self.flavour in ("disk_moves", "disk_windows"):
                self.disk.haste = 0.0
            if self.flavour == "disk_windows":  # several loads at once, of prefixes that need other windows
                self.pace, self.limits = (0, 0, 1, 2), (None, 1, 2, 3)
                self.slabs = self.rng.randint(3, 7)
        self.gpu_slabs = [self.rng.randint(1, 2) for _ in range(self.rng.choice((1, 1, 2)))] if self.is_gpu else []
        if self.flavour == "gpu_cuts":
            self.gpu_slabs = [1]
        self.memories |= {pool: Memory() for pool in range(1, len(self.gpu_slabs) + 1)}
        if self.is_gpu:
            self.trouble, self.diligence = self.rng.choice((0.05, 0.15)) if self.flavour != "gpu_cuts" else 0.4, 0.9
            self.slabs = self.rng.randint(3, 8)
        self.pins = Pins(self)
        self.priorities = Priorities(self)
        self.sharing = Sharing(self)
        self.pin_share = self.rng.choice((0.0, 0.5, 0.75, 0.75)) if self.flavour != "gpu_cuts" else 0.0
        self.config = self._config(1)
        self.planner = self._new_planner()
        self.nonsense = Nonsense(self)
        self._open_namespaces()
        if self.disk is not None:
            self.send(DiskChanged(True, True))
            self.send(RecoveryDone())

    @property
    def is_gpu(self) -> bool:
        return "gpu" in self.flavour

    @property
    def log(self) -> list[str]:
        """What happened, a line per event and command."""
        return tell(self.history)

    def run(self, steps: int = STEPS) -> None:
        for _ in range(steps * (3 if self.disk is not None else 2 if self.is_gpu else 1)):
            self.step()
        self.finish()

    def step(self) -> None:
        choice = self.rng.random()
        if choice < 0.04:
            self.pins.act()
        elif choice < 0.66:
            self.act()
        elif choice < 0.85:
            self.executes()
            for _ in range(self.rng.choice(self.pace) if self.disk is not None else 0):
                self.disk_works()
        elif self.disk is not None and self.rng.random() < 0.3:
            self.flush()
        elif self.rng.random() < self.trouble:
            self.rng.choice((self.rare, self.passes, self.talk_nonsense))()
        else:
            self.rng.choice((self.look_up, self.act))()
        if self.disk is not None and self.rng.random() < self.disk.haste:
            self.disk_works()
        if self.has_more and self.rng.random() < self.leisure:
            self.resume()
        self.check()

    def finish(self) -> None:
        """Everybody goes; then nothing may be left over, once what is under way has ended."""
        while self.recovery is not None:
            self.recovers()
        self.settle()
        for worker in self.workers:
            self.send(ProcessExited(worker.session))
        self.workers.clear()
        if self.sharing.tickets:
            self.now += 10.0  # writers that never came are waited for
        self.send(TimePassed())
        self.check()
        self.settle()  # time that passes may begin writes, loads and moves, also when nobody is there
        self.check()
        state = self.planner.state
        outlived = [state.leases, state.reservations, state.sessions, state.promoting]
        if any(outlived) or self.planner.mover.held_slots().size:
            raise SimError("something outlived everybody")
        if state.stats.tokens.pending or self.waiting:
            raise SimError("somebody still waits")
        self.send(ClearRequested())
        self.settle()
        self.check()
        if any(pool.used_bytes for pool in state.pools.values()):
            raise SimError("slots leaked")

    def settle(self) -> None:
        """What is under way ends, and what is begun because it ended."""
        turns = 0
        for _ in range(MOST_WORK):
            if self.disk is not None and (self.disk.jobs or self.disk.ordered or self.disk.told_late):
                self.disk_works()
            elif self.executor.jobs:
                self.executes()
            elif self.has_more:
                turns += 1
                if turns > MOST_TURNS:
                    break
                self.resume()
                continue
            else:
                return
            turns = 0
        raise SimError("work never ends")

    # -- one step ------------------------------------------------------------------------------------------------

    def act(self) -> None:
        """Some worker does something."""
        alive = [worker for worker in self.workers if not worker.dead]
        if not alive or (len(alive) < 3 and self.rng.random() < 0.1):
            self.open_session()
            return
        worker = self.rng.choice(alive)
        choices: list[Callable[[Worker], None]] = []
        if not worker.gone:
            choices += [self.acquire, self.acquire, self.reserve, self.reserve]
            if self.flavour == "shared":
                choices += [self.sharing.act] * 6
            if self.disk is not None or self.is_gpu:
                choices += [self.acquire] * 2
        if worker.readings:
            choices += [self.read, self.read]
            if self.disk is not None or self.is_gpu:
                choices += [self.read] * 4
        if worker.writings:
            choices += [self.write] * 6
        if choices:
            self.rng.choice(choices)(worker)

    def resume(self) -> None:
        """Nobody waits for an answer just now: the planner goes on with what could wait."""
        self.has_more = False
        self.send(WorkResumed())
        self.check()

    def executes(self) -> None:
        event = self.executor.step()
        if event is not None:
            self.send(event)

    def disk_works(self) -> None:
        """The disk does something, and the planner hears of it, maybe later, in the order in which it happened."""
        disk = self.disk
        assert disk is not None
        if self.recovery is not None and self.rng.random() < 0.3:
            self.recovers()
        event = disk.step()
        if event is not None:
            disk.told_late.append(event)
        while disk.told_late and self.rng.random() < 0.7:
            self.send(disk.told_late.pop(0))

    def recovers(self) -> None:
        """One more segment of an earlier run is read."""
        assert self.recovery is not None
        told = next(self.recovery, None)
        if told is not None:
            for event in told:
                self.send(event)
            return
        self.recovery = None
        assert self.disk is not None
        self.send(RecoveryDone(room_bytes=self.disk.room_bytes()))

    def disk_trouble(self) -> None:
        assert self.disk is not None
        if self.rng.random() < 0.3:
            self.disk.rot()
        else:
            self.send(self.disk.toggle())

    def replace_disk(self) -> None:
        """Another directory is in the place of ours: an empty one, or a copy that nobody has open."""
        disk = self.disk
        assert disk is not None
        disk.reads_on = disk.writes_on = False
        self.send(DiskChanged(False, False, "directory_gone"))
        for _ in range(MOST_WORK):
            if not (disk.jobs or disk.ordered or disk.told_late):
                break
            if (event := disk.step()) is not None:
                disk.told_late.append(event)
            while disk.told_late:
                self.send(disk.told_late.pop(0))
        for number in list(self.planner.state.disk.segments):
            if self.rng.random() < 0.5:
                self.send(SegmentLost(number))
        disk.replace()
        self.send(DiskForgotten())
        if any(space.table.recorded_count for space in self.planner.state.namespaces.values() if space.on_disk):
            raise SimError("a record of another directory is believed")
        self.send(DiskChanged(True, True))
        self.recovery = disk.recovered()
        self.recover_alone(anew=False)

    def flush(self) -> None:
        self.send(FlushStarted())
        while self.has_more and self.rng.random() < 0.9:  # mostly there is time for it
            self.resume()

    def passes(self) -> None:
        self.now += self.rng.choice((0.1, 0.5, 1.0, 3.0))
        if self.rng.random() < 0.7:
            self.send(TimePassed())

    def rare(self) -> None:
        getattr(self, self.rng.choice(self.rare_things))()

    def clear(self) -> None:
        number = self.rng.choice(list(self.specs))
        prompt = self.prompt(number)
        keys = self.rng.choice((None, prompt.keys, prompt.keys))
        before = {space: set(visible) for space, visible in self.visible.items()}
        event = ClearRequested(self.rng.choice((None, number)) if keys is None else number, keys)
        if keys is not None and self.rng.random() < 0.6:
            event.own_tail, event.gently = self.rng.random() < 0.5, self.rng.random() < 0.7
        replies = self.send(event)
        self.pins.check_eviction(event, replies, before)
        named = self._named(event, replies)
        for space, visible in self.visible.items():
            gone = before[space] - visible
            if space == number and self.disk is not None:
                gone |= named
            if self.disk is not None and keys is None and event.namespace in (None, space):
                gone |= self.disk.keys_of(space)  # also what was not told yet
            self.cleared.setdefault(space, set()).update(gone)

    def _named(self, event: ClearRequested, replies: list[Command]) -> set[bytes]:
        """Keys that a clear named, whether anybody knew of them or not."""
        if event.keys is None or event.own_tail or not any(isinstance(reply, Cleared) for reply in replies):
            return set()
        keys = [event.keys[at : at + KEY_BYTES] for at in range(0, len(event.keys), KEY_BYTES)]
        assert event.namespace is not None
        return set(keys if self.specs[event.namespace].kind is NamespaceKind.FOREIGN else keys[-1:])

    def cut(self) -> None:
        """The end of what somebody reads is cleared."""
        readings = [each for worker in self.workers for each in worker.readings.values() if each.ready > 1]
        if readings:
            reading = self.rng.choice(readings)
            end = reading.reply.from_block + self.rng.randint(2, reading.ready)
            self.send(ClearRequested(reading.prompt.namespace, reading.prompt.keys[: end * KEY_BYTES]))

    def faulted_in(self) -> None:
        self.send(CapacityReady(HOST_POOL, self.rng.randint(0, self.slabs * 4) * GRANULE))

    def talk_nonsense(self) -> None:
        """What no good client sends, and what good clients send twice."""
        self.nonsense.send_some()

    # -- sessions ------------------------------------------------------------------------------------------------

    def open_session(self) -> None:
        gpus = tuple(pool for pool in self.memories if pool != HOST_POOL and self.rng.random() < 0.7)
        worker = Worker(self.new_id(), self.rng.random() < 0.75, gpus)
        self.workers.append(worker)
        self.send(SessionOpened(worker.session, worker.can_map, gpu_pools=worker.gpus))

    def session_trouble(self) -> None:
        """TTL over while it lives on, killed without a word, or its exit noticed."""
        if not self.workers:
            return
        worker = self.rng.choice(self.workers)
        choice = self.rng.random()
        if choice < 0.4 and not worker.gone:
            worker.gone = True
            self.send(SessionEnded(worker.session))
        elif choice < 0.7:
            worker.dead = True
        if worker.dead and self.rng.random() < 0.5:
            worker.gone = True
            self.workers.remove(worker)
            self.send(ProcessExited(worker.session))

    # -- reading -------------------------------------------------------------------------------------------------

    def acquire(self, worker: Worker, prompt: Prompt | None = None) -> None:
        again = prompt is None and self.flavour == "disk_windows"  # two want the same, to different lengths
        prompt = prompt or self.prompt()
        lease = self.new_id()
        from_block = self.rng.choice((0, 0, 0, self.rng.randint(0, prompt.blocks)))
        limit = self.rng.choice(self.limits)
        total = prompt.blocks * TOKENS + self.rng.randint(0, TOKENS - 1)
        event = AcquireRequested(
            worker.session, lease, prompt.namespace, prompt.keys, from_block, total, self.rng.choice((0.5, 5.0)), limit
        )
        if self.disk is not None:
            event.deadline_s = self.rng.choice((0.0, 1e-5, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0))
            event.recompute_s_per_token = self.rng.choice((0.0, 1e-6, 1.0, 1.0, 1.0, 1.0, 1.0))
        self.waiting[lease] = (worker, prompt, event)
        self.send(event)
        if again and self.rng.random() < 0.5:
            self.acquire(worker, prompt)

    def acquired(self, reply: Acquired) -> None:
        if reply.lease not in self.waiting:
            raise SimError("an Acquire was answered twice")
        worker, prompt, event = self.waiting.pop(reply.lease)
        self.sums["looked_up"] += event.prompt_tokens - event.from_block * TOKENS
        space = self.planner.state.namespaces[prompt.namespace]
        audit.check_planned(space, self.visible[prompt.namespace], prompt, event, reply)
        if any(run.pool not in (HOST_POOL, *worker.gpus) for run in reply.runs):
            raise SimError("a worker was told slots of a pool that it does not map")
        in_gpu = sum(len(run.slots) for run in reply.runs if run.pool != HOST_POOL and not run.part)
        if in_gpu * TOKENS != reply.tokens[Tier.GPU]:
            raise SimError("tokens are said to be in GPU memory and are not, or the reverse")
        if reply.planned_blocks:
            reading = Reading(prompt, reply)
            reading.copy(self.memories)
            reading.compare(self.memories)
            worker.readings[reply.lease] = Reading(prompt, reply)

    def read(self, worker: Worker) -> None:
        lease, reading = self.rng.choice(list(worker.readings.items()))
        choice = self.rng.random()
        if (self.disk is not None or self.is_gpu) and choice < 0.3:
            choice = 1.0  # leases that stay would keep everything in memory
        if choice < 0.4:
            reading.copy(self.memories)
        elif choice < 0.55:
            self.send(LeaseRenewed(worker.session, lease, 2.0))
        else:
            fine = reading.compare(self.memories)
            used = self.rng.choice((None, reading.reply.planned_blocks, 1)) if fine else 0
            whole = used is None and reading.ready == reading.reply.planned_blocks
            del worker.readings[lease]
            for reply in self.send(LeaseReleased(worker.session, lease, used)):
                if isinstance(reply, Released) and whole:
                    self.sums["from_disk"] += reading.reply.tokens[Tier.DISK]
                if isinstance(reply, Released):
                    read = reading.ready if used is None else min(used, reading.ready)
                    self.sums["from_gpu"] += min(read * TOKENS, reading.reply.tokens[Tier.GPU])

    def look_up(self) -> None:
        prompt = self.prompt()
        self.send(LookupRequested(prompt.namespace, prompt.keys))

    # -- writing -------------------------------------------------------------------------------------------------

    def reserve(self, worker: Worker) -> None:
        prompt = self.prompt()
        from_block = self.rng.choice((0, 0, 0, self.rng.randint(0, prompt.blocks)))
        mask = self.rng.choice(((1 << 64) - 1, (1 << 64) - 1, 0b011, 0b101, 0b110))
        ttl_s = self.rng.choice((1.0, 6.0))
        priority = self.rng.choice((LOW, NORMAL, NORMAL, HIGH))
        event = ReserveRequested(
            worker.session,
            self.new_id(),
            prompt.namespace,
            prompt.keys,
            from_block,
            ttl_s,
            prompt.parents,
            mask,
            priority,
        )
        replies = self.priorities.reserve(event)
        reply = next((each for each in replies if isinstance(each, Reserved)), None)
        if reply is None:
            return
        blocks = reply.blocks.tolist()
        if blocks != sorted(set(blocks)) or any(not from_block <= block < prompt.blocks for block in blocks):
            raise SimError("blocks granted that were not asked for")
        if len(blocks) + sum(reply.skipped.values()) != prompt.blocks - from_block:
            raise SimError("a block neither granted nor skipped with a reason")
        if blocks:
            writing = Writing(prompt, reply)
            writing.plan()
            worker.writings[event.reservation] = writing

    def write(self, worker: Worker) -> None:
        """One step of a writer. One that maps the pool does not look whether it still may; it cannot."""
        name, writing = self.rng.choice(list(worker.writings.items()))
        if self.now < writing.stopped_until:
            return
        if writing.over and not worker.can_map:
            del worker.writings[name]  # the daemon wrote for it, and knows
            return
        choice = self.rng.random()
        if self.rng.random() < self.diligence:
            for piece in list(writing.todo):
                writing.write(self.memory, piece)
            self.commit(worker, name, writing)
            return
        if writing.todo and choice < 0.75:
            for piece in self.rng.sample(writing.todo, min(len(writing.todo), self.rng.choice((1, 2, 99)))):
                writing.write(self.memory, piece)
        elif choice < 0.8:
            writing.stopped_until = self.now + self.rng.choice((1.0, 8.0))
        elif choice < 0.85:
            del worker.writings[name]
            self.send(AbortRequested(worker.session, name))
        else:
            self.commit(worker, name, writing)

    def commit(self, worker: Worker, name: bytes, writing: Writing) -> None:
        told = writing.done[writing.told :]
        by_layer = self.specs[writing.prompt.namespace].parts[0].layers > 0
        coverage = tuple(
            Coverage(
                int(writing.reply.blocks[entry]), 1, part, *((0, None) if by_layer else ()), heads.start, len(heads)
            )
            for entry, part, heads in told
        )
        more = bool(writing.todo) and self.rng.random() < 0.8
        whole = not writing.todo and self.rng.random() < 0.5 and not writing.shared
        event = CommitRequested(worker.session, name, None if whole else coverage, more=more)
        writing.told = len(writing.done)
        for reply in self.send(event):
            if isinstance(reply, Committed):
                if reply.open_blocks and not more and not writing.shared:
                    raise SimError("a commit ended with open blocks")
                if not more and writing.todo and reply.stored and not writing.shared:
                    raise SimError("a half-filled reservation was committed")
                if not more:
                    worker.writings.pop(name, None)
            elif isinstance(reply, Refused) and reply.reason is not Refusal.RESERVATION_INCOMPLETE and not more:
                worker.writings.pop(name, None)

    # -- rare things ---------------------------------------------------------------------------------------------

    def fail_part(self) -> None:
        """Somebody found wrong bytes (or thinks so)."""
        space = self.rng.choice(list(self.planner.state.namespaces.values()))
        nodes = [node for node in subtree(space.tree.root) if node.state == VISIBLE and node.count]
        if nodes:
            row = int(self.rng.choice(self.rng.choice(nodes).row_array().tolist()))
            part = self.rng.randrange(len(space.strides))
            generation = int(space.table.parts[part].generations[row])
            self.send(PartFailedVerification(space.number, part, row, generation))

    def lose_device(self) -> None:
        """Mostly while somebody reads from it."""
        read = {run.pool for worker in self.workers for each in worker.readings.values() for run in each.runs}
        read.discard(HOST_POOL)
        if read or self.rng.random() < 0.1:
            self.send(self.executor.lose(self.rng.choice(sorted(read) or list(self.memories)[1:])))

    def restart(self) -> None:
        """A clean drain, a snapshot, and a new planner over the same bytes, some of which rotted."""
        self.send(DrainStarted())
        for worker in self.workers:
            self.send(ProcessExited(worker.session))
        self.workers.clear()
        taken = next(each for each in self.send(SnapshotRequested()) if isinstance(each, SnapshotTaken))
        self._forget_gpus()
        self.waiting.clear()
        self.sums.clear()
        if self.disk is not None:  # its last writes come before memory rots
            self.disk.told_late.clear()
            self.disk.crash()
        for slot in list(self.memory.heads):
            if self.rng.random() < 0.1:
                self.memory.heads[slot][0] = ROTTEN
        self.config = self._config(int(taken.snapshot["generation"]))
        self._begin_anew()
        self.send(SnapshotRestored(taken.snapshot))
        self._open_namespaces()
        self.pins.restarted()
        if self.disk is not None:
            self.send(DiskChanged(True, True))
            self.recovery = self.disk.recovered()

    def crash(self) -> None:
        """Kill -9 of the daemon: memory is gone, workers start anew, the disk has what it has."""
        disk = self.disk
        assert disk is not None
        disk.told_late.clear()
        disk.crash()
        self.workers.clear()
        self._forget_gpus()
        self.waiting.clear()
        self.sums.clear()
        self.memory.heads.clear()
        self.config = self._config(self.planner.state.generation)
        self._begin_anew()
        self._open_namespaces()
        self.pins.restarted()
        self.send(DiskChanged(True, True))
        self.recovery = disk.recovered()
        if self.rng.random() < 0.5:
            self.recover_alone()
        elif self.rng.random() < 0.5:
            self.recovers()
            self.clear()

    def _begin_anew(self) -> None:
        """A planner that knows nothing: before its first event, so does who checks it."""
        self.planner = self._new_planner()
        self.has_more = False
        self.visible = {number: set() for number in self.specs}
        self.on_disk_only = {number: set() for number in self.specs}
        self.priorities.forget()
        self.pins.stopped()

    def recover_alone(self, *, anew: bool = True) -> None:
        """Nothing else happens meanwhile: what is whole comes back, and only that if all began anew."""
        assert self.disk is not None
        while self.recovery is not None:
            self.recovers()
        self.check()
        for space in self.planner.state.namespaces.values():
            if space.on_disk:
                expected = audit.restorable_keys(self.disk, space.number, space.spec)
                visible = self.visible[space.number]
                hidden = audit.hidden_keys(space) & expected  # being stored anew: it, and what follows it, comes later
                if visible != expected and (anew or not (hidden or expected <= visible)):
                    raise SimError("a restart brought back other blocks than those that are whole on disk")

    def _forget_gpus(self) -> None:
        """What the executor was at, and what was on a device, ends with the daemon."""
        self.executor.jobs.clear()
        self.copies.clear()
        for pool, memory in self.memories.items():
            if pool != HOST_POOL:
                memory.heads.clear()
                memory.lost = False

    # -- plumbing ------------------------------------------------------------------------------------------------

    def send(self, event: Event) -> list[Command]:
        """Hands an event to the planner and does what it answers."""
        self.dirty = True
        self.subtrees.clear()
        commands: list[Command] = []
        self.history.append((self.now, event, commands))
        before = {number: set(keys) for number, keys in self.visible.items()} if self.pins.live else {}
        self.pins.before(event)
        commands += self.planner.handle(event, self.now)
        replies = 0
        for command in commands:
            self._do(command)
            replies += isinstance(command, Reply)
        held = any(isinstance(command, VerifyParts) for command in commands)
        asked = type(event).__name__.endswith("Requested")
        if asked and replies + held < 1:
            raise SimError(f"no answer to {type(event).__name__}")
        self.pins.after(event, before)
        return commands

    def _do(self, command: Command) -> None:
        if isinstance(command, SetGenerations):
            self.executor.set_generations(command)
        elif isinstance(command, (CopySlots, PromoteSlots, ComputeChecksum, VerifyParts)):
            self.executor.begin(command)
        elif isinstance(command, (WriteRecords, ReadRecords, FreeSegment, CancelReads, RevokeRecords)):
            self._order_disk(command)
        elif isinstance(command, MoreToDo):
            if self.has_more:
                raise SimError("asked to be resumed twice")
            self.has_more = True
        elif isinstance(command, Arrived):
            for worker in self.workers:
                if command.lease in worker.readings:
                    worker.readings[command.lease].arrived(command)
        elif isinstance(command, Acquired):
            self.acquired(command)
        elif isinstance(command, Refused):
            self.waiting.pop(command.subject, None)
        elif isinstance(command, Published):
            self._publish(command)
        elif isinstance(command, Released):
            self.sums["hit"] += command.hit_tokens
        elif isinstance(command, PinEnded):
            self.pins.told(command)
        elif isinstance(command, LeaseEnded):
            for worker in self.workers:
                if command.lease in worker.readings:
                    worker.readings[command.lease].over = True
        elif isinstance(command, ReservationEnded):
            for worker in self.workers:
                if command.reservation in worker.writings:
                    worker.writings[command.reservation].over = True

    def _order_disk(self, command: Command) -> None:
        disk = self.disk
        assert disk is not None
        if isinstance(command, CancelReads):
            disk.cancel(command)
        elif isinstance(command, RevokeRecords):
            disk.revoke(command)
        elif isinstance(command, (WriteRecords, ReadRecords, FreeSegment)):
            disk.begin(command)

    def _new_planner(self) -> Planner:
        """One that says which blocks leave with all below them; all others are evictions."""
        planner = Planner(self.config)
        state, told = planner.state, planner.state.publish_subtree

        def tell(node: Node) -> None:
            before = len(state.news)
            told(node)
            self.subtrees += state.news[before:]

        state.publish_subtree = tell  # type: ignore[method-assign]  # a spy, as the news themselves do not say it
        return planner

    def _publish(self, event: Published) -> None:
        if event.tier is Tier.GPU:
            self._publish_copies(event)
            return
        visible, cold = self.visible[event.namespace], self.on_disk_only[event.namespace]
        keys = {event.keys[at : at + KEY_BYTES] for at in range(0, len(event.keys), KEY_BYTES)}
        if event.change is Change.STORED:
            if event.parent and event.parent not in visible and audit.has_full(self.specs[event.namespace]):
                raise SimError("stored below a parent that is not there")
            visible |= keys
            cold |= keys if event.tier is Tier.DISK else set()
            cleared = self.cleared.setdefault(event.namespace, set())
            if isinstance(self.history[-1][1], DiskRecovered):
                self.priorities.recovered(event.namespace, keys)
            if isinstance(self.history[-1][1], DiskRecovered) and keys & cleared:
                raise SimError("what was cleared came back from disk")
            cleared -= keys
        elif event.change is Change.REMOVED:
            if not keys <= visible or (keys & cold != keys if event.tier is Tier.DISK else keys & cold):
                raise SimError("removed what was not there, or not in that tier")
            lost = isinstance(self.history[-1][1], (SegmentLost, DiskForgotten))  # pins do not keep a disk
            if not lost and not any(event is each for each in self.subtrees):
                self.pins.removed(event.namespace, keys)
            visible -= keys
            cold -= keys
        elif event.change is Change.MOVED:
            if not keys <= visible or (keys & cold if event.tier is Tier.DISK else keys & cold != keys):
                raise SimError("moved what was not there, or was there already")
            if event.tier is Tier.DISK:
                cold |= keys
            else:
                cold -= keys
        else:
            visible.clear()
            cold.clear()

    def _publish_copies(self, event: Published) -> None:
        change = {Change.STORED: 1, Change.REMOVED: -1}[event.change]
        for at in range(0, len(event.keys), KEY_BYTES):
            self.copies[event.namespace, event.keys[at : at + KEY_BYTES]] += change

    def _check_copies(self) -> None:
        found: Counter[tuple[int, bytes]] = Counter()
        for pool, tier in self.planner.state.gpus.items():
            found += audit.check_copies(tier, self.memories[pool])
        if found != +self.copies or min(self.copies.values(), default=0) < 0:
            raise SimError("published events and copies differ")
        if self.planner.state.stats.tokens.hit[Tier.GPU] != self.sums["from_gpu"]:
            raise SimError("hits from GPU memory are counted for another tier")

    def check(self) -> None:
        """Everything, if anything happened to the planner or to memory."""
        if not self.dirty and not any(memory.dirty for memory in self.memories.values()):
            return
        if self.dirty:
            invariants.check(self.planner)
        self.dirty = False
        for memory in self.memories.values():
            memory.dirty = False
        state = self.planner.state
        for space in state.namespaces.values():
            audit.check_bytes(space, self.memory)
            if space.on_disk and self.disk is not None:
                audit.check_records(space, self.disk)
            if audit.stored_keys(space) != self.visible[space.number]:
                raise SimError("published events and tree differ")
            if audit.cold_keys(space) != self.on_disk_only[space.number]:
                raise SimError("published events and tiers differ")
        self._check_copies()
        self.pins.check()
        self.priorities.check()
        tokens = state.stats.tokens
        if tokens.looked_up != self.sums["looked_up"] or sum(tokens.hit) != self.sums["hit"]:
            raise SimError("the planner's sums are not those of its answers")
        if tokens.hit[Tier.DISK] < self.sums["from_disk"]:
            raise SimError("hits from disk are counted for another tier")

    def prompt(self, namespace: int | None = None) -> Prompt:
        number = self.rng.choice(list(self.specs)) if namespace is None else namespace
        letters = "".join(self.rng.choice("aaaaab") for _ in range(self.rng.choice((1, 2, 3, 4, 4, 4, 6))))
        if (self.disk is not None or self.is_gpu) and self.rng.random() < 0.8:
            # A few long prompts again and again: together more than memory holds, so that they come and go.
            letters = self.rng.choice(("aaaa", "aabb", "abab", "bbbb", "baba", "ccaa", "cccc"))
        keys = chain(letters)
        parents = None
        if self.specs[number].kind is NamespaceKind.FOREIGN and self.rng.random() < 0.7:
            parents = bytes(KEY_BYTES) + keys[:-KEY_BYTES]
        return Prompt(number, keys, parents)

    def new_id(self) -> bytes:
        self.next_id += 1
        return self.next_id.to_bytes(16, "big")

    def _config(self, generation: int) -> PlannerConfig:
        size = self.slabs * 4 * GRANULE - self.rng.choice((0, 0, GRANULE))
        if hasattr(self, "config"):
            size = self.config.pools[0].size_bytes
        ready = None if hasattr(self, "config") else self.rng.choice((None, None, size // GRANULE // 2 * GRANULE))
        limits = Limits(recent_ends=4, max_bare_blocks=24, max_parked=2)
        pool = PoolSpec(size, 4 * GRANULE)
        spec = None
        if self.disk is not None:
            share, jobs = self.rng.choice((0.1, 0.3, 0.6)), self.rng.choice((1, 4)) * GRANULE
            spec = DiskSpec(self.disk.segment_bytes, share, jobs, 8 * GRANULE, 16 * GRANULE)
        gpus = [
            PoolSpec(slabs * 4 * GRANULE, 4 * GRANULE, number, Tier.GPU)
            for number, slabs in enumerate(self.gpu_slabs, 1)
        ]
        policy = self.config.policy if hasattr(self, "config") else self.rng.choice(POLICIES) if self.is_gpu else "lru"
        gpu = GpuSpec(self.rng.choice((6, 16)) * GRANULE, self.rng.choice((2, 16)) * GRANULE)
        return PlannerConfig(
            (pool, *gpus), generation, ready, publish=True, checksum=self.checksum, disk=spec, gpu=gpu,
            policy=policy, limits=limits, pin_bytes=int(size * self.pin_share), priority_fades_s=2.0,
        )  # fmt: skip

    def _open_namespaces(self) -> None:
        for number, spec in self.specs.items():
            self.visible.setdefault(number, set())
            self.on_disk_only.setdefault(number, set())
            self.send(NamespaceOpened(number, number.to_bytes(32, "big"), spec))
