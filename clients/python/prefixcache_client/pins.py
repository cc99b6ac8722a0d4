"""Pins: what a caller knows about prompts that the cache cannot.

None is needed for a hit, so nothing here raises because of the cache; the result says what became of it.
"""

from typing import Final

from prefixcache.v1 import admin_pb2
from prefixcache_client.errors import Failure
from prefixcache_client.link import Link
from prefixcache_client.namespace import Namespace, Prompt
from prefixcache_client.results import PinResult
from prefixcache_client.session import Session
from prefixcache_client.transport import PIN, UNPIN

MAX_TTL_S: Final = 10 * 365 * 86_400.0


def pin(link: Link, ns: Namespace, prompt: Prompt, label: str, ttl_s: float | None) -> PinResult:
    """See Client.pin. ttl_s: 0 takes the server's default, None is for ever."""
    epoch = ns.epoch
    request = admin_pb2.PinRequest(fingerprint=epoch.fingerprint, keys=ns.hash(prompt, epoch).keys, label=label)
    if ttl_s is None:
        request.forever = True
    else:
        request.ttl_ms = int(ttl_s * 1000)
    if ns.reason_off:
        return PinResult(b"", 0, 0, 0, ns.reason_off)

    def build(session: Session, deadline: float) -> bytes:
        session.namespace_id(epoch.fingerprint, ns.form, ns.label, deadline)  # a namespace nobody opened is unknown
        request.session = session.session_id
        return request.SerializeToString()

    try:
        _, answer = link.call(PIN, admin_pb2.PinResponse, build, link.options.store_timeout_s)
    except Failure as failure:
        return PinResult(b"", 0, 0, 0, failure.reason)
    return PinResult(answer.pin, answer.tokens, answer.wanted_tokens, answer.size_bytes)


def unpin(link: Link, name: bytes) -> str:
    """See Client.unpin."""

    def build(session: Session, _: float) -> bytes:
        return admin_pb2.UnpinRequest(pin=name, session=session.session_id).SerializeToString()

    try:
        link.call(UNPIN, admin_pb2.UnpinResponse, build, link.options.store_timeout_s)
    except Failure as failure:
        return failure.reason
    return ""
