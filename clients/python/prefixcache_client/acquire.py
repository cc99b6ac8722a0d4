"""How a prompt becomes a lease: hash, one call, and the accounts of what was found.

The critical path of a request; kept flat on purpose, because a Python call costs a tenth of a microsecond and a
message field half of one. It must not know sockets or tensors.
"""

import time
from functools import partial
from typing import Final

from prefixcache.identity.keys import KEY_BYTES
from prefixcache.v1 import cache_pb2
from prefixcache_client.coming import Coming
from prefixcache_client.encoding import acquire_request, behind_keys
from prefixcache_client.errors import Failure
from prefixcache_client.ids import new_id
from prefixcache_client.lease import Grant, Lease
from prefixcache_client.link import Link
from prefixcache_client.namespace import Epoch, Namespace, Prompt
from prefixcache_client.reasons import NOT_CACHED, PARTIAL_BLOCK, reason_name
from prefixcache_client.session import Session
from prefixcache_client.transport import ACQUIRE

_MS: Final = 1000

Wish = tuple[int | None, int, float, float, float, float]
"""What a caller wants of a lease: max_tokens, from_token, ttl_s, recompute_s_per_token, timeout_s and load_timeout_s of
Client.acquire.

Plain tuples here and below: one with names takes a microsecond to make."""
_Asked = tuple[int, int]
"""(tokens that are of use, first block wanted)"""
_Parts = tuple[bytes, bytes, bytes]
"""(lease id, keys, fields behind them)"""


def acquire(link: Link, ns: Namespace, prompt: Prompt, wish: Wish) -> Lease:
    """See Client.acquire."""
    max_tokens, from_token, ttl_s, recompute_s_per_token, timeout_s, load_timeout_s = wish
    epoch, form = ns.epoch, ns.form
    size = form.block_tokens
    keys, tokens = ns.hash(prompt, epoch)
    usable = tokens if max_tokens is None or max_tokens > tokens else max(0, max_tokens)
    last = min(len(keys) // KEY_BYTES, usable // size)
    if from_token < 0:
        raise ValueError(f"from_token must not be negative, got {from_token}")
    first = min(from_token // size, last)
    if last <= first or ns.reason_off:
        return _missed(link, ns, (usable, first), ns.reason_off or PARTIAL_BLOCK)
    lease_id = new_id()
    rest = behind_keys(first, tokens, last, int(ttl_s * _MS), int(load_timeout_s * _MS), recompute_s_per_token)
    began = time.monotonic()
    try:
        build = partial(_request, ns, epoch, (lease_id, keys, rest))
        session, answer = link.call(ACQUIRE, cache_pb2.AcquireResponse, build, timeout_s)
    except Failure as failure:
        link.give_back_unseen(lease_id, failure)
        return _missed(link, ns, (usable, first), failure.reason)
    ready, planned = min(answer.ready_blocks, last), min(answer.planned_blocks, last)
    if planned <= first:
        return _missed(link, ns, (usable, first), reason_name(answer.stop) or NOT_CACHED)
    reason = reason_name(answer.stop)
    link.counters.acquired(
        (planned - first) * size, (last - planned) * size, reason or NOT_CACHED, usable - last * size
    )
    grant = Grant(session, lease_id, began + answer.ttl_ms / _MS, answer)
    if ready < planned:
        grant.coming = Coming(session, lease_id, range(ready, planned), began + load_timeout_s)
    return Lease(link, form, planned, first, reason, grant)


def _request(ns: Namespace, epoch: Epoch, parts: _Parts, session: Session, deadline: float) -> bytes:
    lease_id, keys, rest = parts
    number = session.namespaces.get(epoch.fingerprint)
    if number is None:
        number = session.namespace_id(epoch.fingerprint, ns.form, ns.label, deadline)
    return acquire_request(session.session_id, lease_id, number, keys, rest)


def _missed(link: Link, ns: Namespace, asked: _Asked, reason: str) -> Lease:
    usable, first = asked
    looked_up = usable - first * ns.block_tokens
    partial_tokens = looked_up if reason == PARTIAL_BLOCK else looked_up % ns.block_tokens
    link.counters.acquired(0, looked_up - partial_tokens, reason, partial_tokens)
    return Lease(link, ns.form, 0, first, reason, None)
