"""The GPU tier's bytes: pools on listed devices, the planner's promotions as copies on their streams, trouble told.

Rules: a promotion ends in exactly one PromotionDone, reported by the executor's thread, whatever the device does. A
device that is lost is told once and never tried again by this process. torch and CUDA are imported only where a device
asks for them (prefixcache_offload.gpu does). It decides nothing: what goes up and who is told is the planner's.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache.core.gpu import GpuTier
from prefixcache.core.ids import SLOT_GRANULE, Tier
from prefixcache.core.ledger import Stats
from prefixcache.core.planner import Planner
from prefixcache.core.spec import PoolSpec
from prefixcache.server import units
from prefixcache.server.config import Config, ConfigError
from prefixcache.v1 import admin_pb2 as pb
from prefixcache.v1 import common_pb2 as common
from prefixcache_offload.gpu import DeviceError, DevicePool, DeviceReason, PoolContext, Ticket, open_device_pool
from prefixcache_offload.pool import HostPool

log = logging.getLogger(__name__)

Later = Callable[[Callable[[], e.Event]], None]
"""Has an event reported on another thread."""

_SLABS: Final = 8  # a small pool is still cut into so many
_LEAST_SLAB: Final = 2 << 20
_SLOW_S: Final = 10.0  # a copy that takes longer is trouble
_FAILURES: Final = 8  # copies in a row that fail, whatever the device says, and it counts as lost


class GpuStore:
    """All GPU pools of the daemon, by number."""

    def __init__(self, config: Config, host_pool: HostPool) -> None:
        """Make the pools. Raises ConfigError where a device can never be used; one without memory is left out."""
        self._host_pool = host_pool
        self.pools: dict[int, DevicePool] = {}
        self._later: Later = lambda work: None
        self._lost: set[int] = set()
        self._failures: dict[int, int] = {}  # by pool, since the last copy that came
        self._lock = threading.Lock()
        self._under_way: dict[int, float] = {}  # promotions: since when
        self.refused: dict[str, str] = {}  # devices without a pool, and why
        for device, size_bytes in units.parse_devices(config.gpu):
            try:
                self._open(device, size_bytes)
            except DeviceError as error:
                if error.reason is not DeviceReason.OUT_OF_MEMORY:
                    self.close()
                    raise ConfigError(f"gpu: {device}: {error}") from error
                self.refused[device] = f"no pool on {device}: {error}"
                log.warning("a device has no memory for a pool", extra={"facts": {"device": device, "error": error}})
        self.orders: dict[type, Callable[..., None]] = {c.PromoteSlots: self._promote}

    def _open(self, device: str, size_bytes: int) -> None:
        number = len(self.pools) + 1
        slab = min(self._host_pool.descriptor.slab_bytes, max(size_bytes // _SLABS, _LEAST_SLAB))

        def warn(text: str) -> None:
            log.warning("a smaller GPU pool", extra={"facts": {"device": device, "detail": text}})

        context = PoolContext(number, slab // SLOT_GRANULE * SLOT_GRANULE, warn=warn)
        pool = open_device_pool(device, size_bytes // SLOT_GRANULE * SLOT_GRANULE, context=context)
        if any(other.device_uuid == pool.device_uuid for other in self.pools.values()):
            pool.close()
            raise DeviceError(DeviceReason.BAD_NAME, "this device is listed twice; give it one size")
        self.pools[number] = pool
        cost = pool.cost
        log.info(
            "a GPU pool",
            extra={
                "facts": {
                    "device": pool.device,
                    "uuid": pool.device_uuid,
                    "bytes": pool.size_bytes,
                    "context_s": round(cost.seconds, 2),
                    "context_host_bytes": cost.host_bytes,
                    "device_used_bytes": cost.device_used_bytes,
                }
            },
        )

    def specs(self) -> tuple[PoolSpec, ...]:
        """The pools as the planner knows them."""
        return tuple(
            PoolSpec(pool.size_bytes, pool.descriptor.slab_bytes, number, Tier.GPU)
            for number, pool in self.pools.items()
        )

    def pools_on(self, devices: Iterable[str]) -> tuple[int, ...]:
        """Numbers of the pools on these devices (UUIDs, or "cpu")."""
        wanted = set(devices)
        return tuple(number for number, pool in self.pools.items() if pool.device_uuid in wanted)

    def start(self, later: Later) -> None:
        """Copies may come from now on."""
        self._later = later

    def close(self) -> None:
        """Finish what is under way, give the memory up."""
        for pool in self.pools.values():
            pool.close()

    # -- copies ------------------------------------------------------------------------------------------------------

    def _promote(self, order: c.PromoteSlots) -> None:
        pool = self.pools[order.target_pool]
        with self._lock:
            self._under_way[order.copy] = time.monotonic()
        batch = _Batch(len(order.parts), lambda error: self._ended(order, pool, error))
        for part in order.parts:
            try:
                ticket = pool.copy_in(self._host_pool, part.sources, part.targets, part.size_bytes)
            except (DeviceError, IndexError, ValueError) as error:
                batch.end(error)
            else:
                ticket.on_done(batch.ticket_done)

    def _ended(self, order: c.PromoteSlots, pool: DevicePool, error: Exception | None) -> None:
        """A promotion ended; on any thread."""
        number = order.target_pool
        with self._lock:
            self._under_way.pop(order.copy, None)
            self._failures[number] = self._failures.get(number, 0) + 1 if error is not None else 0
            given_up = pool.broken is not None or self._failures[number] >= _FAILURES
            lost = given_up and number not in self._lost
            if lost:
                self._lost.add(number)
        if lost:
            why = pool.broken or f"{_FAILURES} copies in a row failed, the last with: {error}"
            reason = f"{DeviceReason.LOST}: {why}"
            log.error("a GPU pool is lost", extra={"facts": {"device": pool.device, "error": why}})
            self._later(lambda: e.DeviceLost(order.target_pool, reason))
        elif error is not None:
            log.warning("a copy to a GPU failed", extra={"facts": {"device": pool.device, "error": error}})
        self._later(lambda: e.PromotionDone(order.copy, ok=error is None))

    # -- what is told of it ------------------------------------------------------------------------------------------

    def troubles(self, planner: Planner) -> list[str]:
        """Why the tier does not work as it should."""
        found = list(self.refused.values())
        for number, tier in planner.state.gpus.items():
            if tier.reason:
                found.append(f"gpu tier off on {self.pools[number].device}: {tier.reason}")
        with self._lock:
            oldest = min(self._under_way.values(), default=None)
        if oldest is not None and (age := time.monotonic() - oldest) > _SLOW_S:
            found.append(f"gpu tier: a copy has been under way for {age:.0f} s")
        return found

    def tier_stats(self, planner: Planner) -> Iterable[pb.TierStats]:
        """A row for each pool, and one for each device that has none. Call it with the owner's lock held."""
        for number, tier in planner.state.gpus.items():
            yield _row(self.pools[number], tier)
        for device, why in self.refused.items():
            yield pb.TierStats(tier=common.TIER_GPU, state="off", detail=why, device=device)

    def counters(self, planner: Planner, stats: Stats) -> Iterable[pb.Counter]:
        """Counters that only a daemon with GPU pools has."""
        tiers = planner.state.gpus.values()
        yield pb.Counter(name="blocks_promoted", value=sum(tier.promoted for tier in tiers))
        drops: dict[str, int] = {}
        for tier in tiers:
            for drop, count in tier.drops.items():
                drops[drop] = drops.get(drop, 0) + count
        yield from _labelled("gpu_drops", drops)
        yield from _labelled("promotions_skipped", stats.promotions_skipped)


class _Batch:
    """The tickets of one promotion; `ended` is called once, when the last is over, with the first error."""

    def __init__(self, count: int, ended: Callable[[Exception | None], None]) -> None:
        self._left = count
        self._ended = ended
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def ticket_done(self, ticket: Ticket) -> None:
        self.end(ticket.error)

    def end(self, error: Exception | None) -> None:
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            over = not self._left
        if over:
            self._ended(self._error)


def _row(pool: DevicePool, tier: GpuTier) -> pb.TierStats:
    slots = tier.slots
    leased = 0
    for use in tier.leases.values():
        leased += sum(pin.depth * sum(pin.node.space.strides) for pin in use.pins if pin.node.space is not None)
    used = max(slots.used_bytes - tier.moving_bytes, 0)
    return pb.TierStats(
        tier=common.TIER_GPU,
        capacity_bytes=pool.size_bytes,
        ready_bytes=pool.size_bytes,
        used_bytes=used,
        filling_bytes=tier.moving_bytes,
        leased_bytes=min(leased, used),
        blocks=tier.blocks,
        evicted_blocks=tier.drops.total(),
        state="off" if tier.reason else "on",
        detail=tier.reason or pool.device,
        device=pool.device_uuid,
    )


def _labelled(name: str, counts: Mapping[Any, int]) -> Iterable[pb.Counter]:
    for label, count in counts.items():
        yield pb.Counter(name=name, label=str(label), value=count)
