"""The answer of Acquire as bytes, without making a message.

Rules: what is written here is byte for byte what protobuf would write, and a test holds it to that. It is done for this
one message because it is on every request's path, where a message with its runs costs as much as finding the blocks.
What stands around the slots depends on a few small numbers that come again and again, so those pieces are remembered.
It must not know where an answer goes.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from prefixcache.core.commands import Run

_SLOT_BYTES: Final = 4
_GENERATION_BYTES: Final = 8
_MORE: Final = 128  # the bit of a varint's byte that says another one follows
_REMEMBERED: Final = 2048

TierCounts = tuple[int, int, int, int]


def acquire_response(planned: int, ready: int, runs: Sequence[Run], rest: bytes, present: bytes = b"") -> bytes:
    """A serialised AcquireResponse; `rest` are its fields between the runs and `present` (see `behind_runs`)."""
    pieces = [_counts(planned, ready)]
    for run in runs:
        slots = run.packed_slots
        before, between = _around(run.part, run.pool, run.first_block, len(slots))
        pieces += (before, slots, between, run.packed_generations)
    pieces.append(rest)
    if present:
        pieces.append(_field(8, present))
    return b"".join(pieces)


@lru_cache(_REMEMBERED)
def behind_runs(stop: int, ttl_ms: int, tokens: TierCounts | None) -> bytes:
    """The fields stop, ttl_ms and tokens (None leaves it out)."""
    fields = _number(4, stop) + _number(5, ttl_ms)
    if tokens is not None:
        fields += _field(6, b"".join([_number(place, count) for place, count in enumerate(tokens, 1)]))
    return fields


@lru_cache(_REMEMBERED)
def _counts(planned: int, ready: int) -> bytes:
    return _number(1, planned) + _number(2, ready)


@lru_cache(_REMEMBERED)
def _around(part: int, pool: int, first_block: int, slots_size: int) -> tuple[bytes, bytes]:
    """What stands in a PartRun (a field of the answer) before its slots, and between those and its generations."""
    generations_size = slots_size // _SLOT_BYTES * _GENERATION_BYTES
    before = _number(1, part) + _number(2, pool) + _number(3, first_block) + _tag(4, 2) + _varint(slots_size)
    between = _tag(5, 2) + _varint(generations_size)
    size = len(before) + slots_size + len(between) + generations_size
    return _tag(3, 2) + _varint(size) + before, between


def _number(field: int, value: int) -> bytes:
    """A varint field; nothing for 0, as proto3 has it."""
    return _tag(field, 0) + _varint(value) if value else b""


def _field(field: int, content: bytes) -> bytes:
    return _tag(field, 2) + _varint(len(content)) + content


def _tag(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(value: int) -> bytes:
    """A number from 0 to 2^64 - 1."""
    written = bytearray()
    while value >= _MORE:
        written.append(value & 127 | _MORE)
        value >>= 7
    written.append(value)
    return bytes(written)
