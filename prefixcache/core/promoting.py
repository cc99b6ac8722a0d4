"""The GPU tier: hot prefixes are copied up, and leases of workers that map the pool are told the copies.

Rules: what was hit twice is copied, parents before children, within a bound on the bytes under way; nobody waits for
it and nothing queues: what found no room or no turn is looked at again with its next hit. Where the pool is full and
most of what leaves it was never read there, only few go up. The host blocks are pinned
while they are copied. A slot gets its generation before its copy begins and is named only after its copy is done. A
copy whose block left meanwhile, or whose parent has none any more, is dropped. A device that is lost turns its tier
off: every slot anybody was told of gets a generation nobody was told, so leases over it become misses.
Must not know: how a copy is kept and dropped (gpu), how bytes move.
"""

from __future__ import annotations

import numpy as np

from prefixcache.core.commands import Acquired, Command, PartCopy, PromoteSlots, Run, SetGenerations
from prefixcache.core.events import AcquireRequested, DeviceLost, PromotionDone
from prefixcache.core.gpu import Copies, GpuTier, Use
from prefixcache.core.ids import KEY_BYTES, NO_SLOT, Rows, Slots
from prefixcache.core.leases import Lease, attached_path
from prefixcache.core.namespaces import Namespace
from prefixcache.core.radix import ROW_DTYPE, VISIBLE, Path, Pin, node_at, pin_path
from prefixcache.core.reasons import CopyDrop, Kind, PromotionSkip, Refusal
from prefixcache.core.removal import Remover
from prefixcache.core.spec import GpuSpec
from prefixcache.core.state import Session, State

HIT_OFTEN = 0b11  # two leases ended over it


class Promotion:
    """One PromoteSlots under way: rows of a path from its block `first` on. keys: of the path up to their end."""

    __slots__ = ("copies", "first", "generation", "keys", "near_pins", "pins", "rows", "serial", "size_bytes", "slots",
                 "tier")  # fmt: skip

    def __init__(self, tier: GpuTier, copies: Copies, path: tuple[int, bytes, Rows], slots: dict[int, Slots]) -> None:
        self.tier = tier
        self.copies = copies
        self.first, self.keys, self.rows = path
        self.slots = slots
        self.generation = 0
        self.serial = 0
        self.size_bytes = len(self.rows) * sum(copies.space.strides)
        self.pins: list[Pin] = []
        self.near_pins: list[Pin] = []

    def held_slots(self) -> Slots:
        return np.concatenate(list(self.slots.values()))


class Promoter:
    """See the module's rules."""

    def __init__(self, state: State, remover: Remover, spec: GpuSpec) -> None:
        self.state = state
        self.remover = remover
        self.spec = spec
        self.jobs: dict[int, Promotion] = {}
        self._next_copy = 1

    # -- leases ------------------------------------------------------------------------------------------------------

    def promise(self, session: Session, space: Namespace, event: AcquireRequested, reply: Acquired) -> None:
        """Replaces the front of the answer's runs by copies in a pool that the session maps, and pins them."""
        first, end = event.from_block, event.from_block + reply.ready_blocks
        best: tuple[GpuTier, Copies, Path] | None = None
        for tier in session.gpus:
            copies = tier.copies.get(space.number)
            if copies is not None and copies.blocks:
                path = copies.tree.walk(event.keys)
                if path.blocks > (best[2].blocks if best is not None else first):
                    best = tier, copies, path
        if best is None or not reply.ready_blocks:
            return
        tier, copies, path = best
        end = min(end, path.blocks)
        wanted = path.stretches(first, end)
        for piece in wanted:
            copies.read[piece] = True
        near = [_run(copies, part, wanted, first, tier.pool) for part in range(len(space.strides))]
        far = [_behind(run, end) for run in reply.runs if run.first_block + len(run.packed_slots) // 4 > end]
        reply.runs = (*near, *far)
        _, host, disk, peer = reply.tokens
        tokens = (end - first) * space.block_tokens
        reply.tokens = (tokens, host - tokens, disk, peer)
        use = tier.leases[event.lease] = Use(self.state.next_serial())
        pin_path(node_at(path, end), end, use.pins)
        policy = tier.policy_of(space)
        if policy.remembers:
            policy.used(space, np.frombuffer(path.packed_rows(), ROW_DTYPE)[:end])

    def lease_ended(self, lease: Lease, session: Session, out: list[Command], *, used: bool) -> None:
        """Gives pins back; what its worker used may be worth a copy now."""
        for tier in session.gpus:
            tier.end_lease(lease.lease, self.state.tick)
        if not used:
            return
        if not lease.space.copies:
            self._skip(PromotionSkip.LAYOUT, lease.reply.planned_blocks)
            return
        path = _in_sight(lease.pins)
        if path.blocks:
            for tier in session.gpus:
                self._consider(tier, lease.space, path, out)

    def _consider(self, tier: GpuTier, space: Namespace, path: Path, out: list[Command]) -> None:
        copies = tier.copies[space.number]
        last = path.nodes[-1]
        if copies.holds(int(last.row_array()[path.blocks - last.start - 1])):
            return  # parents are here as well
        rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)
        good = space.table.hits[rows] >= HIT_OFTEN
        if space.cold_blocks:
            good &= space.table.parts[0].slots[rows] != NO_SLOT
        good &= space.table.is_trusted(rows)
        end = len(rows) if good.all() else int(np.argmin(good))
        held = copies.held(rows[:end])
        first = end if held.all() else int(np.argmin(held))
        if first == end or int(rows[first]) in copies.moving:
            return
        if tier.reason:
            self._skip(PromotionSkip.TIER_OFF, end - first)
            return
        if tier.holds_back(space, end - first):
            self._skip(PromotionSkip.THRASHING, end - first)
            return
        room = max(min(self.spec.moving_bytes - tier.moving_bytes, self.spec.job_bytes), 0) // sum(space.strides)
        count = min(end - first, room if tier.moving_bytes else max(room, 1))
        if count < end - first:
            self._skip(PromotionSkip.BUSY, end - first - count)
        if count:
            self._begin(tier, copies, path, (first, first + count), out)

    # -- copies ------------------------------------------------------------------------------------------------------

    def _begin(
        self, tier: GpuTier, copies: Copies, path: Path, span: tuple[int, int], out: list[Command]
    ) -> None:  # fmt: skip
        state, space = self.state, copies.space
        first, end = span
        keys = b"".join([node.edge for node in path.nodes])[: end * KEY_BYTES]
        rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)[first:end]
        pins: list[Pin] = []
        near_pins: list[Pin] = []
        self.remover.pin(node_at(path, end), end, pins)
        if first:
            near = copies.tree.walk(keys[: first * KEY_BYTES])
            pin_path(node_at(near, first), first, near_pins)
        slots = tier.allocate(space, end - first)
        got = len(slots[0])
        if got < end - first:
            self._skip(PromotionSkip.NO_ROOM, end - first - got)
        if not got:
            self.remover.unpin_all(pins)
            tier.unpin_all(near_pins)
            return
        job = Promotion(tier, copies, (first, keys[: (first + got) * KEY_BYTES], rows[:got].astype(np.uint32)), slots)
        _hand_over(pins, job.pins)
        _hand_over(near_pins, job.near_pins)
        job.generation, job.serial = state.next_generation(), state.next_serial()
        copy = self._next_copy
        self._next_copy += 1
        self.jobs[copy] = job
        state.promoting[copy] = job.serial
        tier.moving_bytes += job.size_bytes
        copies.moving.update(job.rows.tolist())
        parts = tuple(
            PartCopy(space.table.parts[part].slots[job.rows], slots[part], space.spec.parts[part].size_bytes)
            for part in range(len(space.strides))
        )
        out.append(SetGenerations(tier.pool, job.held_slots(), job.generation))
        out.append(PromoteSlots(copy, state.host_pool, tier.pool, parts))

    def done(self, event: PromotionDone, out: list[Command]) -> None:
        """A copy ended: what is still worth its slots is here from now on."""
        job = self.jobs.pop(event.copy, None)
        if job is None:
            text = f"no promotion {event.copy} is under way"
            self.state.refuse(out, Kind.NOT_FOUND, Refusal.COPY_UNKNOWN, text)
            return
        tier = job.tier
        del self.state.promoting[event.copy]
        tier.moving_bytes -= job.size_bytes
        job.copies.moving.difference_update(job.rows.tolist())
        placed = 0
        if not event.ok:
            self._skip(PromotionSkip.COPY_FAILED, len(job.rows))
        else:
            placed = self._attach(job)
            if placed < len(job.rows):
                self._skip(PromotionSkip.STALE, len(job.rows) - placed)
        for slots in job.slots.values():
            tier.slots.release(slots[placed:])
        self.remover.unpin_all(job.pins)
        tier.unpin_all(job.near_pins)
        self.remover.mover.settle_retired()

    def _attach(self, job: Promotion) -> int:
        """How many blocks of a copy that came are here now."""
        tier, copies = job.tier, job.copies
        path = _in_sight(job.pins)
        end = min(path.blocks, job.first + len(job.rows))
        if tier.reason or end <= job.first:
            return 0
        near = copies.tree.walk(job.keys)
        assert near.blocks == job.first  # its parent is pinned, and only one promotion has a row at a time
        count = end - job.first
        rows = job.rows[:count]
        copies.place(rows, {part: slots[:count] for part, slots in job.slots.items()}, job.generation)
        tier.attach(copies, near, job.keys[job.first * KEY_BYTES : end * KEY_BYTES], rows)
        tier.promoted += count
        return count

    def lost(self, event: DeviceLost, out: list[Command]) -> None:
        """The device is gone for good, as far as this daemon is concerned."""
        tier = self.state.gpus.get(event.pool)
        if tier is None:
            self.state.refuse(out, Kind.NOT_FOUND, Refusal.ARGUMENT_INVALID, f"no GPU pool {event.pool}")
            return
        if tier.reason:
            return
        tier.reason = event.reason or "lost"
        told = tier.known_slots()
        if len(told):
            out.append(SetGenerations(tier.pool, told, self.state.next_generation()))
        tier.drop_all(CopyDrop.TIER_OFF)

    def _skip(self, reason: PromotionSkip, blocks: int) -> None:
        self.state.stats.promotions_skipped[reason] += blocks


def _in_sight(pins: list[Pin]) -> Path:
    """What of a pinned path was not cleared."""
    path = attached_path(pins)
    return path if path.nodes and path.nodes[0].state == VISIBLE else Path([], 0)


def _run(copies: Copies, part: int, wanted: list[slice | Rows], first: int, pool: int) -> Run:
    pieces = [copies.columns[part].packed(piece) for piece in wanted]
    return Run(part, first, pool, b"".join([slots for slots, _ in pieces]), b"".join([held for _, held in pieces]))


def _behind(run: Run, end: int) -> Run:
    """What of a run lies behind block `end`."""
    skip = max(end - run.first_block, 0)
    return Run(run.part, run.first_block + skip, run.pool, run.packed_slots[4 * skip :],
               run.packed_generations[8 * skip :])  # fmt: skip


def _hand_over(pins: list[Pin], holder: list[Pin]) -> None:
    for pin in pins:
        pin.holder = holder
    holder += pins
