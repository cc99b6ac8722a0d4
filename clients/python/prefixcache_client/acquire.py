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


def acquire(link: Link, ns: Namespace, prompt: Prompt, wish: Wish) -> Lease:
    """See Client.acquire."""
    max_tokens, from_token, ttl_s, recompute_s_per_token, timeout_s = wish
    epoch, size = ns.epoch, ns.form.block_tokens
    keys, prompt_tokens = ns.hash(prompt, epoch)
    usable = prompt_tokens if max_tokens is None else max(0, min(prompt_tokens, max_tokens))
    last = min(len(keys) // KEY_BYTES, usable // size)
    if from_token < 0:
        raise ValueError(f"from_token must not be negative, got {from_token}")
    first = min(from_token // size, last)
    looked_up = usable - first * size
    if last <= first or ns.reason_off:
        return _missed(link, ns, first, looked_up, ns.reason_off or PARTIAL_BLOCK)
    lease_id = os.urandom(LEASE_BYTES)

    def build(session: Session, deadline: float) -> bytes:
        number = session.namespaces.get(epoch.fingerprint)
        if number is None:
            number = session.namespace_id(epoch.fingerprint, ns.form, ns.label, deadline)
        request = cache_pb2.AcquireRequest(
            session=session.session_id, lease=lease_id, namespace_id=number, keys=keys, prompt_tokens=prompt_tokens
        )
        request.max_blocks = last
        if first:
            request.from_block = first
        if ttl_s:
            request.ttl_ms = int(ttl_s * _MS)
        if recompute_s_per_token:
            request.recompute_s_per_token = recompute_s_per_token
        return request.SerializeToString()

    began = time.monotonic()
    try:
        session, answer = link.call(ACQUIRE, cache_pb2.AcquireResponse, build, timeout_s)
    except Failure as failure:
        # The answer may still be under way, and with it a lease; the id is ours, so it can be given back unseen.
        _give_back(link, link.session, lease_id)
        return _missed(link, ns, first, looked_up, failure.reason)
    ready = min(answer.ready_blocks, last)
    if ready <= first:
        if answer.planned_blocks > first:
            _give_back(link, session, lease_id)
        return _missed(link, ns, first, looked_up, reason_name(answer.stop) or NOT_CACHED)
    reason = reason_name(answer.stop) if answer.stop else ""
    grant = Grant(session, lease_id, began + answer.ttl_ms / _MS, answer)
    missed = (last - ready) * size
    link.counters.acquired((ready - first) * size, missed, reason or NOT_CACHED, usable - last * size)
    return Lease(link, ns.form, ready, first, reason, grant)


def _missed(link: Link, ns: Namespace, first: int, looked_up: int, reason: str) -> Lease:
    partial = looked_up if reason == PARTIAL_BLOCK else looked_up % ns.block_tokens
    link.counters.acquired(0, looked_up - partial, reason, partial)
    return Lease(link, ns.form, 0, first, reason, None)


def _give_back(link: Link, session: Session | None, lease_id: bytes) -> None:
    if session is not None:
        request = cache_pb2.ReleaseRequest(session=session.session_id, lease=lease_id)
        link.post(session, RELEASE, request.SerializeToString())
