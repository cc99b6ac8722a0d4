"""Acquire, Release, Reserve, Commit, Abort, Lookup: the calls of the critical path.

Every line here is paid once per request of an engine, so the usual case runs straight through and everything else is
in helpers; nothing loops over blocks in Python.
"""

import math
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixcache.core import commands as c
from prefixcache.core import events as e
from prefixcache.core.ids import KEY_BYTES, NO_SLOT
from prefixcache.core.reasons import Miss, Refusal, Skip
from prefixcache.core.table import HIGH, LOW, NORMAL
from prefixcache.identity.keys import block_keys
from prefixcache.server import reasons
from prefixcache.server.encoding import acquire_response, behind_runs
from prefixcache.server.errors import CallError
from prefixcache.server.holdings import Reservation
from prefixcache.server.layouts import Namespace
from prefixcache.server.service import Shell, expect, granted_ttl
from prefixcache.server.sessions import Session
from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common

_TOKEN_BYTES = 4
_MOST_MS = (1 << 32) - 1
_PRIORITIES = {pb.PRIORITY_LOW: LOW, pb.PRIORITY_HIGH: HIGH}  # what a newer client may say beyond that is normal


class CacheCalls:
    """The calls that read and write blocks, without their bytes."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._owner = shell.owner
        self._lock = shell.owner.lock
        self._holdings = shell.holdings
        self._namespaces = shell.namespaces
        self._lease_ttl = shell.config.lease_ttl
        self._lease_ttl_max = shell.config.lease_ttl_max

    def acquire(self, session: Session, request: pb.AcquireRequest) -> bytes | Future[Any]:
        """One lookup of one prompt, pinned; the serialised AcquireResponse."""
        number = request.namespace_id
        namespace = self._namespaces.get(number) or self._shell.namespace(number)
        keys = request.keys
        if not keys or len(keys) % KEY_BYTES or request.tokens:
            keys = self._keys(session, request, allow_none=request.prompt_tokens > 0)
        event = self._acquire_event(session, request, namespace, keys)
        tail = keys[-KEY_BYTES:]
        with self._lock:
            reply = self._owner.acquire(event)
            if type(reply) is c.Acquired:
                return self._granted(session, namespace, tail, reply)
        if isinstance(reply, Future):
            return _mapped(reply, lambda late: self._granted(session, namespace, tail, expect(late, c.Acquired)))
        raise reasons.refusal(expect(reply, c.Refused))

    def _acquire_event(
        self, session: Session, request: pb.AcquireRequest, namespace: Namespace, keys: bytes
    ) -> e.AcquireRequested:
        if self._shell.draining:
            raise _draining()
        first, most, ttl_ms = request.from_block, request.max_blocks, request.ttl_ms
        prompt_tokens = request.prompt_tokens or _prompt_tokens(request, keys, namespace.spec.block_tokens)
        ttl_s = min(ttl_ms / 1000, self._lease_ttl_max) if ttl_ms else self._lease_ttl
        limit = max(most - first, 0) if most else None
        return e.AcquireRequested(
            session.id, request.lease, namespace.number, keys, first, prompt_tokens, ttl_s, limit,
            request.deadline_ms / 1000, max(request.recompute_s_per_token, 0.0),
        )  # fmt: skip

    def _granted(self, session: Session, namespace: Namespace, tail: bytes, reply: c.Acquired) -> bytes:
        """Note the lease, inside the owner's lock, and say what is in it."""
        if reply.planned_blocks:
            lease = self._holdings.leased(session.id, namespace, reply, tail)
            if lease.tail != tail:
                raise CallError(common.REASON_ID_IN_USE, "the lease id is in use for another prompt; choose a new one")
        return self._acquired(reply)

    def _acquired(self, reply: c.Acquired) -> bytes:
        first, planned, stop = reply.from_block, reply.planned_blocks, reply.stop
        left_s = reply.expires_at - self._owner.now
        rest = behind_runs(
            reasons.STOP[stop] if stop is not None else 0,
            int(left_s * 1000) if planned and left_s > 0 else 0,
            reply.tokens if planned else None,
        )
        if reply.ready_blocks < planned:
            rest += pb.AcquireResponse(eta_ms=int(reply.eta_s * 1000) + 1).SerializeToString()
        return acquire_response(first + planned, first + reply.ready_blocks, reply.runs, rest, _bitmap(reply.present))

    def release(self, session: Session, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        """End a lease; blocks above `used_blocks` are missed."""
        with self._owner.lock:
            lease = self._holdings.leases.get(request.lease)
            first = lease.acquired.from_block if lease else 0
            used = max(request.used_blocks - first, 0)
            event = e.LeaseReleased(session.id, request.lease, used, reasons.unused(request.reason))
            expect(self._owner.call(event), c.Released)
            self._holdings.leases.pop(request.lease, None)
            if lease is not None:
                lease.ended(Miss.UNUSED)
        return pb.ReleaseResponse()

    def reserve(self, session: Session, request: pb.ReserveRequest) -> pb.ReserveResponse:
        """Slots for what is missing."""
        shell, config = self._shell, self._shell.config
        namespace = shell.namespace(request.namespace_id)
        if not request.keys or len(request.keys) % KEY_BYTES:
            raise _bad_keys("keys", len(request.keys), KEY_BYTES)
        if shell.draining:
            raise _draining()
        event = e.ReserveRequested(
            session.id,
            request.reservation,
            request.namespace_id,
            request.keys,
            request.from_block,
            granted_ttl(request.ttl_ms, config.reservation_ttl, config.reservation_ttl_max),
            request.parents or None,
            request.part_mask or e.ALL_PARTS,
            _PRIORITIES.get(request.priority, NORMAL),
            request.shared,
        )
        with self._owner.lock:
            reserved: c.Reserved = expect(self._owner.call(event), c.Reserved)
            if len(reserved.blocks):
                self._holdings.reserved(session, namespace, reserved, shared=request.shared)
            ttl_ms = max(int((reserved.expires_at - self._owner.now) * 1000), 0)
        return pb.ReserveResponse(
            grants=[_grant(reserved, grant) for grant in reserved.grants],
            refused=self._refused(reserved.skipped),
            ttl_ms=ttl_ms,
        )

    def _refused(self, skipped: dict[Skip, int]) -> list[common.ReasonCount]:
        """Blocks not granted. A full pool that still grows is worth another try, and says so."""
        counts = _counts(skipped)
        for item in counts:
            if item.reason == common.REASON_POOL_FULL and self._shell.is_growing():
                item.reason = common.REASON_POOL_NOT_READY
        return counts

    def commit(self, session: Session, request: pb.CommitRequest) -> pb.CommitResponse:
        """Make written blocks visible."""
        with session.writes, self._owner.lock:
            reservation = self._holdings.reservations.get(request.reservation)
            coverage = None
            if reservation is not None and session.id in reservation.writers:
                coverage = _coverage(reservation, request)
                if not session.can_map:
                    _require_written(reservation, coverage)
            event = e.CommitRequested(session.id, request.reservation, coverage, request.more)
            reply = self._owner.call(event)
            if type(reply) is c.Committed and reply.over:
                self._holdings.ended(request.reservation)
            elif not request.more and (type(reply) is c.Committed or _is_over(reply)):
                self._holdings.last_word(request.reservation, session.id)
            committed: c.Committed = expect(reply, c.Committed)
        return pb.CommitResponse(
            committed_blocks=committed.stored, dropped=_counts(committed.dropped), done=committed.over
        )

    def abort(self, session: Session, request: pb.AbortRequest) -> pb.AbortResponse:
        """Give a reservation back."""
        with session.writes, self._owner.lock:
            owner = self._holdings.aborting_session(request.reservation, session)
            expect(self._owner.call(e.AbortRequested(owner, request.reservation, request.shared)), c.Aborted)
            self._holdings.aborted(request.reservation, owner)
        return pb.AbortResponse()

    def lookup(self, session: Session | None, request: pb.LookupRequest) -> pb.LookupResponse:
        """How much of a prompt is here."""
        shell = self._shell
        if request.fingerprint:
            found = shell.by_fingerprint.get(request.fingerprint)
            if found is None:
                raise CallError(common.REASON_NAMESPACE_UNKNOWN, "no worker has opened a namespace of this fingerprint")
            namespace = found
        else:
            namespace = shell.namespace(request.namespace_id)
        keys = self._keys(session, request, namespace.number)
        looked: c.LookedUp = expect(self._owner.call(e.LookupRequested(namespace.number, keys)), c.LookedUp)
        gpu, host, disk, peer = looked.tokens
        here = pb.NodeMatch(
            tokens=looked.matched_blocks * namespace.spec.block_tokens,
            tiers=common.TierTokens(gpu=gpu, host=host, disk=disk, peer=peer),
            load_ms=min(math.ceil(looked.load_s * 1000), _MOST_MS),
        )
        return pb.LookupResponse(nodes=[here], stop=reasons.STOP[looked.stop], present=_bitmap(looked.present))

    def _keys(self, session: Session | None, request: Any, number: int = 0, *, allow_none: bool = False) -> bytes:
        """The keys of a request, hashed here if it gives tokens. Raises CallError (BAD_KEYS)."""
        keys: bytes = request.keys
        tokens: bytes = request.tokens
        if keys and tokens:
            raise CallError(common.REASON_BAD_KEYS, "keys and tokens are both given; give one of them")
        if len(keys) % KEY_BYTES:
            raise _bad_keys("keys", len(keys), KEY_BYTES)
        if len(tokens) % _TOKEN_BYTES:
            raise _bad_keys("tokens", len(tokens), _TOKEN_BYTES)
        if keys or (allow_none and not tokens):
            return keys
        if not tokens:
            raise CallError(common.REASON_BAD_KEYS, "neither keys nor tokens are given")
        return self._hashed(session, tokens, number or request.namespace_id)

    def _hashed(self, session: Session | None, tokens: bytes, number: int) -> bytes:
        """The keys of raw tokens. Raises CallError where this session gave no root key, or there are too many."""
        namespace = self._shell.namespace(number)
        root = session.root_keys.get(namespace.number) if session is not None else None
        if root is None:
            raise CallError(
                common.REASON_BAD_KEYS,
                "tokens need a root_key in this session's OpenNamespace; give it, or hash yourself and send keys",
            )
        most = self._shell.config.max_keys * namespace.spec.block_tokens * _TOKEN_BYTES
        if len(tokens) > most:
            raise CallError(common.REASON_LIMIT, f"{len(tokens) // _TOKEN_BYTES} tokens are too many for one call")
        return block_keys(root, tokens, namespace.spec.block_tokens)


def _prompt_tokens(request: pb.AcquireRequest, keys: bytes, block_tokens: int) -> int:
    """The prompt's length where the worker did not tell it."""
    return len(request.tokens) // _TOKEN_BYTES or len(keys) // KEY_BYTES * block_tokens


def _grant(reserved: c.Reserved, grant: c.Grant) -> pb.PartGrant:
    """One part's slots, without the blocks that have this part already."""
    blocks, slots = reserved.blocks, grant.slots
    wanted = slots != NO_SLOT
    if not wanted.all():
        blocks, slots = blocks[wanted], slots[wanted]
    generations = np.full(len(slots), reserved.generation, np.uint64)
    return pb.PartGrant(
        part=grant.part,
        pool=grant.pool,
        blocks=blocks.tobytes(),
        slots=slots.tobytes(),
        generations=generations.tobytes(),
    )


def _counts(counts: Any) -> list[common.ReasonCount]:
    return [common.ReasonCount(reason=reasons.SKIP[skip], count=count) for skip, count in counts.items()]


def _coverage(reservation: Reservation, request: pb.CommitRequest) -> tuple[e.Coverage, ...] | None:
    """What the commit says was written, as ranges of blocks; None for everything granted."""
    if not request.parts:
        return () if reservation.shared else None
    ranges: list[e.Coverage] = []
    for written in request.parts:
        if len(written.blocks) % 4:
            raise CallError(common.REASON_BAD_ARGUMENT, "blocks must be little-endian u32")
        blocks = np.frombuffer(written.blocks, "<u4") if written.blocks else reservation.blocks
        rows = (written.first_head, written.heads or None, written.first_layer, written.layers or None)
        runs = np.split(blocks, np.flatnonzero(np.diff(blocks.astype(np.int64)) != 1) + 1)
        ranges += [e.Coverage(int(run[0]), len(run), written.part, *rows) for run in runs]
    return tuple(ranges)


def _is_over(reply: object) -> bool:
    return type(reply) is c.Refused and reply.reason is Refusal.RESERVATION_EXPIRED


def _require_written(reservation: Reservation, coverage: tuple[e.Coverage, ...] | None) -> None:
    """Every byte that a commit makes visible must have come through WriteBlocks. Raises RESERVATION_INCOMPLETE."""
    namespace = reservation.namespace
    if coverage is None:
        coverage = tuple(e.Coverage(block, 1, part) for part, block in reservation.slots)
    for item in coverage:
        if item.part >= len(namespace.part_bytes):
            raise CallError(common.REASON_BAD_ARGUMENT, f"there is no part {item.part} in this namespace")
        spans = _spans(namespace, item)
        for block in range(item.first_block, item.first_block + item.block_count):
            if (item.part, block) in reservation.slots and not all(
                reservation.is_written(item.part, block, start, end) for start, end in spans
            ):
                raise CallError(
                    common.REASON_RESERVATION_INCOMPLETE,
                    f"part {item.part} of block {block} was not written; the reservation stays, write and commit again",
                    part=item.part, block=block,
                )  # fmt: skip


def _spans(namespace: Namespace, item: e.Coverage) -> list[tuple[int, int]]:
    """The bytes of a part that a coverage means: heads lie behind each other, each with all its layers."""
    head, part = namespace.head_bytes[item.part], namespace.spec.parts[item.part]
    last = part.kv_heads if item.head_count is None else item.first_head + item.head_count
    if not item.first_layer and item.layer_count is None:
        return [(item.first_head * head, last * head)]
    layer = head // max(1, part.layers)
    low = item.first_layer * layer
    high = head if item.layer_count is None else low + item.layer_count * layer
    return [(each * head + low, each * head + high) for each in range(item.first_head, last)]


def _mapped(source: "Future[c.Reply]", change: Any) -> "Future[Any]":
    """A future of `change(result)`; what it raises is its exception."""
    target: Future[Any] = Future()

    def done(resolved: "Future[c.Reply]") -> None:
        try:
            target.set_result(change(resolved.result()))
        except CallError as error:
            target.set_exception(error)

    source.add_done_callback(done)
    return target


def _bitmap(present: npt.NDArray[np.bool_] | None) -> bytes:
    """One bit per key of a foreign namespace, least significant first; empty for others."""
    return b"" if present is None else np.packbits(present, bitorder="little").tobytes()


def _bad_keys(name: str, size: int, unit: int) -> CallError:
    return CallError(common.REASON_BAD_KEYS, f"{name} must be a multiple of {unit} bytes and not empty, got {size}")


def _draining() -> CallError:
    return CallError(common.REASON_DRAINING, "the server is draining and takes no new leases or reservations")
