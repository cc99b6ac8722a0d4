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
from prefixcache_client.namespace import Epoch, Namespace, Prompt
from prefixcache_client.reasons import NOT_CACHED, PARTIAL_BLOCK, reason_name
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


class _Ask(NamedTuple):
    """What is asked: blocks `first` to `last` of `usable` tokens, for which a lease of this id is wanted."""

    epoch: Epoch
    keys: bytes
    prompt_tokens: int
    usable: int
    first: int
    last: int
    lease_id: bytes


def acquire(link: Link, ns: Namespace, prompt: Prompt, wish: Wish) -> Lease:
    """See Client.acquire."""
    ask = _ask(ns, prompt, wish)
    if ask.last <= ask.first or ns.reason_off:
        return _missed(link, ns, ask, ns.reason_off or PARTIAL_BLOCK)
    began = time.monotonic()
    try:
        session, answer = link.call(
            ACQUIRE,
            cache_pb2.AcquireResponse,
            lambda session, deadline: _request(session, deadline, ns, ask, wish),
            wish.timeout_s,
        )
    except Failure as failure:
        # The answer may still be under way, and with it a lease; the id is ours, so it can be given back unseen.
        _give_back(link, link.session, ask.lease_id)
        return _missed(link, ns, ask, failure.reason)
    ready = min(answer.ready_blocks, ask.last)
    if ready <= ask.first:
        if answer.planned_blocks > ask.first:
            _give_back(link, session, ask.lease_id)
        return _missed(link, ns, ask, reason_name(answer.stop) or NOT_CACHED)
    reason, size = reason_name(answer.stop) if answer.stop else "", ns.form.block_tokens
    link.counters.acquired(
        (ready - ask.first) * size, (ask.last - ready) * size, reason or NOT_CACHED, ask.usable - ask.last * size
    )
    grant = Grant(session, ask.lease_id, began + answer.ttl_ms / _MS, answer)
    return Lease(link, ns.form, ready, ask.first, reason, grant)


def _ask(ns: Namespace, prompt: Prompt, wish: Wish) -> _Ask:
    epoch, size, max_tokens = ns.epoch, ns.form.block_tokens, wish.max_tokens
    keys, tokens = ns.hash(prompt, epoch)
    usable = tokens if max_tokens is None or max_tokens > tokens else max(0, max_tokens)
    last = min(len(keys) // KEY_BYTES, usable // size)
    if wish.from_token < 0:
        raise ValueError(f"from_token must not be negative, got {wish.from_token}")
    first = min(wish.from_token // size, last)
    return _Ask(epoch, keys, tokens, usable, first, last, os.urandom(LEASE_BYTES))


def _request(session: Session, deadline: float, ns: Namespace, ask: _Ask, wish: Wish) -> bytes:
    number = session.namespaces.get(ask.epoch.fingerprint)
    if number is None:
        number = session.namespace_id(ask.epoch.fingerprint, ns.form, ns.label, deadline)
    request = cache_pb2.AcquireRequest(
        session=session.session_id,
        lease=ask.lease_id,
        namespace_id=number,
        keys=ask.keys,
        prompt_tokens=ask.prompt_tokens,
        max_blocks=ask.last,
    )
    # Fields that are nearly always zero cost more to pass than to leave out.
    if ask.first:
        request.from_block = ask.first
    if wish.ttl_s:
        request.ttl_ms = int(wish.ttl_s * _MS)
    if wish.recompute_s_per_token:
        request.recompute_s_per_token = wish.recompute_s_per_token
    return request.SerializeToString()


def _missed(link: Link, ns: Namespace, ask: _Ask, reason: str) -> Lease:
    looked_up = ask.usable - ask.first * ns.block_tokens
    partial = looked_up if reason == PARTIAL_BLOCK else looked_up % ns.block_tokens
    link.counters.acquired(0, looked_up - partial, reason, partial)
    return Lease(link, ns.form, 0, ask.first, reason, None)


def _give_back(link: Link, session: Session | None, lease_id: bytes) -> None:
    if session is not None:
        request = cache_pb2.ReleaseRequest(session=session.session_id, lease=lease_id)
        link.post(session, RELEASE, request.SerializeToString())
