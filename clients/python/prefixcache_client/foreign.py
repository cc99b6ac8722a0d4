"""Calls in a foreign namespace: opaque keys of an engine's own, each found or stored for itself.

For interfaces that hand over keys and bytes and never tokens (SGLang's HiCacheStorage, vLLM's secondary tiers). Rules:
1. A key is SHA-256 of the namespace's root and the engine's key, so what the bytes depend on is part of it: engines
   that differ in weights, dtype, row size or packing never find each other's blocks, whatever their keys say.
2. As with prompts: nothing raises because of the cache, everything ends within its deadline, and bytes count only when
   the generations were compared after the copy. Every key that is not found or not stored has a reason.
3. Position i of a call's keys is block i of its tensors (`Rows`, `Blocks`).

It must not know engines.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from prefixcache.identity.canonical import Value
from prefixcache.identity.fingerprint import NamespaceIdentity
from prefixcache.identity.keys import foreign_key
from prefixcache.identity.layout import Layout
from prefixcache.v1 import cache_pb2
from prefixcache_client import lookup, prefetch, store
from prefixcache_client.coming import ComingKeys
from prefixcache_client.errors import Failure, LeaseEndedError, Unreachable
from prefixcache_client.held import Held, check_time
from prefixcache_client.ids import new_id
from prefixcache_client.link import Link
from prefixcache_client.namespace import Namespace, PromptKeys, Secrets
from prefixcache_client.reasons import DEADLINE, NOT_CACHED, UNUSED, reason_name
from prefixcache_client.results import CopyResult, ForeignLookup, ForeignStore, PrefetchResult
from prefixcache_client.runs import SlotRun, foreign_runs
from prefixcache_client.session import Session
from prefixcache_client.tensors import KvTensors, as_tensors
from prefixcache_client.transport import ACQUIRE, LOOKUP

log = logging.getLogger("prefixcache_client")

_MS: Final = 1000
Present = npt.NDArray[np.bool_]


def foreign_namespace(
    engine: str,
    weights_digest: bytes,
    shape: tuple[int, int],
    form: dict[str, Value],
    secrets: Secrets,
    tenant: str = "",
) -> Namespace:
    """See Client.foreign_namespace. `shape`: (bytes, tokens) of a block."""
    block_bytes, block_tokens = shape
    layout = Layout.opaque(block_bytes, block_tokens, f"native:{engine}:foreign")
    return secrets.namespace(
        NamespaceIdentity(
            weights=weights_digest,
            layout=layout,
            block_tokens=block_tokens,
            overrides=form,
            tenant=tenant,
            engine=engine,
        )
    )


class ForeignCache:
    """What `Client.foreign` answers: the calls of one foreign namespace. Thread-safe."""

    def __init__(self, link: Link, ns: Namespace) -> None:
        """Raises ValueError for a namespace of tokens."""
        if not ns.form.foreign:
            raise ValueError("this namespace has tokens for keys: use acquire, store and lookup of the client")
        self.ns = ns
        self._link = link

    def pack(self, keys: Sequence[bytes]) -> bytes:
        """Engine keys (any bytes, not empty) as keys of the namespace, n x 32 bytes."""
        root = self.ns.epoch.root
        return b"".join([foreign_key(root, key) for key in keys])

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> ForeignLookup:
        """Which keys are stored, in memory or on a disk that can be read now. Leases nothing and counts as no use."""
        ns, epoch = self.ns, self.ns.epoch
        nothing = np.zeros(len(keys), np.bool_)
        if not keys or ns.reason_off:
            return ForeignLookup(nothing, ns.reason_off)
        request = cache_pb2.LookupRequest(keys=self.pack(keys))

        def build(session: Session, deadline: float) -> bytes:
            request.session = session.session_id
            request.namespace_id = session.namespace_id(epoch.fingerprint, ns.form, ns.label, deadline)
            return request.SerializeToString()

        try:
            _, answer = self._link.call(LOOKUP, cache_pb2.LookupResponse, build, self._timeout_s(timeout_s))
            present = _bits(answer.present, len(keys))
        except Failure as failure:
            return ForeignLookup(nothing, failure.reason)
        reason = "" if present.all() else reason_name(answer.stop) or NOT_CACHED
        return ForeignLookup(present, reason, lookup.tiers_here(answer))

    def prefetch(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> PrefetchResult:
        """Have what is stored of the keys brought up from disk, for an `acquire` soon; leases nothing, never waits."""
        packed = PromptKeys(self.pack(keys), len(keys) * self.ns.block_tokens)
        return prefetch.prefetch(self._link, self.ns, packed, self._timeout_s(timeout_s))

    def acquire(
        self,
        keys: Sequence[bytes],
        *,
        timeout_s: float | None = None,
        ttl_s: float | None = None,
        load_timeout_s: float | None = None,
        recompute_s_per_token: float | None = None,
    ) -> "ForeignLease":
        """Lease those of the keys that are stored, for a `with`; answers at once, also where some are on disk.

        `load_timeout_s`: how long `copy_to` may wait for keys that are on disk; with 0 only what is in memory is
        leased. `recompute_s_per_token`: what a miss costs; keys that would come later than that are not leased
        (`reason` says `slower_than_recompute`). `ttl_s`: how long the copy may take. None takes the
        client's option. Never raises because of the cache.
        """
        ns, epoch, link = self.ns, self.ns.epoch, self._link
        if not keys or ns.reason_off:
            return self._missed(len(keys), ns.reason_off)
        ttl_s = link.options.lease_ttl_s if ttl_s is None else ttl_s
        lease_id, began = new_id(), time.monotonic()
        load_timeout_s = link.options.load_timeout_s if load_timeout_s is None else load_timeout_s
        if recompute_s_per_token is None:
            recompute_s_per_token = link.options.recompute_s_per_token
        request = cache_pb2.AcquireRequest(
            lease=lease_id,
            keys=self.pack(keys),
            ttl_ms=int(ttl_s * _MS),
            deadline_ms=int(load_timeout_s * _MS),
            recompute_s_per_token=recompute_s_per_token,
        )

        def build(session: Session, deadline: float) -> bytes:
            request.session = session.session_id
            request.namespace_id = session.namespace_id(epoch.fingerprint, ns.form, ns.label, deadline)
            return request.SerializeToString()

        try:
            session, answer = link.call(ACQUIRE, cache_pb2.AcquireResponse, build, self._timeout_s(timeout_s))
        except Failure as failure:
            link.give_back_unseen(lease_id, failure)
            return self._missed(len(keys), failure.reason)
        if not answer.planned_blocks:
            return self._missed(len(keys), reason_name(answer.stop))
        try:
            grant = self._granted(session, request, answer, began, len(keys))
        except Unreachable as failure:
            link.give_back(session, lease_id)
            return self._missed(len(keys), failure.reason)
        present, size = grant.present, ns.block_tokens
        count = int(np.count_nonzero(present))
        reason = "" if count == len(keys) else reason_name(answer.stop) or NOT_CACHED
        link.counters.acquired(count * size, (len(keys) - count) * size, reason or NOT_CACHED, 0)
        return ForeignLease(link, ns, present, reason, grant)

    def _granted(
        self,
        session: Session,
        request: cache_pb2.AcquireRequest,
        answer: cache_pb2.AcquireResponse,
        began: float,
        count: int,
    ) -> "_Grant":
        """Raises Unreachable where the server contradicts itself."""
        present = _bits(answer.present, count)
        missing, planned = present.copy(), int(np.count_nonzero(present))
        ready = min(answer.ready_blocks, planned)
        runs = foreign_runs(self.ns.form, answer.runs, missing, ready)
        grant = _Grant(session, request.lease, began + answer.ttl_ms / _MS, present, runs)
        if ready < planned:
            until = began + request.deadline_ms / _MS
            grant.coming = ComingKeys(session, request.lease, range(ready, planned), until, missing)
        return grant

    def store(
        self, keys: Sequence[bytes], tensors: Any, *, parents: Sequence[bytes] = (), priority: store.Priority = "normal"
    ) -> ForeignStore:
        """Store block i of `tensors` under key i, where the server lacks it, and wait until it is visible.

        `parents`: for each key the engine's key of the block in front of it, b"" for none; such a block is stored only
        where its parent is, and leaves memory before it. Raises ValueError or TypeError for tensors of other sizes.
        """
        if parents and len(parents) != len(keys):
            raise ValueError(f"{len(parents)} parents for {len(keys)} keys")
        root = self.ns.epoch.root
        above = b"".join([foreign_key(root, each) if each else bytes(32) for each in parents])
        asked = store.wish(0, priority)
        return store.store_foreign(self._link, self.ns, (self.pack(keys), above), tensors, asked)

    def _timeout_s(self, timeout_s: float | None) -> float:
        return self._link.options.timeout_s if timeout_s is None else timeout_s

    def _missed(self, count: int, reason: str) -> "ForeignLease":
        reason = reason or NOT_CACHED
        self._link.counters.acquired(0, count * self.ns.block_tokens, reason, 0)
        return ForeignLease(self._link, self.ns, np.zeros(count, np.bool_), reason, None)


class _Grant:
    """What a lease holds on to while it lives."""

    __slots__ = ("coming", "ends_at", "lease", "present", "runs", "session")

    def __init__(
        self, session: Session, lease: bytes, ends_at: float, present: Present, runs: list[SlotRun]
    ) -> None:  # fmt: skip
        self.session = session
        self.lease = lease
        self.ends_at = ends_at
        self.present = present
        self.runs = runs
        """Of blocks that can be read by now."""
        self.coming: ComingKeys | None = None


class ForeignLease(Held[_Grant]):
    """Some of the keys asked for, valid until it is released or runs out; use it in a `with`. Not for two threads.

    `present`: bool[n], which keys it holds; some of them may still have to come from disk, `copy_to` waits for those.
    `reason`: why not all, "" when all. `copied`: bool[n], keys whose bytes the last `copy_to` brought, whole and right.
    """

    __slots__ = ("_ns", "copied", "present", "reason")

    def __init__(self, link: Link, ns: Namespace, present: Present, reason: str, grant: _Grant | None) -> None:
        """Made by ForeignCache only; without `grant` it holds nothing."""
        self.present = present
        self.reason = reason
        self._ns = ns
        super().__init__(link, grant)
        self.copied: Present = np.zeros(len(present), np.bool_)

    def __bool__(self) -> bool:
        """Whether it holds anything."""
        return bool(self.present.any())

    def _size(self) -> str:
        return f"{int(self.present.sum())} blocks"

    def copy_to(self, tensors: Any) -> CopyResult:
        """Copy the blocks that the lease holds to the tensors' blocks of the same positions; what comes from disk as it
        comes, in any order.

        `ok`: all that is `present` was copied. Otherwise `copied` says which keys' bytes are valid (a record was lost
        or came too late: `reason`); the other blocks hold anything. `tokens` are those copied. Raises LeaseEndedError
        after `release`, ValueError or TypeError for tensors of other sizes.
        """
        grant = self._grant
        if grant is None:
            if self.present.any():
                raise LeaseEndedError("the lease has been released")
            return CopyResult(ok=False, tokens=0, size_bytes=0, reason=self.reason)
        target = as_tensors(tensors)
        self.copied[:] = False
        try:
            moved = self._copy(grant, grant.runs, target)
            while grant.coming is not None and (fresh := grant.coming.wait(self._ns.form)):
                grant.runs += fresh
                moved += self._copy(grant, fresh, target)
        except Failure as failure:
            self.copied[:] = False
            self._lost = failure.reason
            return CopyResult(ok=False, tokens=0, size_bytes=0, reason=failure.reason)
        self._link.counters.loaded(moved)
        short = grant.coming is not None and bool(grant.coming.blocks)
        self._lost = (grant.coming.reason or DEADLINE) if short and grant.coming is not None else ""
        return CopyResult(ok=not short, tokens=self._used * self._ns.block_tokens, size_bytes=moved, reason=self._lost)

    def _copy(self, grant: _Grant, runs: list[SlotRun], target: KvTensors) -> int:
        """Bytes. Raises Failure where they are not what was leased."""
        if not runs:
            return 0
        check_time(grant)
        moved = grant.session.path.load(self._ns.form, grant.lease, runs, target)
        check_time(grant)
        for run in runs:
            self.copied[run.blocks] = True
        return moved

    @property
    def _used(self) -> int:
        return int(np.count_nonzero(self.copied))

    def release(self) -> None:
        """Give the blocks back; a second call does nothing."""
        grant, self._grant = self._grant, None
        if grant is None:
            return
        reason = self._lost or UNUSED
        unused = int(np.count_nonzero(self.present)) - self._used
        if unused:
            self._link.counters.lost(unused * self._ns.block_tokens, reason)
        self._give_back(grant, self._used, reason)


def _bits(packed: bytes, count: int) -> Present:
    """bool[count]. Raises Unreachable for a bitmap of another length."""
    if len(packed) != -(-count // 8):
        raise Unreachable(f"the server sent a bitmap of {len(packed)} bytes for {count} keys")
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count, bitorder="little").astype(np.bool_)
