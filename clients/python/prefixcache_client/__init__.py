"""The prefixcache SDK: reuse of already prefilled KV blocks, for inference workers.

    from prefixcache_client import Client

    client = Client()
    ns = client.namespace(layout=..., weights_digest=...)
    with client.acquire(ns, tokens, max_tokens=len(tokens) - 1) as lease:
        result = lease.copy_to(tensors)
        start = result.tokens if result.ok else 0      # compute from here on
    client.store(ns, tokens, tensors)

Importing it imports numpy and protobuf; gRPC is imported when the local channel cannot be used, torch never.
"""

from prefixcache_client.aio import AsyncClient, AsyncLease
from prefixcache_client.client import Client
from prefixcache_client.errors import LeaseEndedError, WatchRefusedError
from prefixcache_client.events import EventKind, KnownBlocks, WatchEvent
from prefixcache_client.foreign import ForeignCache, ForeignLease
from prefixcache_client.handover import LeaseTicket
from prefixcache_client.lease import Lease
from prefixcache_client.namespace import Namespace, PromptKeys
from prefixcache_client.nodes import Nodes
from prefixcache_client.options import ClientOptions
from prefixcache_client.portions import Portion
from prefixcache_client.results import (
    CopyResult,
    ForeignLookup,
    ForeignStore,
    LookupResult,
    PinResult,
    PrefetchResult,
    StoreResult,
)
from prefixcache_client.served import ServedNamespace
from prefixcache_client.stats import ClientStats
from prefixcache_client.tensors import Blocks, Layers, Pages, Rows
from prefixcache_client.watching import Watch

__all__ = [
    "AsyncClient",
    "AsyncLease",
    "Blocks",
    "Client",
    "ClientOptions",
    "ClientStats",
    "CopyResult",
    "EventKind",
    "ForeignCache",
    "ForeignLease",
    "ForeignLookup",
    "ForeignStore",
    "KnownBlocks",
    "Layers",
    "Lease",
    "LeaseEndedError",
    "LeaseTicket",
    "LookupResult",
    "Namespace",
    "Nodes",
    "Pages",
    "PinResult",
    "Portion",
    "PrefetchResult",
    "PromptKeys",
    "Rows",
    "ServedNamespace",
    "StoreResult",
    "Watch",
    "WatchEvent",
    "WatchRefusedError",
]
