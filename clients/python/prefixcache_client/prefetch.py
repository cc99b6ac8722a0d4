"""Having a prefix brought up from slower tiers ahead of need, without a lease."""

from prefixcache.v1 import admin_pb2
from prefixcache_client.errors import Failure
from prefixcache_client.link import Link
from prefixcache_client.namespace import Namespace, Prompt
from prefixcache_client.reasons import reason_name
from prefixcache_client.results import PrefetchResult
from prefixcache_client.session import Session
from prefixcache_client.transport import PREFETCH


def prefetch(link: Link, ns: Namespace, prompt: Prompt, timeout_s: float) -> PrefetchResult:
    """See Client.prefetch."""
    epoch = ns.epoch
    request = admin_pb2.PrefetchRequest(keys=ns.hash(prompt, epoch).keys)
    if ns.reason_off or not request.keys:
        return PrefetchResult(0, 0, ns.reason_off)

    def build(session: Session, deadline: float) -> bytes:
        request.session = session.session_id
        request.namespace_id = session.namespace_id(epoch.fingerprint, ns.form, ns.label, deadline)
        return request.SerializeToString()

    try:
        _, answer = link.call(PREFETCH, admin_pb2.PrefetchResponse, build, timeout_s)
    except Failure as failure:
        return PrefetchResult(0, 0, failure.reason)
    return PrefetchResult(answer.tokens, answer.ready_tokens, reason_name(answer.stop))
