"""The blocking client: what an engine calls on a request's path.

Rules:
1. `acquire`, `store`, `lookup`, `prefetch` and `pin` never raise because of the cache: no server, a slow one, a full
   one or a lying one is a miss with a reason. They do raise for mistakes of the caller: tokens that are none, tensors
   of the wrong size.
2. Every call has a deadline. A client is made without a server and finds one whenever it comes.
3. One client serves any number of threads; a forked child goes on with a session of its own.

What belongs here: the surface. How is said in acquire, lease, store and link.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Self, TypedDict, Unpack

from prefixcache.identity.canonical import Value
from prefixcache.identity.fingerprint import Scales
from prefixcache.identity.layout import Layout
from prefixcache.identity.model import NamespaceOptions
from prefixcache_client import acquire, foreign, handover, lookup, pins, prefetch, served, store
from prefixcache_client import namespace as namespaces
from prefixcache_client.address import parse_address
from prefixcache_client.errors import Failure
from prefixcache_client.foreign import ForeignCache
from prefixcache_client.handover import LeaseTicket
from prefixcache_client.lease import Lease
from prefixcache_client.link import Link
from prefixcache_client.namespace import Namespace, Prompt, Secrets
from prefixcache_client.options import ClientOptions
from prefixcache_client.portions import Portion
from prefixcache_client.reasons import QUEUE_FULL
from prefixcache_client.results import CopyResult, LookupResult, PinResult, PrefetchResult, StoreResult
from prefixcache_client.served import ServedNamespace, fingerprint_of
from prefixcache_client.session import grpc_alone
from prefixcache_client.stats import ClientStats, Counters
from prefixcache_client.store import Priority
from prefixcache_client.watching import Watch
from prefixcache_client.writer import Writer

_MIN_SILENCE_S: Final = 0.1  # as the server
_MAX_SILENCE_S: Final = 3600.0
_MAX_TTL_S: Final = 4_000_000  # of milliseconds in a u32; the server cuts it to its own longest


class IdentityOptions(TypedDict, total=False):
    """What KV bytes depend on beside layout and weights; see identity.fingerprint.NamespaceIdentity."""

    block_tokens: int
    weights_epoch: int
    quantisation: str
    compute_dtype: str
    k_scales: Scales
    v_scales: Scales
    codec: str
    rope: Mapping[str, Value]
    config: Mapping[str, Value]
    overrides: Mapping[str, Value]
    lora: bytes
    tenant: str
    engine: str


class AcquireOptions(TypedDict, total=False):
    """What a caller wants of a lease; see Client.acquire."""

    max_tokens: int | None
    from_token: int
    ttl_s: float | None
    recompute_s_per_token: float | None
    timeout_s: float | None
    load_timeout_s: float | None


class Client:
    """A connection to the host's daemon, opened at the first call and whenever it is lost."""

    def __init__(self, address: str | None = None, options: ClientOptions | None = None) -> None:
        """`address`: `unix:///path` or `HOST:PORT`; None takes PREFIXCACHE_ADDRESS, else the default socket.

        Never connects, so it never fails for a missing server. Raises ValueError for an address that is none.
        """
        self.options = options or ClientOptions()
        self._counters = Counters()
        self._link = Link(parse_address(address), self.options, self._counters)
        self._writer = Writer(self.options.store_queue)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session: leases still held are lost, waiting stores dropped, later calls miss (`client_closed`)."""
        self._writer.drain()
        self._link.close()

    def namespace(
        self,
        layout: Layout,
        weights_digest: bytes,
        *,
        tenant_key: bytes | None = None,
        cache_salt: bytes = b"",
        label: str = "",
        **identity: Unpack[IdentityOptions],
    ) -> Namespace:
        """The namespace of a model whose blocks look like `layout`; makes no call.

        `weights_digest`: 32 bytes, see prefixcache.identity.weights. `tenant_key`: None or 32 secret bytes; without
        anybody who can guess a prompt can find its blocks. `label` is shown by `prefixcache status`. `identity`: what
        else the bytes depend on, see NamespaceIdentity. Raises LayoutError or IdentityError for what cannot exist.
        """
        return namespaces.namespace_of(layout, weights_digest, Secrets(tenant_key, cache_salt, label), **identity)

    def namespace_from_hf(
        self,
        config: object,
        weights_digest: bytes,
        kv_dtype: object,
        *,
        tenant_key: bytes | None = None,
        cache_salt: bytes = b"",
        label: str = "",
        **options: Unpack[NamespaceOptions],
    ) -> Namespace:
        """The namespace of a model running from a Hugging Face `config` (the object, or the dict of a config.json).

        `kv_dtype`: "bfloat16", torch.bfloat16, ... `options`: see prefixcache.identity.model.NamespaceOptions. Raises
        ConfigError for a model that cannot be described for certain, else as `namespace`.
        """
        secrets = Secrets(tenant_key, cache_salt, label)
        return namespaces.namespace_from_hf(config, weights_digest, kv_dtype, secrets, **options)

    def acquire(
        self,
        ns: Namespace,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        from_token: int = 0,
        ttl_s: float | None = None,
        recompute_s_per_token: float | None = None,
        timeout_s: float | None = None,
        load_timeout_s: float | None = None,
    ) -> Lease:
        """Lease the longest cached prefix of `prompt`, for a `with`; a lease of 0 tokens is a miss.

        `max_tokens`: the longest prefix of use (an engine computes at least one token itself). `from_token`: what the
        engine has already; rounded down to a block. `ttl_s`: how long the copy may take. `recompute_s_per_token`: what
        a miss costs. `load_timeout_s`: how long the copy may wait for blocks that are on a slower tier now. None takes
        the client's option. Raises ValueError or TypeError for a prompt that is none.
        """
        options = self.options
        if ttl_s is None:
            ttl_s = options.lease_ttl_s
        elif not 0 <= ttl_s <= _MAX_TTL_S:
            raise ValueError(f"ttl_s must be from 0 (the server's default) to {_MAX_TTL_S}, got {ttl_s}")
        if timeout_s is None:
            timeout_s = options.timeout_s
        if load_timeout_s is None:
            load_timeout_s = options.load_timeout_s
        if recompute_s_per_token is None:
            recompute_s_per_token = options.recompute_s_per_token
        wish = (max_tokens, from_token, ttl_s, recompute_s_per_token, timeout_s, load_timeout_s)
        return acquire.acquire(self._link, ns, prompt, wish)

    def foreign_namespace(
        self,
        engine: str,
        weights_digest: bytes,
        shape: tuple[int, int],
        *,
        form: Mapping[str, Value],
        tenant: str = "",
        tenant_key: bytes | None = None,
        label: str = "",
    ) -> Namespace:
        """A namespace of blocks that only `engine` understands, under its own keys; makes no call.

        `engine`: its name in lower case, such as "sglang". `shape`: (bytes, tokens) of a block, the same for all.
        `form`: everything else the bytes depend on, by name: dtype, layers, heads, order of bytes, parallel sizes and
        rank. Raises LayoutError, IdentityError or CanonicalError for what cannot exist.
        """
        secrets = Secrets(tenant_key, b"", label)
        return foreign.foreign_namespace(engine, weights_digest, shape, dict(form), secrets, tenant)

    def foreign(self, ns: Namespace) -> ForeignCache:
        """The calls of a foreign namespace. Raises ValueError for one of tokens."""
        return ForeignCache(self._link, ns)

    def copy_by_ticket(self, ns: Namespace, ticket: LeaseTicket, tensors: Any) -> CopyResult:
        """Copy blocks that another process of this host has leased (`Lease.ticket`) and keeps leased meanwhile.

        As `Lease.copy_to`: the bytes are valid only if the result is `ok`. Only where memory is shared; else the reason
        is `not_mapped`. Raises ValueError or TypeError for tensors that do not fit the layout.
        """
        return handover.copy_by_ticket(self._link, ns.form, ticket, tensors, self.options.timeout_s)

    def open(self, timeout_s: float | None = None) -> bool:
        """Connect now instead of at the first call; whether that went well. Later calls connect by themselves."""
        try:
            self._link.opened(self.options.timeout_s if timeout_s is None else timeout_s)
        except Failure:
            return False
        return True

    @property
    def pool_bytes(self) -> int:
        """Bytes of the daemon's host pools; 0 while no session is open."""
        session = self._link.session
        return session.host_pool_bytes if session is not None and session.alive else 0

    def store(
        self, ns: Namespace, prompt: Prompt, tensors: Any, *, from_token: int = 0, priority: Priority = "normal"
    ) -> StoreResult:
        """Store the whole blocks of `prompt` that `tensors` hold and the server lacks, and wait until they are visible.

        `from_token`: where storing begins; rounded up to a block. `priority`: "low", "normal" or "high"; low ones leave
        memory first, high ones last (docs/policies.md). Raises ValueError or TypeError for a prompt that is none, for
        tensors that do not fit the layout and for another priority.
        """
        return store.store(self._link, ns, ns.epoch, prompt, tensors, store.wish(from_token, priority))

    def store_portion(
        self, ns: Namespace, prompt: Prompt, tensors: Any, portion: Portion, from_token: int = 0
    ) -> StoreResult:  # fmt: skip
        """As `store`, of a store that several processes of this host make together: writes this one's heads.

        The blocks become visible with the last of them, whose result counts them; the others store 0 blocks. Each must
        call it, or `give_up`: what one does not write within `options.reservation_ttl_s` is not stored. Raises
        ValueError also for a portion that does not fit the layout.
        """
        portion.check(ns.form)
        return store.store(self._link, ns, ns.epoch, prompt, tensors, store.wish(from_token, "normal", portion))

    def give_up(self, ns: Namespace, ticket: bytes) -> None:
        """This process will not store its portion under the ticket; what the others write is dropped. Never waits."""
        store.give_up(self._link, ns.form, ticket)

    def store_later(
        self, ns: Namespace, prompt: Prompt, tensors: Any, *, from_token: int = 0, priority: Priority = "normal"
    ) -> "Future[StoreResult]":
        """As `store`, on a thread of the client's. Do not change `tensors` until the future is done.

        When `options.store_queue` stores are waiting already, the new one is dropped: its result has reason
        `queue_full`.
        """
        link, epoch = self._link, ns.epoch
        keys = ns.hash(prompt, epoch)
        wish = store.wish(from_token, priority)
        later = self._writer.submit(lambda: store.store(link, ns, epoch, keys, tensors, wish))
        return later if later is not None else self._dropped(len(keys.keys) // 32)

    def lookup(
        self, ns: Namespace | ServedNamespace, prompt: Prompt, *, timeout_s: float | None = None
    ) -> LookupResult:
        """How much of a prompt is cached, here and on other nodes. Leases nothing and counts as no use."""
        return lookup.lookup(self._link, ns, prompt, self.options.timeout_s if timeout_s is None else timeout_s)

    def prefetch(self, ns: Namespace, prompt: Prompt, *, timeout_s: float | None = None) -> PrefetchResult:
        """Have the prompt's blocks brought up from slower tiers, for an `acquire` soon; leases nothing, never waits."""
        return prefetch.prefetch(self._link, ns, prompt, self.options.timeout_s if timeout_s is None else timeout_s)

    def pin(
        self, ns: Namespace, prompt: Prompt, *, label: str = "", ttl_s: float = 0.0, forever: bool = False
    ) -> PinResult:
        """Keep the whole blocks of `prompt` in the daemon's memory: those that are stored now, the others as they are
        stored. Granted whole or not at all (reason `pin_budget`).

        `ttl_s`: for how long; 0 takes the daemon's default (a day). `forever`: until it is unpinned or cleared. Pinning
        the same prompt again renews the pin. Raises ValueError for a time that is none.
        """
        if not 0 <= ttl_s <= pins.MAX_TTL_S or (forever and ttl_s):
            raise ValueError(f"ttl_s must be from 0 to {pins.MAX_TTL_S:g}, and 0 with forever, got {ttl_s}")
        return pins.pin(self._link, ns, prompt, label, None if forever else ttl_s)

    def unpin(self, pin: PinResult | bytes) -> str:
        """End a pin; its blocks stay cached until something else needs the room. Answers why not, "" when done."""
        return pins.unpin(self._link, pin if isinstance(pin, bytes) else pin.pin)

    def served_namespaces(
        self, *, tenant_key: bytes | None = None, cache_salt: bytes = b"", timeout_s: float | None = None
    ) -> list[ServedNamespace]:
        """The namespaces that workers have opened at the daemon, for a router that has no model: for `lookup` and
        `watch`. Empty where no daemon answers. `tenant_key`, `cache_salt`: as the workers have them."""
        timeout_s = self.options.timeout_s if timeout_s is None else timeout_s
        return served.served_namespaces(self._link, tenant_key, cache_salt, timeout_s)

    def watch(
        self,
        namespaces: Sequence[Namespace | ServedNamespace | bytes] = (),
        *,
        snapshot: bool = True,
        keepalive_s: float = 10.0,
    ) -> Watch:
        """What comes and goes in the daemon, as an iterator that goes on over lost connections and restarts; see
        events.WatchEvent, and events.KnownBlocks to keep count.

        `namespaces`: which (or their fingerprints); none watches all, with keys cut to 8 bytes. `snapshot`: tell first
        what is held, and again after a gap. `keepalive_s`: after three times as long without a word it connects anew.
        The iteration raises WatchRefusedError where the daemon will never answer.
        """
        if not _MIN_SILENCE_S <= keepalive_s <= _MAX_SILENCE_S:
            raise ValueError(f"keepalive_s must be from {_MIN_SILENCE_S} to {_MAX_SILENCE_S}, got {keepalive_s}")
        address = self._link.address
        return Watch(
            lambda: grpc_alone(address),
            lambda: [fingerprint_of(each) for each in namespaces],
            snapshot=snapshot,
            keepalive_s=keepalive_s,
        )

    def stats(self) -> ClientStats:
        """Counters since the client was made."""
        session = self._link.session
        breaker = self._link.breaker
        kind = session.kind if session is not None and session.alive else ""
        return self._counters.snapshot(breaker.state, breaker.times_opened, kind)

    def _dropped(self, blocks: int) -> "Future[StoreResult]":
        refused = {QUEUE_FULL: blocks}
        self._counters.stored(0, 0, refused)
        dropped: Future[StoreResult] = Future()
        dropped.set_result(StoreResult(0, 0, 0, refused, QUEUE_FULL))
        return dropped
