"""The answer of Acquire as bytes, without making a message each time.

Rules: what is written here is byte for byte what protobuf would write, and a test holds it to that. It is done for this
one message because it is on every request's path, where a message with its runs costs as much as finding the blocks.
Protobuf writes fields in the order of their numbers; all but slots and generations come again and again, so protobuf
writes them once and they are remembered. It must not know where an answer goes.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from prefixcache.core.commands import Run
from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common

_REMEMBERED: Final = 2048

TierCounts = tuple[int, int, int, int]


def acquire_response(planned: int, ready: int, runs: Sequence[Run], rest: bytes, present: bytes = b"") -> bytes:
    """A serialised AcquireResponse; `rest` are its fields between the runs and `present` (see `behind_runs`)."""
    pieces = [_before_runs(planned, ready)]
    for run in runs:
        slots = run.packed_slots
        before, between = _around_slots(run.part, run.pool, run.first_block, len(slots))
        pieces += (before, slots, between, run.packed_generations)
    pieces.append(rest)
    if present:
        pieces.append(pb.AcquireResponse(present=present).SerializeToString())
    return b"".join(pieces)


@lru_cache(_REMEMBERED)
def behind_runs(stop: common.Reason.ValueType, ttl_ms: int, tokens: TierCounts | None) -> bytes:
    """The fields stop, ttl_ms and tokens (None leaves it out)."""
    response = pb.AcquireResponse(stop=stop, ttl_ms=ttl_ms)
    if tokens is not None:
        gpu, host, disk, peer = tokens
        response.tokens.CopyFrom(common.TierTokens(gpu=gpu, host=host, disk=disk, peer=peer))
    return response.SerializeToString()


@lru_cache(_REMEMBERED)
def _before_runs(planned: int, ready: int) -> bytes:
    return pb.AcquireResponse(planned_blocks=planned, ready_blocks=ready).SerializeToString()


@lru_cache(_REMEMBERED)
def _around_slots(part: int, pool: int, first_block: int, slots_size: int) -> tuple[bytes, bytes]:
    """What stands in one of the runs before its slots, and between those and its generations."""
    slots, generations = bytes(slots_size), bytes(2 * slots_size)
    behind = common.PartRun(generations=generations).SerializeToString()
    run = common.PartRun(part=part, pool=pool, first_block=first_block, slots=slots, generations=generations)
    whole = pb.AcquireResponse(runs=[run]).SerializeToString()
    return whole[: len(whole) - len(behind) - slots_size], behind[: len(behind) - len(generations)]
