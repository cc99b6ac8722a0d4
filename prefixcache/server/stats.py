"""GetStats: one consistent picture of this moment, from which /metrics, /stats.json and `status` are made as well.

Counts are read inside the owner's lock, so the closed sum closes in every answer. No keys, no tokens' values.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from prefixcache.core.demoting import Demoter
from prefixcache.core.ids import HOST_POOL, KEY_BYTES, SLOT_GRANULE
from prefixcache.core.ledger import Stats, TokenLedger
from prefixcache.core.planner import Planner
from prefixcache.core.reasons import Miss, Skip
from prefixcache.server import prefixes, reasons
from prefixcache.server.describing import TickTimes, describe_blocks
from prefixcache.server.disk_report import DiskReport
from prefixcache.server.dispatch import CallCounters
from prefixcache.server.errors import reason_name
from prefixcache.server.gpu import GpuStore
from prefixcache.server.health import Health
from prefixcache.server.memory import HostMemory
from prefixcache.server.service import Shell
from prefixcache.v1 import admin_pb2 as pb
from prefixcache.v1 import common_pb2 as common

_SHORT_KEY: Final = 8  # bytes of a key that are shown: enough to tell prefixes apart, too few to guess prompts
_MOST_SESSIONS: Final = 1000  # shown; all are counted


class Statistics:
    """Makes GetStatsResponse messages. `addresses` is filled by whoever opens them."""

    def __init__(
        self, shell: Shell, planner: Planner, memory: HostMemory, health: Health, counters: CallCounters
    ) -> None:
        self._shell = shell
        self._planner = planner
        self._memory = memory
        self._health = health
        self._counters = counters
        self.addresses: list[str] = []
        self.pin_faults: Callable[[], dict[str, int]] = dict
        self.backlog: Callable[[], int] = lambda: 0
        self.watch_counters: Callable[[], list[pb.Counter]] = list
        self.disk: DiskReport | None = None  # where there is a disk tier
        self.gpus: GpuStore | None = None  # where there is a GPU tier
        self._tick_times = TickTimes()

    def snapshot(self) -> pb.GetStatsResponse:
        """Everything, now."""
        shell = self._shell
        health, detail = self._health.state()
        response = pb.GetStatsResponse(
            version=shell.version,
            incarnation=shell.incarnation,
            uptime_s=shell.owner.clock() - shell.started_at,
            health=health,
            health_detail=detail,
            parts=[
                pb.Heartbeat(part=part.part, age_s=part.age_s, alive=part.alive)
                for part in self._health.heartbeats.states()
            ],
            addresses=self.addresses,
        )
        with shell.owner.lock:
            stats = self._planner.state.stats
            response.tokens.CopyFrom(_token_sums(stats.tokens))
            if self.gpus is not None:
                response.tiers.extend(self.gpus.tier_stats(self._planner))
                response.counters.extend(self.gpus.counters(self._planner, stats))
            response.tiers.append(self._host_tier(stats))
            if self.disk is not None:
                response.tiers.append(self.disk.tier_stats(self._planner))
                response.counters.extend(self.disk.counters(self._planner))
            response.namespaces.extend(self._namespaces())
            response.counters.extend(_core_counters(stats))
            response.counters.append(pb.Counter(name="pins", value=len(self._planner.state.prefix_pins)))
        response.sessions.extend(self._sessions())
        response.counters.extend(self._shell_counters())
        return response

    @property
    def demoter(self) -> Demoter | None:
        """The planner's part that writes to disk, where there is a disk tier."""
        return self._planner.demoter

    def note_time(self) -> None:
        """A chore of the timer: so that idle times can be told."""
        self._tick_times.note(self._planner.state.tick, self._shell.owner.clock())

    def describe_blocks(self, namespace: int, keys: bytes) -> list[pb.BlockDescription]:
        """The visible blocks of a prefix. Call it with the owner's lock held."""
        now = self._shell.owner.clock()

        def idle_of(tick: int) -> float:
            return now - (self._tick_times.time_of(tick) or now)

        return list(describe_blocks(self._planner, namespace, keys, idle_of))

    def list_prefixes(self, only: int | None, page: range, *, largest: bool) -> pb.ListPrefixesResponse:
        """A page of the hottest or largest prefixes. Call it with the owner's lock held."""
        spaces = self._planner.state.namespaces
        chosen = spaces.values() if only is None else [spaces[only]]
        found, truncated = prefixes.find(self._planner, chosen, largest=largest)
        return pb.ListPrefixesResponse(
            prefixes=[self._prefix(each) for each in found[page.start : page.stop]],
            next_offset=page.stop if page.stop < len(found) else 0,
            truncated=truncated,
        )

    def _prefix(self, found: prefixes.Found) -> pb.PrefixDescription:
        space, node = found.space, found.node
        host, disk = found.tier_tokens()
        now = self._shell.owner.clock()
        known = self._shell.by_fingerprint.get(space.fingerprint)
        return pb.PrefixDescription(
            fingerprint=space.fingerprint,
            short_key=node.edge[-KEY_BYTES:][:_SHORT_KEY].hex(),
            tokens=found.tokens,
            hit_tokens=found.hit_tokens,
            label=known.label if known is not None else "",
            hits=node.uses,
            blocks=node.end,
            size_bytes=found.size_bytes,
            tiers=common.TierTokens(host=host, disk=disk),
            idle_s=max(now - (self._tick_times.time_of(space.tail_tick(node)) or now), 0.0),
            pins=found.pins(),
        )

    def _host_tier(self, stats: Stats) -> pb.TierStats:
        state = self._planner.state
        pool = state.pools[HOST_POOL]
        filling = quarantined = 0
        for reservation in state.reservations.values():
            size = sum(len(slots) * reservation.space.strides[part] for part, slots in reservation.slots.items())
            if reservation.expired or reservation.ended:
                quarantined += size
            else:
                filling += size
        on, detail = self._memory.state()
        return pb.TierStats(
            tier=common.TIER_HOST,
            capacity_bytes=pool.spec.size_bytes,
            ready_bytes=pool.ready_bytes,
            used_bytes=max(pool.used_bytes - filling - quarantined, 0),
            filling_bytes=filling,
            quarantined_bytes=quarantined,
            leased_bytes=self._leased_bytes(),
            pinned_bytes=state.pinned_bytes,
            pin_budget_bytes=state.config.pin_bytes,
            blocks=sum(space.table.used - space.cold_blocks for space in state.namespaces.values()),
            evicted_blocks=stats.blocks_evicted,
            state=on,
            detail=detail,
        )

    def _leased_bytes(self) -> int:
        """Bytes of the slots under leases, one by one, but never more than the bytes there are."""
        total = 0
        for lease in self._shell.holdings.leases.values():
            sizes = lease.namespace.part_bytes
            runs = [run for run in lease.runs if run.pool == HOST_POOL]
            total += sum(len(run.slots) * -(-sizes[run.part] // SLOT_GRANULE) for run in runs)
        return min(total * SLOT_GRANULE, self._planner.state.pools[HOST_POOL].used_bytes)

    def _namespaces(self) -> Iterable[pb.NamespaceStats]:
        for number, namespace in self._shell.namespaces.items():
            space = self._planner.state.namespaces[number]
            yield pb.NamespaceStats(
                namespace_id=number,
                fingerprint=namespace.fingerprint,
                label=namespace.label,
                block_tokens=namespace.spec.block_tokens,
                block_bytes=namespace.block_bytes,
                blocks=space.table.used,
                tokens=_token_sums(space.tokens),
            )

    def _sessions(self) -> Iterable[pb.SessionStats]:
        leases, reservations = self._shell.holdings.count_by_session()
        now = self._shell.owner.clock()
        for session, _ in zip(self._shell.sessions, range(_MOST_SESSIONS), strict=False):
            yield pb.SessionStats(
                client_name=session.name,
                transport=session.transport,
                pid=session.pid,
                leases=leases.get(session.id, 0),
                reservations=reservations.get(session.id, 0),
                age_s=now - session.opened_at,
            )

    def _shell_counters(self) -> Iterable[pb.Counter]:
        for (method, reason), count in sorted(self._counters.refused.items()):
            yield pb.Counter(name="refused_calls", label=f"{method}:{reason}", value=count)
        for name, count in self.pin_faults().items():
            yield pb.Counter(name=name, value=count)
        yield from self.watch_counters()
        yield pb.Counter(name="sessions_open", value=len(self._shell.sessions))
        yield pb.Counter(name="background_orders", value=self.backlog())


def _token_sums(ledger: TokenLedger) -> pb.TokenSums:
    """The ledger, misses summed by the contract's reasons."""
    misses: dict[int, int] = {}
    for miss, count in ledger.miss.items():
        reason = reasons.MISS[Miss(miss)]
        misses[reason] = misses.get(reason, 0) + count
    gpu, host, disk, peer = ledger.hit
    return pb.TokenSums(
        looked_up=ledger.looked_up,
        hit=common.TierTokens(gpu=gpu, host=host, disk=disk, peer=peer),
        miss=[
            common.ReasonCount(reason=common.Reason.ValueType(reason), count=count)
            for reason, count in sorted(misses.items())
            if count
        ],
        pending=ledger.pending,
    )


def _core_counters(stats: Stats) -> Iterable[pb.Counter]:
    for name in (
        "acquires", "lookups", "blocks_stored", "blocks_evicted", "blocks_cleared", "parts_failed_verification",
        "leases_expired", "reservations_expired", "slots_quarantined", "slots_moved", "prefetches", "blocks_prefetched",
    ):  # fmt: skip
        yield pb.Counter(name=name, value=getattr(stats, name))
    # The contract's words, which are those that clients count by.
    skipped = Counter[int]()
    for skip, count in stats.blocks_skipped.items():
        skipped[reasons.SKIP[Skip(skip)]] += count
    stopped = {reasons.PREFETCH_STOP[stop]: count for stop, count in stats.prefetch_stops.items()}
    for name, counts in (("blocks_skipped", skipped), ("prefetch_stops", stopped)):
        for reason, count in sorted(counts.items()):
            yield pb.Counter(name=name, label=reason_name(reason), value=count)
    for end, count in stats.pins_ended.items():
        yield pb.Counter(name="pins_ended", label=str(end), value=count)
