"""Acquire, Renew, Release, Lookup: what is there, promised for a while.

Rules: a lookup changes nothing in the tree's shape. Tokens of a lease are pending until it ends, once. What is promised
is pinned before anything else happens. Leased blocks count as used when the lease ends: no policy may take them
before, and the request that waits for the answer does not pay for it. Must not know: how blocks came in or where slots
come from.
"""

from __future__ import annotations

import numpy as np

from prefixcache.core.checks import Checks
from prefixcache.core.commands import Acquired, Command, LeaseEnded, LeaseExtended, LookedUp, Released, Run
from prefixcache.core.demoting import Demoter
from prefixcache.core.events import AcquireRequested, LeaseReleased, LeaseRenewed, LookupRequested
from prefixcache.core.foreign_leases import ForeignAcquiring, begin_lease, look_up_foreign, rows_of
from prefixcache.core.ids import KEY_BYTES, Tier
from prefixcache.core.leases import Lease
from prefixcache.core.loading import Loader
from prefixcache.core.loads import Wish
from prefixcache.core.namespaces import Namespace
from prefixcache.core.promoting import Promoter
from prefixcache.core.radix import DETACHED, ROW_DTYPE, Path, Pin, hot_from, node_at, path_to
from prefixcache.core.reasons import Kind, Miss, Refusal
from prefixcache.core.removal import Remover
from prefixcache.core.runs import read_run
from prefixcache.core.slabs import SlabMover
from prefixcache.core.state import Session, State
from prefixcache.core.survey import Survey

# Members of an enum are looked up by a Python call each time (Python 3.11): what every call needs is kept here.
_GPU = int(Tier.GPU)
_HOST = int(Tier.HOST)
_DISK = int(Tier.DISK)


class Acquiring:
    """Handlers of the lease events."""

    def __init__(self, state: State, remover: Remover, mover: SlabMover, checks: Checks) -> None:
        self.state = state
        self.loader: Loader | None = None  # where there is a disk
        self.demoter: Demoter | None = None
        self.promoter: Promoter | None = None  # where there is a GPU pool
        self.checks = checks
        self.foreign = ForeignAcquiring(state, checks, remover)
        self.remover = remover
        self.mover = mover

    def acquire(self, event: AcquireRequested, now: float, out: list[Command]) -> None:
        admitted = self._admitted(event, out)
        if admitted is None:
            return
        session, space = admitted
        if space.foreign is not None:
            self.foreign.acquire(event, session, space, now, out)
            return
        state = self.state
        lease_id = event.lease
        path = space.tree.walk(event.keys)
        from_block = event.from_block
        limit = path.blocks if event.max_blocks is None else min(path.blocks, from_block + event.max_blocks)
        end, wish = limit, None
        if space.optional_parts or space.table.unverified:
            end = self._restorable(event, space, path, limit, out)
            if end < 0:
                return
        _remember(space, path)
        if space.may_lack_slots:
            path, end, wish = self._plan_loads(event, space, path, end, now, out)
            limit = min(limit, path.blocks)  # room for the loads may have been made from the rest of the path
        key_blocks = len(event.keys) // KEY_BYTES
        state.stats.acquires += 1
        tokens, total = space.block_tokens, event.prompt_tokens
        space.tokens.look_up(total - from_block * tokens, total - key_blocks * tokens)
        stop = self._count_misses(space, path, event, (end, limit), wish)
        if end <= from_block:
            self.touch(space, path)
            out.append(Acquired(lease_id, from_block, 0, 0, (), stop, (0, 0, 0, 0), now))
            return
        if end < path.blocks:
            self.touch(space, path)  # no lease holds all of it
        reply = self._promise(event, admitted, path, end, wish)
        reply.stop, reply.expires_at = stop, now + state.clipped_ttl(event.ttl_s)
        lease = Lease(lease_id, event.session, space, reply)
        self.remover.pin(node_at(path, end), end, lease.pins)
        begin_lease(state, session, lease, out)
        if wish is not None:
            wish.give(lease)

    def _restorable(self, event: AcquireRequested, space: Namespace, path: Path, limit: int, out: list[Command]) -> int:
        """How many blocks can be restored; -1 where that is answered later, as bytes must be verified first."""
        rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)
        end = space.restorable(rows, event.from_block, limit)
        if space.table.unverified and self.checks.hold(event, space, rows[event.from_block : end], out):
            return -1
        return end

    def _plan_loads(
        self, event: AcquireRequested, space: Namespace, path: Path, end: int, now: float, out: list[Command]
    ) -> tuple[Path, int, Wish | None]:  # fmt: skip
        """Some blocks are on disk only: what of the path can be promised, with the loads for it begun. The path is
        another one after that."""
        if end <= event.from_block or self.loader is None or self.demoter is None:
            return path, end, None
        wish = self.loader.plan(event, space, path, end, now, out)
        if wish.loads:
            self.demoter.refill(now, out)
        return space.tree.walk(event.keys), wish.end, wish

    def _promise(
        self, event: AcquireRequested, who: tuple[Session, Namespace], path: Path, end: int, wish: Wish | None
    ) -> Acquired:
        """The answer but for stop and time. Where blocks still have to come, what is ready ends at the first."""
        session, space = who
        first = event.from_block
        tokens = space.block_tokens
        planned = end - first
        if wish is None or wish.cold is None:
            runs = self._runs(space, path, (first, end), end)
            reply = Acquired(event.lease, first, planned, planned, runs, None, (0, planned * tokens, 0, 0), 0.0)
        else:
            ready = int(np.argmax(wish.cold))
            on_disk = int(np.count_nonzero(wish.cold)) * tokens
            runs = self._runs(space, path, (first, first + ready), end) if ready else ()
            by_tier = (0, planned * tokens - on_disk, on_disk, 0)
            reply = Acquired(event.lease, first, planned, ready, runs, None, by_tier, 0.0, eta_s=wish.eta_s)
        if session.gpus and self.promoter is not None:
            self.promoter.promise(session, space, event, reply)
        return reply

    def lookup(self, event: LookupRequested, out: list[Command]) -> None:
        state = self.state
        space = state.known_namespace(event.namespace, out)
        if space is None or not state.good_keys(event.keys, event.from_block, out):
            return
        state.stats.lookups += 1
        if space.foreign is not None:
            reads_on = state.disk.reads_on
            out.append(look_up_foreign(space.foreign, event, space.block_tokens, reads_on=reads_on))
            return
        path = space.tree.walk(event.keys)
        end = path.blocks
        on_disk = 0
        gap = Miss.GROUP_GAP
        if space.may_lack_slots:
            end, on_disk, gap = self._look_below(space, path, event.from_block)
        elif space.optional_parts:
            end = space.restorable(np.frombuffer(path.packed_rows(), ROW_DTYPE), event.from_block, end)
        stop = None
        if end * KEY_BYTES < len(event.keys):
            stop = gap if end < path.blocks else self._stop_behind(space, path, event.keys)
        in_memory = max(0, end - event.from_block) - on_disk
        tokens = (0, in_memory * space.block_tokens, on_disk * space.block_tokens, 0)
        load_s = self.loader.load_s(on_disk * space.block_bytes) if on_disk and self.loader is not None else 0.0
        out.append(LookedUp(end, tokens, stop, load_s=load_s))

    def _look_below(self, space: Namespace, path: Path, from_block: int) -> tuple[int, int, Miss]:
        """(blocks that could be had, those of them from `from_block` on that are on disk, why there are not more)."""
        if path.blocks <= from_block:
            return path.blocks, 0, Miss.GROUP_GAP
        survey = Survey(space, np.frombuffer(path.packed_rows(), ROW_DTYPE), from_block)
        end = survey.longest(survey.stored)
        base = survey.longest(survey.in_memory)
        if not self.state.disk.reads_on and base < end:
            return base, 0, Miss.TIER_OFF
        return end, int(np.count_nonzero(survey.lacks(end))), Miss.GROUP_GAP

    def renew(self, event: LeaseRenewed, now: float, out: list[Command]) -> None:
        lease = self._own_lease(event.session, event.lease, out)
        if lease is not None:
            # Never shortened: the heap of deadlines only follows deadlines that move away.
            lease.deadline = max(lease.deadline, now + self.state.clipped_ttl(event.ttl_s))
            out.append(LeaseExtended(lease.lease, lease.deadline))

    def release(self, event: LeaseReleased, out: list[Command]) -> None:
        lease = self._own_lease(event.session, event.lease, out)
        if lease is None:
            return
        planned = lease.reply.planned_blocks
        ready = lease.ready_end - lease.reply.from_block if lease.cold is not None else planned
        used = ready if event.used_blocks is None else min(max(event.used_blocks, 0), ready)
        tokens = lease.space.block_tokens
        hit = used * tokens
        missed = lease.planned_tokens - hit
        ledger = lease.space.tokens
        ledger.pending -= lease.planned_tokens
        if lease.cold is not None:
            from_disk = int(np.count_nonzero(lease.cold[:used])) * tokens
            ledger.hit[_DISK] += from_disk
            ledger.hit[_HOST] -= from_disk
            if lease.stop is not None and planned > ready:
                ledger.miss[lease.stop] += (planned - ready) * tokens
                ledger.miss[event.unused] -= (planned - ready) * tokens
        ledger.hit[_HOST] += hit
        if near := lease.reply.tokens[_GPU]:
            ledger.hit[_GPU] += min(near, hit)
            ledger.hit[_HOST] -= min(near, hit)
        if missed:
            ledger.miss[event.unused] += missed
        self._end(lease, out, used=used > 0)
        out.append(Released(lease.lease, hit, missed))

    def end_unreleased(self, lease: Lease, reason: Miss, out: list[Command]) -> None:
        """The worker never said: nothing of it counts as a hit."""
        ledger = lease.space.tokens
        ledger.pending -= lease.planned_tokens
        ledger.miss[reason] += lease.planned_tokens
        expired = reason is Miss.LEASE_EXPIRED
        self.state.stats.leases_expired += expired
        if expired:
            self.state.remember_expired(lease.lease)
        self._end(lease, out, used=False)
        out.append(LeaseEnded(lease.lease, lease.session, reason))

    def _end(self, lease: Lease, out: list[Command], *, used: bool) -> None:
        state = self.state
        if lease.loads and self.loader is not None:
            self.loader.leave(lease, out)
        lease.ended = True
        state.deadlines.note_ended()
        del state.leases[lease.lease]
        session = state.sessions[lease.session]
        del session.leases[lease.lease]
        if lease.space.foreign is None:
            self._note_used(lease)
        elif lease.space.table.counts_hits:
            self._note_used_keys(lease)
        if session.gpus and self.promoter is not None:
            self.promoter.lease_ended(lease, session, out, used=used)
        self.remover.unpin_all(lease.pins)
        if self.mover.retired:
            self.mover.settle_retired()

    def _note_used(self, lease: Lease) -> None:
        space = lease.space
        for pin in lease.pins:
            path = path_to(pin.node, pin.depth)
            for node in path.nodes:
                node.uses += node.end <= pin.depth
            self.touch(space, path)
            if space.table.counts_hits:
                self._count_hit(space, path, pin)

    def _note_used_keys(self, lease: Lease) -> None:
        """In a foreign namespace."""
        space = lease.space
        pins = [pin for pin in lease.pins if pin.node.state != DETACHED]
        rows = np.unique(rows_of([pin.node for pin in pins]))
        space.table.hits[rows] = space.table.hits[rows] << 1 | 1
        if self.demoter is not None:
            for pin in pins:
                self.demoter.note_used(pin.node, pin.depth)

    def _count_hit(self, space: Namespace, path: Path, pin: Pin) -> None:
        """For what is worth keeping on disk, and writing to it early, or copying to a GPU."""
        hits = space.table.hits
        for piece in path.stretches(0, path.blocks) if path.nodes and not path.nodes[0].start else ():
            if isinstance(piece, slice):
                view = hits[piece]
                view <<= 1
                view |= 1
            else:
                hits[piece] = hits[piece] << 1 | 1
        if self.demoter is not None:
            self.demoter.note_used(pin.node, pin.depth)

    def touch(self, space: Namespace, path: Path) -> None:
        """These blocks were used now."""
        if not path.nodes:
            return
        tick = self.state.tick
        touched = space.table.touched
        for piece in path.stretches(0, path.blocks):
            touched[piece] = tick
        last = path.nodes[-1]
        if last.cold:
            last = hot_from(last)
        if not last.held and last.end <= path.blocks:
            space.policy.touch_leaf(last, tick)

    def _runs(self, space: Namespace, path: Path, ready: tuple[int, int], planned: int) -> tuple[Run, ...]:
        """What a prefix of `planned` blocks needs of the blocks that are ready (first, end)."""
        first, end = ready
        pool = self.state.host_pool
        if not space.optional_parts:
            wanted = path.stretches(first, end)
            if len(space.strides) == 1:
                return (read_run(space, 0, wanted, first, pool),)
            return tuple([read_run(space, part, wanted, first, pool) for part in range(len(space.strides))])
        runs = []
        for part in range(len(space.strides)):
            start = space.needed_from(part, first, planned)
            if start < end:
                runs.append(read_run(space, part, path.stretches(start, end), start, pool))
        return tuple(runs)

    def _count_misses(
        self, space: Namespace, path: Path, event: AcquireRequested, ends: tuple[int, int], wish: Wish | None
    ) -> Miss | None:
        """Counts the blocks behind the planned ones by reason; answers the first reason, None where there are none.

        ends: (planned, limit); wish: says why what is stored up to the limit is not planned, where it is not a gap."""
        if ends[0] * KEY_BYTES >= len(event.keys):
            return None
        cut = wish.stop if wish is not None else None
        end, limit = max(ends[0], event.from_block), max(ends[1], event.from_block)
        top = min(max(wish.top, end), limit) if wish is not None else limit
        matched = max(path.blocks, event.from_block)
        tokens = space.block_tokens
        miss = space.tokens.miss
        behind = self._stop_behind(space, path, event.keys)
        counts = (
            (cut or Miss.GROUP_GAP, top - end),
            (Miss.GROUP_GAP, limit - top),
            (Miss.BEYOND_LIMIT, matched - limit),
            (behind, len(event.keys) // KEY_BYTES - matched),
        )
        first = None
        for reason, blocks in counts:
            if blocks > 0:
                miss[reason] += blocks * tokens
                first = first or reason
        return first or behind

    def _stop_behind(self, space: Namespace, path: Path, keys: bytes) -> Miss:
        return Miss.BEING_WRITTEN if space.tree.next_after(path, keys) is not None else Miss.NOT_STORED

    def _own_lease(self, session: bytes, lease_id: bytes, out: list[Command]) -> Lease | None:
        state = self.state
        lease = state.leases.get(lease_id)
        if lease is None:
            reason = Refusal.LEASE_EXPIRED if lease_id in state.expired_leases else Refusal.LEASE_UNKNOWN
            state.refuse(out, Kind.NOT_FOUND, reason, "no such lease; it ended or never was", lease_id)
        elif lease.session != session:
            text = "the lease belongs to another session"
            state.refuse(out, Kind.PERMISSION_DENIED, Refusal.FOREIGN_SESSION, text, lease_id)
        else:
            return lease
        return None

    def _admitted(self, event: AcquireRequested, out: list[Command]) -> tuple[Session, Namespace] | None:
        """Who asks and of what; None where that is refused, or was answered before."""
        state = self.state
        lease_id = event.lease
        if not state.good_id(lease_id, out):
            return None
        session = state.live_session(event.session, out, lease_id)
        if session is None or self._retried(event, out):
            return None
        space = state.known_namespace(event.namespace, out, lease_id)
        if space is None or not self._valid(event, session, space, out):
            return None
        return session, space

    def _retried(self, event: AcquireRequested, out: list[Command]) -> bool:
        """Answers an Acquire whose lease is there already."""
        lease = self.state.leases.get(event.lease)
        if lease is None:
            return False
        if lease.session == event.session and lease.space.number == event.namespace:
            out.append(lease.reply)
        else:
            text = "this lease id is in use for something else"
            self.state.refuse(out, Kind.ALREADY_EXISTS, Refusal.LEASE_TAKEN, text, event.lease)
        return True

    def _valid(self, event: AcquireRequested, session: Session, space: Namespace, out: list[Command]) -> bool:
        state = self.state
        if not state.good_keys(event.keys, event.from_block, out, event.lease):
            return False
        if len(session.leases) >= state.limits.max_leases_per_session:
            text = f"a session holds at most {state.limits.max_leases_per_session} leases"
            state.refuse(out, Kind.RESOURCE_EXHAUSTED, Refusal.TOO_MANY, text, event.lease)
            return False
        if event.max_blocks is not None and event.max_blocks < 0:
            text = "max_blocks must not be negative"
        elif event.prompt_tokens < len(event.keys) // KEY_BYTES * space.block_tokens:
            text = f"prompt_tokens {event.prompt_tokens} is less than what the keys stand for"
        else:
            return True
        state.refuse(out, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID, text, event.lease)
        return False


def _remember(space: Namespace, path: Path) -> None:
    """A prompt hit these blocks; only some policies want to know."""
    if space.policy.remembers and path.blocks:
        rows = np.frombuffer(path.packed_rows(), ROW_DTYPE)
        if space.cold_blocks:
            rows = rows[~space.table.cold[rows]]
        space.policy.used(space, rows)
