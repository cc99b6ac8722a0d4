"""The request of Acquire as bytes, without making a message each time.

Rules: what is written here is byte for byte what protobuf would write, and a test holds it to that. Protobuf writes the
fields of a message in the order of their numbers; all but the lease and the keys come again and again, so protobuf
writes them once and they are remembered. It must not know where a request goes.
"""

from functools import lru_cache
from typing import Final

from prefixcache.v1 import cache_pb2

LEASE_BYTES: Final = 16
_REMEMBERED: Final = 1024


def acquire_request(session: bytes, lease: bytes, namespace_id: int, keys: bytes, rest: bytes) -> bytes:
    """A serialised AcquireRequest. `lease`: LEASE_BYTES; `keys`: not empty; `rest`: the fields behind the keys."""
    before, between = _around_lease(session, namespace_id, len(keys))
    return b"".join((before, lease, between, keys, rest))


@lru_cache(_REMEMBERED)
def behind_keys(
    from_block: int,
    prompt_tokens: int,
    max_blocks: int,
    ttl_ms: int,
    deadline_ms: int = 0,
    recompute_s_per_token: float = 0.0,
) -> bytes:
    """The fields from `from_block` on."""
    return cache_pb2.AcquireRequest(
        from_block=from_block,
        prompt_tokens=prompt_tokens,
        max_blocks=max_blocks,
        ttl_ms=ttl_ms,
        deadline_ms=deadline_ms,
        recompute_s_per_token=recompute_s_per_token,
    ).SerializeToString()


@lru_cache(_REMEMBERED)
def _around_lease(session: bytes, namespace_id: int, keys_size: int) -> tuple[bytes, bytes]:
    """What stands before the lease's bytes, and between those and the keys'."""
    request = cache_pb2.AcquireRequest(session=session, lease=bytes(LEASE_BYTES))
    before = request.SerializeToString()[:-LEASE_BYTES]
    request = cache_pb2.AcquireRequest(namespace_id=namespace_id, keys=bytes(keys_size))
    return before, request.SerializeToString()[:-keys_size]
