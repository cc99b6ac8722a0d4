"""The host's daemon as a BlockStore, through the SDK.

Rules:
1. The SDK never fails a request for the cache's sake; what it answers instead is passed on as it is.
2. Only names are translated here. It must not know models or caches.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefixcache.identity.fingerprint import NamespaceIdentity
from prefixcache.identity.keys import KEY_BYTES
from prefixcache_client import Blocks, Client, Lease, Namespace, PromptKeys
from prefixcache_client.store import Priority
from prefixcache_transformers.block_store import PartBlocks

__all__ = ["Daemon"]


class Daemon:
    """Opens namespaces at the daemon; what `PrefixCache` takes as `open_store`."""

    def __init__(
        self,
        client: Client | None = None,
        *,
        tenant_key: bytes | None = None,
        cache_salt: bytes = b"",
        label: str = "",
        priority: Priority = "normal",
    ) -> None:
        """`client`: None makes one for the default address. `tenant_key`: None or 32 secret bytes; without it anybody
        who can guess a prompt can find its blocks. `label` is shown by `prefixcache status`. `priority` of what is
        stored: "low" leaves memory first, "high" last."""
        self.client = client or Client()
        self._tenant_key = tenant_key
        self._cache_salt = cache_salt
        self._label = label
        self._priority = priority

    def __call__(self, identity: NamespaceIdentity) -> tuple[bytes, DaemonStore]:
        """The root key and the store of a namespace; makes no call."""
        namespace = Namespace(
            identity, tenant_key=self._tenant_key, cache_salt=self._cache_salt, label=self._label
        )  # fmt: skip
        return namespace.epoch.root, DaemonStore(self.client, namespace, self._priority)


class DaemonStore:
    """Blocks of one namespace."""

    def __init__(self, client: Client, namespace: Namespace, priority: Priority = "normal") -> None:
        self._client = client
        self._priority = priority
        self._namespace = namespace

    def acquire(self, keys: bytes, prompt_tokens: int) -> DaemonLease:
        """A lease on the longest restorable prefix, possibly of 0 blocks."""
        whole = len(keys) // KEY_BYTES * self._namespace.block_tokens
        lease = self._client.acquire(self._namespace, PromptKeys(keys, max(prompt_tokens, whole)))
        return DaemonLease(lease, self._namespace.block_tokens)

    def store(self, keys: bytes, parts: Sequence[PartBlocks]) -> int:
        """Store blocks that are missing. Returns how many became visible."""
        prompt = PromptKeys(keys, len(keys) // KEY_BYTES * self._namespace.block_tokens)
        tensors = [Blocks(blocks.tensor, blocks.part, blocks.first_block) for blocks in parts]
        return self._client.store(self._namespace, prompt, tensors, priority=self._priority).stored_blocks


class DaemonLease:
    """A lease of the SDK."""

    def __init__(self, lease: Lease, block_tokens: int) -> None:
        self._lease = lease
        self._block_tokens = block_tokens

    @property
    def blocks(self) -> int:
        """Length of the restorable prefix, in blocks."""
        return self._lease.blocks

    def first_block(self, part: int) -> int:
        """The first block of this part that the lease holds."""
        return self._lease.parts(part).start

    def copy_to(self, targets: Sequence[PartBlocks]) -> bool:
        """Copy blocks into the targets. False: the bytes must not be used."""
        tensors = [Blocks(blocks.tensor, blocks.part, blocks.first_block) for blocks in targets]
        return self._lease.copy_to(tensors).ok

    def release(self, used_blocks: int) -> None:
        """End the lease and tell how many blocks from block 0 were used."""
        self._lease.release(used_blocks * self._block_tokens)
