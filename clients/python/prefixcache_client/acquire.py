"""How a prompt becomes a lease: hash, one call, and the accounts of what was found.

The critical path of a request; kept flat on purpose, because a Python call costs a tenth of a microsecond and a
message field half of one. It must not know sockets or tensors.
"""

import os
import time
from typing import Final, NamedTuple

from prefixcache.identity.keys import KEY_BYTES
from prefixcache.v1 import cache_pb2
from prefixcache_client.errors import Failure
from prefixcache_client.lease import Grant, Lease
from prefixcache_client.link import Link
from prefixcache_client.namespace import Namespace, Prompt
from prefixcache_client.reasons import PARTIAL_BLOCK, reason_name
from prefixcache_client.runs import leased_runs
from prefixcache_client.session import Session
from prefixcache_client.transport import ACQUIRE, RELEASE

LEASE_BYTES: Final = 16
_MS: Final = 1000


class Wish(NamedTuple):
    """What a caller wants of a lease; see Client.acquire."""

    max_tokens: int | None = None
    from_token: int = 0
    ttl_s: float = 0.0
    recompute_s_per_token: float = 0.0
    timeout_s: float = 1.0


class _Span(NamedTuple):
    """The tokens looked up: `first` and `last` block asked for, and all tokens up to where the caller can use them."""

    first: int
    last: int
    tokens: int


def acquire(link: Link, ns: Namespace, prompt: Prompt, wish: Wish) -> Lease:
    """See Client.acquire."""
    epoch = ns.epoch
    keys, prompt_tokens = ns.hash(prompt, epoch)
    span = _span(ns, wish, len(keys) // KEY_BYTES, prompt_tokens)
    if span.last <= span.first or ns.reason_off:
        return _missed(link, ns, span, ns.reason_off)
    lease_id = os.urandom(LEASE_BYTES)
    request = cache_pb2.AcquireRequest(
        lease=lease_id,
        keys=keys,
        from_block=span.first,
        prompt_tokens=prompt_tokens,
        max_blocks=span.last,
        ttl_ms=int(wish.ttl_s * _MS),
        recompute_s_per_token=wish.recompute_s_per_token,
    )

    def build(session: Session, deadline: float) -> bytes:
        request.session = session.session_id
        request.namespace_id = session.namespace_id(epoch.fingerprint, ns.form, ns.label, deadline)
        return request.SerializeToString()

    began = time.monotonic()
    try:
        session, answer = link.call(ACQUIRE, cache_pb2.AcquireResponse, build, wish.timeout_s)
    except Failure as failure:
        # The answer may still be under way, and with it a lease; the id is ours, so it can be given back unseen.
        _give_back(link, link.session, lease_id)
        return _missed(link, ns, span, failure.reason)
    return _leased(link, ns, span, Grant(session, session.path, lease_id, (), began), answer)


def _leased(link: Link, ns: Namespace, span: _Span, grant: Grant, answer: cache_pb2.AcquireResponse) -> Lease:
    """The lease of an answer; `grant` has no slots yet and says in `ends_at` when the call began."""
    ready, stop = min(answer.ready_blocks, span.last), reason_name(answer.stop)
    if ready <= span.first:
        if answer.planned_blocks > span.first:
            _give_back(link, grant.session, grant.lease)
        return _missed(link, ns, span, stop)
    try:
        grant.runs = leased_runs(ns.form, answer.runs)
    except Failure as failure:
        _give_back(link, grant.session, grant.lease)
        return _missed(link, ns, span, failure.reason)
    grant.ends_at += answer.ttl_ms / _MS
    lease = Lease(link, ns.form, ready, span.first, stop)
    lease.hold(grant)
    hit = (ready - span.first) * ns.block_tokens
    link.counters.acquired(hit, *_shortfall(ns, span, ready, stop))
    return lease


def _span(ns: Namespace, wish: Wish, blocks: int, prompt_tokens: int) -> _Span:
    usable = prompt_tokens if wish.max_tokens is None else max(0, min(prompt_tokens, wish.max_tokens))
    if wish.from_token < 0:
        raise ValueError(f"from_token must not be negative, got {wish.from_token}")
    last = min(blocks, usable // ns.block_tokens)
    return _Span(min(wish.from_token // ns.block_tokens, last), last, usable)


def _missed(link: Link, ns: Namespace, span: _Span, reason: str) -> Lease:
    misses = _shortfall(ns, span, span.first, reason)
    link.counters.acquired(0, *misses)
    return Lease(link, ns.form, 0, span.first, reason or PARTIAL_BLOCK)


def _shortfall(ns: Namespace, span: _Span, ready: int, reason: str) -> tuple[int, str, int]:
    """(tokens of whole blocks not served, why, tokens behind the last whole block)."""
    size = ns.block_tokens
    return (span.last - ready) * size, reason or "not_cached", max(span.tokens - max(span.last, span.first) * size, 0)


def _give_back(link: Link, session: Session | None, lease_id: bytes) -> None:
    if session is not None:
        request = cache_pb2.ReleaseRequest(session=session.session_id, lease=lease_id)
        link.post(session, RELEASE, request.SerializeToString())
