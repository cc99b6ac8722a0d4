"""Every reason of the core has one of the contract's."""

from prefixcache.core.commands import Refused
from prefixcache.core.reasons import Kind, Miss, Refusal, Skip
from prefixcache.server import reasons
from prefixcache.server.errors import CODES, Code, reason_name
from prefixcache.v1 import common_pb2 as pb

# Only the executor and the shell's own start can cause these.
INTERNAL = {
    Refusal.COPY_UNKNOWN, Refusal.CHECK_UNKNOWN, Refusal.STALE, Refusal.SNAPSHOT_INVALID, Refusal.SNAPSHOT_NOT_CLEAN,
    Refusal.EVENT_UNKNOWN,
}  # fmt: skip


def test_the_tables_are_whole() -> None:
    assert set(reasons.MISS) == set(Miss)
    assert set(reasons.STOP) == {*Miss, None}
    assert set(reasons.SKIP) == set(Skip)
    assert set(reasons.REFUSAL) == set(Refusal) - INTERNAL
    assert {Code[kind.name] for kind in Kind} <= set(Code)
    assert {code for code in CODES if code < pb.REASON_SESSION_UNKNOWN} <= set(pb.Reason.values())


def test_a_refusal_keeps_its_code_reason_and_facts() -> None:
    error = reasons.refusal(
        Refused(Kind.RESOURCE_EXHAUSTED, Refusal.TOO_MANY, "too many", metadata={"limit": "3"})
    ).to_proto()
    assert (error.code, error.reason, error.message) == (8, pb.REASON_LIMIT, "too many")
    assert error.metadata["limit"] == "3"


def test_what_a_worker_may_say_it_did_not_use() -> None:
    assert reasons.unused(pb.REASON_UNSPECIFIED) is Miss.UNUSED
    assert reasons.unused(pb.REASON_LEASE_LOST) is Miss.LEASE_LOST
    assert reasons.unused(pb.REASON_NOT_CACHED) is reasons.unused(12345) is Miss.CLIENT_ERROR


def test_names_of_reasons() -> None:
    assert reason_name(pb.REASON_POOL_FULL) == "pool_full"
    assert reason_name(9999) == "9999"
