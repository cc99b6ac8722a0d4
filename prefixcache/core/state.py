"""All state of one planner in one place, and the few steps every concern shares.

Rules: no decisions in here; the modules by concern (acquiring, filling, removal, ...) decide and change it. Everything
in here is bounded by `Limits` or by the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from prefixcache.core.commands import Aborted, Change, Command, Committed, Published, Refused, Reserved
from prefixcache.core.deadlines import Deadlines
from prefixcache.core.disk import Disk
from prefixcache.core.gpu import GpuTier
from prefixcache.core.ids import ID_BYTES, KEY_BYTES, LeaseId, NamespaceId, PinId, ReservationId, Rows, SessionId, Tier
from prefixcache.core.leases import Lease
from prefixcache.core.ledger import Stats
from prefixcache.core.namespaces import Namespace
from prefixcache.core.nodes import place_of
from prefixcache.core.pins import PrefixPin
from prefixcache.core.policy.base import Clock, EvictionPolicy
from prefixcache.core.policy.prioritised import Prioritised
from prefixcache.core.policy.registry import make_policy
from prefixcache.core.policy.tiered import TieredLeaves
from prefixcache.core.radix import VISIBLE, Node, subtree
from prefixcache.core.reasons import Kind, Refusal
from prefixcache.core.reservations import Reservation
from prefixcache.core.slots import SlabPool
from prefixcache.core.spec import PlannerConfig
from prefixcache.core.telling import news_of, stored_spans

Outcome = Committed | Aborted | Refused | Reserved


@dataclass(slots=True, eq=False)
class Session:
    """One worker. `ended`: only kept because slots of it are quarantined until its process is gone."""

    session: SessionId
    can_map: bool
    name: str
    gpus: tuple[GpuTier, ...] = ()
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    reservations: dict[ReservationId, Reservation] = field(default_factory=dict)
    ended: bool = False


class State:
    """See the module's rules. `out` arguments are the list of commands the current event answers."""

    def __init__(self, config: PlannerConfig) -> None:
        self.config = config
        self.limits = config.limits
        self.pools = {
            spec.pool: SlabPool(spec, config.ready_bytes if spec.tier is Tier.HOST else None) for spec in config.pools
        }
        hosts = [spec.pool for spec in config.pools if spec.tier is Tier.HOST]
        if len(hosts) != 1 or config.first_generation <= 0:
            raise ValueError("a planner needs exactly one host pool and a first generation above 0")
        self.host = self.pools[hosts[0]]
        self.host_pool = hosts[0]
        self.sessions: dict[SessionId, Session] = {}
        self.namespaces: dict[NamespaceId, Namespace] = {}
        self.by_fingerprint: dict[bytes, Namespace] = {}
        self.leases: dict[LeaseId, Lease] = {}
        self.reservations: dict[ReservationId, Reservation] = {}
        self.prefix_pins: dict[PinId, PrefixPin] = {}
        self.pinned_bytes = 0  # of the slots of all blocks that are pinned, stored or not, each once
        self.appeared: list[tuple[Namespace, bytes]] = []  # first keys of what became visible, while a pin waits
        self.policies: dict[tuple[int, ...], EvictionPolicy] = {}
        self.gpus = {spec.pool: GpuTier(self, spec) for spec in config.pools if spec.tier is Tier.GPU}
        self.promoting: dict[int, int] = {}  # copies to GPU memory under way -> serial, as of a lease
        self.news: list[Published] = []  # what changed, for those who watch; told when the event is done
        self.disk = Disk()
        self.clock = Clock()
        self.deadlines = Deadlines()
        self.stats = Stats()
        self.expired_leases: OrderedDict[LeaseId, None] = OrderedDict()
        self.recent_ends: OrderedDict[bytes, Outcome] = OrderedDict()
        self.tick = 0
        self.serial = 0
        self.generation = config.first_generation
        self.draining = False
        self.drain_told = False

    def forget_all(self) -> None:
        """Back to an empty pool without namespaces (a snapshot that broke half-way)."""
        self.news.clear()
        self.namespaces.clear()
        self.by_fingerprint.clear()
        self.stats.ledgers.clear()
        self.policies.clear()
        for tier in self.gpus.values():
            tier.copies.clear()
            tier.policies.clear()
        for number, pool in self.pools.items():
            self.pools[number] = SlabPool(pool.spec, pool.ready_bytes)
        self.host = self.pools[self.host_pool]

    def next_generation(self) -> int:
        self.generation += 1
        return self.generation - 1

    def next_serial(self) -> int:
        self.serial += 1
        return self.serial

    def policy_for(self, strides: tuple[int, ...]) -> EvictionPolicy:
        """One policy for all namespaces whose blocks take the same slots."""
        signature = tuple(sorted(strides))
        policy = self.policies.get(signature)
        if policy is None:
            policy = self.policies[signature] = self._new_policy()
        return policy

    def _new_policy(self) -> EvictionPolicy:
        return TieredLeaves(self.make_policy) if self.config.disk is not None else self.make_policy()

    def make_policy(self) -> EvictionPolicy:
        """A fresh policy of the configured kind, within the priorities of blocks."""
        policy = make_policy(self.config.policy, self.clock, self.config.policy_seed)
        return Prioritised(policy, self.clock, self.config.priority_fades_s)

    def remember_end(self, session: SessionId, reservation: ReservationId, outcome: Outcome) -> None:
        """So that a retried Commit or Abort learns what the first one did; without a session: who comes too late to a
        shared reservation."""
        self.recent_ends[session + reservation] = outcome
        if len(self.recent_ends) > self.limits.recent_ends:
            self.recent_ends.popitem(last=False)

    def remember_expired(self, lease: LeaseId) -> None:
        """So that a late Release is told what happened."""
        self.expired_leases[lease] = None
        if len(self.expired_leases) > self.limits.recent_ends:
            self.expired_leases.popitem(last=False)

    def appear(self, node: Node) -> None:
        """A node became visible; pins that wait for it are told when the event is done."""
        if node.space is not None and node.space.wanted:
            self.appeared.append((node.space, node.edge[:KEY_BYTES]))

    def publish(self, change: Change, space: Namespace, keys: bytes, parent: bytes, first_block: int) -> None:
        """Announces blocks in memory that are in no node yet, or a whole namespace (no keys), if anybody listens."""
        if self.config.publish:
            number, name = space.number, space.fingerprint
            self.news.append(Published(change, number, name, keys, parent, first_block, Tier.HOST))

    def publish_blocks(self, change: Change, node: Node, first: int = 0) -> None:
        """Announces the blocks of a node from its `first` on, if anybody listens."""
        if self.config.publish and node.space is not None:
            tier = Tier.DISK if node.cold else Tier.HOST
            self.news += [news_of(change, node, span, tier) for span in stored_spans(node, first)]

    def publish_move(self, node: Node, tier: Tier) -> None:
        """Announces that all blocks of a node are in another tier now."""
        if self.config.publish:
            self.news += [news_of(Change.MOVED, node, span, tier) for span in stored_spans(node)]

    def publish_links(self, change: Change, space: Namespace, rows: Rows) -> None:
        """Announces blocks without any part, of rows: they got their first one, or lost the last. Only where there is
        no full group; elsewhere the block itself comes or goes."""
        index = space.tree.index
        if space.has_full or not self.config.publish or index is None:
            return
        for row in rows[~space.any_part(rows)].tolist():
            node = index.node_of(row)
            if node is not None and node.state == VISIBLE:
                at = place_of(node, row)
                self.news.append(news_of(change, node, (at, at + 1), Tier.DISK if node.cold else Tier.HOST))

    def publish_subtree(self, node: Node) -> None:
        """Announces that a block and all below it are gone, tails first."""
        if self.config.publish:
            for below in reversed(list(subtree(node))):
                if below.state == VISIBLE:
                    self.publish_blocks(Change.REMOVED, below)

    def clipped_ttl(self, ttl_s: float) -> float:
        """The time a client asked for, within the bounds (not a number: the shortest)."""
        limits = self.limits
        return min(ttl_s, limits.max_ttl_s) if ttl_s > limits.min_ttl_s else limits.min_ttl_s

    def refuse(self, out: list[Command], kind: Kind, reason: Refusal, message: str, subject: bytes = b"") -> None:
        self.stats.refused[reason] += 1
        out.append(Refused(kind, reason, message, subject))

    def live_session(self, session: SessionId, out: list[Command], subject: bytes = b"") -> Session | None:
        """The session if it may do things, else a refusal."""
        found = self.sessions.get(session)
        if found is None:
            self.refuse(out, Kind.NOT_FOUND, Refusal.SESSION_UNKNOWN, "no such session; open one", subject)
        elif found.ended:
            self.refuse(out, Kind.FAILED_PRECONDITION, Refusal.SESSION_ENDED, "the session has ended", subject)
        else:
            return found
        return None

    def known_namespace(self, namespace: NamespaceId, out: list[Command], subject: bytes = b"") -> Namespace | None:
        found = self.namespaces.get(namespace)
        if found is None:
            self.refuse(out, Kind.NOT_FOUND, Refusal.NAMESPACE_UNKNOWN, "no such namespace; open it first", subject)
        return found

    def good_id(self, value: bytes, out: list[Command]) -> bool:
        if len(value) == ID_BYTES:
            return True
        self.refuse(out, Kind.INVALID_ARGUMENT, Refusal.ID_INVALID, f"ids are {ID_BYTES} bytes")
        return False

    def good_keys(self, keys: bytes, from_block: int, out: list[Command], subject: bytes = b"") -> bool:
        """Whole keys, not too many, and `from_block` within them."""
        size = len(keys)
        if size % KEY_BYTES:
            text = f"keys are {KEY_BYTES} bytes each; {size} is not a multiple"
            self.refuse(out, Kind.INVALID_ARGUMENT, Refusal.KEYS_INVALID, text, subject)
        elif size > self.limits.max_keys * KEY_BYTES:
            text = f"{size // KEY_BYTES} keys; the limit is {self.limits.max_keys}"
            self.refuse(out, Kind.INVALID_ARGUMENT, Refusal.KEYS_INVALID, text, subject)
        elif not 0 <= from_block <= size // KEY_BYTES:
            text = f"from_block {from_block} is not within the {size // KEY_BYTES} keys"
            self.refuse(out, Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID, text, subject)
        else:
            return True
        return False
