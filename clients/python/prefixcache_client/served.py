"""Namespaces as a router sees them: what the daemon's workers have opened, found without a model.

A router holds prompts but no weights, so it cannot compute a fingerprint; it asks for those that are there. What a
prompt's keys are it computes itself, as everybody does.
"""

from dataclasses import dataclass

from prefixcache.identity.keychain import KeyChain
from prefixcache.identity.keys import TOKEN_BYTES, block_keys, pack_tokens, root_key
from prefixcache.v1 import admin_pb2
from prefixcache_client.errors import Failure
from prefixcache_client.link import Link
from prefixcache_client.namespace import Namespace, Prompt, PromptKeys
from prefixcache_client.session import grpc_alone, parse


@dataclass(frozen=True, slots=True)
class ServedNamespace:
    """One namespace of a daemon. `label`: what its workers call it. `root`: where the chains of its prompts begin."""

    fingerprint: bytes
    label: str
    block_tokens: int
    root: bytes

    def hash(self, prompt: Prompt) -> PromptKeys:
        """The keys of a prompt's whole blocks. Raises ValueError or TypeError for tokens that are none."""
        if isinstance(prompt, PromptKeys):
            return prompt
        if isinstance(prompt, KeyChain):
            return PromptKeys(prompt.keys, prompt.token_count)
        packed = pack_tokens(prompt)
        return PromptKeys(block_keys(self.root, packed, self.block_tokens), len(packed) // TOKEN_BYTES)


def fingerprint_of(namespace: Namespace | ServedNamespace | bytes) -> bytes:
    """Whatever a namespace is named by. A worker's own is that of its weights epoch now."""
    if isinstance(namespace, bytes):
        return namespace
    return namespace.fingerprint if isinstance(namespace, ServedNamespace) else namespace.epoch.fingerprint


def served_namespaces(
    link: Link, tenant_key: bytes | None, cache_salt: bytes, timeout_s: float
) -> list[ServedNamespace]:
    """See Client.served_namespaces."""
    from prefixcache_client.grpc_transport import GET_STATS

    try:
        transport = grpc_alone(link.address)
        try:
            answer = transport.call(GET_STATS, b"", timeout_s)
        finally:
            transport.close()
        stats = parse(admin_pb2.GetStatsResponse, answer)
    except Failure as failure:
        link.counters.failed(failure.reason)
        return []
    return [
        ServedNamespace(
            each.fingerprint,
            each.label,
            each.block_tokens,
            root_key(each.fingerprint, tenant_key=tenant_key, cache_salt=cache_salt),
        )
        for each in stats.namespaces
    ]
