"""Names of the reasons why tokens were not served or blocks not stored.

What belongs here: the mapping between the contract's enum and the short lowercase names people read ("not_cached",
"lease_lost"). The SDK reports a reason as such a name, "" where nothing stopped short. It must not know who
reports what.
"""

from collections.abc import Iterable
from typing import Final

from prefixcache.v1 import common_pb2

NONE: Final = ""
NOT_CACHED: Final = "not_cached"
DEADLINE: Final = "deadline"
SERVER_UNAVAILABLE: Final = "server_unavailable"
CIRCUIT_OPEN: Final = "circuit_open"
LEASE_LOST: Final = "lease_lost"
CHECKSUM_MISMATCH: Final = "checksum_mismatch"
STREAM_TRUNCATED: Final = "stream_truncated"
PARTIAL_BLOCK: Final = "partial_block"
ALREADY_STORED: Final = "already_stored"
RESERVATION_EXPIRED: Final = "reservation_expired"
DYNAMIC_SCALES: Final = "dynamic_scales"
UNUSED: Final = "unused"
INTERNAL: Final = "internal"
# Known to the SDK only: the contract has no number for them because no server ever hears of them.
QUEUE_FULL: Final = "queue_full"
CLIENT_CLOSED: Final = "client_closed"

NEVER_SENT: Final = frozenset({CIRCUIT_OPEN, CLIENT_CLOSED})
"""Reasons of calls that the server has not heard of, so that nothing of them has to be undone."""

_PREFIX: Final = "REASON_"
_NAMES: Final = {value: name.removeprefix(_PREFIX).lower() for name, value in common_pb2.Reason.items()} | {0: NONE}
_VALUES: Final = {name: value for value, name in _NAMES.items()}


def reason_name(value: int) -> str:
    """The name of a reason of the contract; "" for none, "reason_NN" for one this release does not know."""
    name = _NAMES.get(value)
    return f"reason_{value}" if name is None else name


def reason_value(name: str) -> common_pb2.Reason.ValueType:
    """The contract's value of `name`; REASON_UNSPECIFIED for names that only the SDK uses."""
    return common_pb2.Reason.ValueType(_VALUES.get(name, 0))


def count_reasons(counts: Iterable[common_pb2.ReasonCount]) -> dict[str, int]:
    """{name: count} of a repeated ReasonCount, equal reasons added up."""
    added: dict[str, int] = {}
    for item in counts:
        name = reason_name(item.reason)
        added[name] = added.get(name, 0) + item.count
    return added
