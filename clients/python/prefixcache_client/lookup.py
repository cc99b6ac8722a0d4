"""What is cached of a prompt, without leasing it."""

from prefixcache.v1 import cache_pb2
from prefixcache_client.errors import Failure
from prefixcache_client.link import Build, Link
from prefixcache_client.namespace import Namespace, Prompt
from prefixcache_client.reasons import reason_name
from prefixcache_client.results import LookupResult
from prefixcache_client.served import ServedNamespace
from prefixcache_client.session import Session
from prefixcache_client.transport import LOOKUP

_TIERS = ("gpu", "host", "disk", "peer")


def lookup(link: Link, ns: Namespace | ServedNamespace, prompt: Prompt, timeout_s: float) -> LookupResult:
    """See Client.lookup."""
    if isinstance(ns, ServedNamespace):
        request = cache_pb2.LookupRequest(fingerprint=ns.fingerprint, keys=ns.hash(prompt).keys)
        return _ask(link, lambda session, deadline: _in_session(request, session), timeout_s)
    epoch = ns.epoch
    request = cache_pb2.LookupRequest(keys=ns.hash(prompt, epoch).keys)
    if ns.reason_off:
        return LookupResult(0, reason=ns.reason_off)

    def build(session: Session, deadline: float) -> bytes:
        request.session = session.session_id
        request.namespace_id = session.namespace_id(epoch.fingerprint, ns.form, ns.label, deadline)
        return request.SerializeToString()

    return _ask(link, build, timeout_s)


def _in_session(request: cache_pb2.LookupRequest, session: Session) -> bytes:
    request.session = session.session_id
    return request.SerializeToString()


def _ask(link: Link, build: Build, timeout_s: float) -> LookupResult:
    try:
        _, answer = link.call(LOOKUP, cache_pb2.LookupResponse, build, timeout_s)
    except Failure as failure:
        return LookupResult(0, reason=failure.reason)
    nodes = {node.node: node.tokens for node in answer.nodes}
    load_s = _here(answer).load_ms / 1000
    return LookupResult(nodes.pop("", 0), tiers_here(answer), nodes, reason_name(answer.stop), load_s)


def tiers_here(answer: cache_pb2.LookupResponse) -> dict[str, int]:
    """Tokens by tier on the node that answered."""
    here = _here(answer)
    return {tier: count for tier in _TIERS if (count := getattr(here.tiers, tier))}


def _here(answer: cache_pb2.LookupResponse) -> cache_pb2.NodeMatch:
    return next((node for node in answer.nodes if not node.node), cache_pb2.NodeMatch())
