"""What is cached of a prompt, without leasing it."""

from prefixcache.v1 import cache_pb2
from prefixcache_client.errors import Failure
from prefixcache_client.link import Link
from prefixcache_client.namespace import Namespace, Prompt
from prefixcache_client.reasons import reason_name
from prefixcache_client.results import LookupResult
from prefixcache_client.session import Session
from prefixcache_client.transport import LOOKUP

_TIERS = ("gpu", "host", "disk", "peer")


def lookup(link: Link, ns: Namespace, prompt: Prompt, timeout_s: float) -> LookupResult:
    """See Client.lookup."""
    epoch = ns.epoch
    request = cache_pb2.LookupRequest(keys=ns.hash(prompt, epoch).keys)
    if ns.reason_off:
        return LookupResult(0, reason=ns.reason_off)

    def build(session: Session, deadline: float) -> bytes:
        request.session = session.session_id
        request.namespace_id = session.namespace_id(epoch.fingerprint, ns.form, ns.label, deadline)
        return request.SerializeToString()

    try:
        _, answer = link.call(LOOKUP, cache_pb2.LookupResponse, build, timeout_s)
    except Failure as failure:
        return LookupResult(0, reason=failure.reason)
    nodes = {node.node: node.tokens for node in answer.nodes}
    return LookupResult(nodes.pop("", 0), tiers_here(answer), nodes, reason_name(answer.stop))


def tiers_here(answer: cache_pb2.LookupResponse) -> dict[str, int]:
    """Tokens by tier on the node that answered."""
    here = next((node for node in answer.nodes if not node.node), cache_pb2.NodeMatch())
    return {tier: count for tier in _TIERS if (count := getattr(here.tiers, tier))}
