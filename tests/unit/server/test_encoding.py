"""What is written by hand is what protobuf writes, byte for byte."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.core.commands import Run
from prefixcache.server.encoding import acquire_response, behind_runs
from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common

u32 = st.integers(0, 0xFFFF_FFFF)
u64 = st.integers(0, 0xFFFF_FFFF_FFFF_FFFF)
small = st.one_of(st.integers(0, 3), st.integers(126, 129), st.integers(16_382, 16_386), u32)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A run of up to 40, or of some hundred blocks."""
    count = draw(st.one_of(st.integers(0, 40), st.integers(500, 5000)))
    seed = np.random.default_rng(count)
    slots = seed.integers(1 << 32, size=count, dtype=np.uint32).tobytes()
    return Run(draw(small), draw(small), draw(small), slots, seed.bytes(8 * count))


@given(
    small, small, st.lists(runs(), max_size=3), st.integers(0, 40), small,
    st.none() | st.tuples(u64, small, u64, small), st.binary(max_size=300),
)  # fmt: skip
def test_an_acquire_response_is_what_protobuf_writes(
    planned: int, ready: int, parts: list[Run], stop: int, ttl_ms: int, tokens: tuple[int, int, int, int] | None,
    present: bytes,
) -> None:  # fmt: skip
    rest = behind_runs(common.Reason.ValueType(stop), ttl_ms, tokens)
    written = acquire_response(planned, ready, parts, rest, present)
    message = pb.AcquireResponse(planned_blocks=planned, ready_blocks=ready, ttl_ms=ttl_ms, present=present)
    message.stop = common.Reason.ValueType(stop)
    for run in parts:
        message.runs.add(
            part=run.part, pool=run.pool, first_block=run.first_block,
            slots=run.packed_slots, generations=run.packed_generations,
        )  # fmt: skip
    if tokens is not None:
        message.tokens.SetInParent()
        message.tokens.gpu, message.tokens.host, message.tokens.disk, message.tokens.peer = tokens
    assert written == message.SerializeToString()
