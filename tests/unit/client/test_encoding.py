"""What is put together from remembered pieces is what protobuf writes, byte for byte."""

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.v1 import cache_pb2 as pb
from prefixcache_client.encoding import LEASE_BYTES, acquire_request, behind_keys

numbers = st.one_of(st.integers(0, 3), st.integers(126, 129), st.integers(16_382, 16_386), st.integers(0, 0xFFFF_FFFF))
ids = st.binary(min_size=LEASE_BYTES, max_size=LEASE_BYTES)
seconds = st.floats(0.001, 10) | st.just(0.0)


@given(st.just(b"") | ids, ids, numbers, st.integers(1, 700), numbers, numbers, numbers, numbers, numbers, seconds)
def test_an_acquire_request_is_what_protobuf_writes(
    session: bytes,
    lease: bytes,
    namespace: int,
    blocks: int,
    first: int,
    tokens: int,
    last: int,
    ttl: int,
    wait: int,
    cost: float,
) -> None:
    keys = bytes(blocks * 32 - 1) + b"k"
    rest = behind_keys(first, tokens, last, ttl, wait, cost)
    message = pb.AcquireRequest(
        session=session, lease=lease, namespace_id=namespace, keys=keys, from_block=first, prompt_tokens=tokens,
        max_blocks=last, ttl_ms=ttl, deadline_ms=wait, recompute_s_per_token=cost,
    )  # fmt: skip
    written = acquire_request(session, lease, namespace, keys, rest)
    assert written == message.SerializeToString()
