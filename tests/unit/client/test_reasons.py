"""Reasons have one name each, the contract's."""

from prefixcache.v1 import common_pb2
from prefixcache_client import reasons


def test_names_of_the_contract_in_lower_case() -> None:
    assert reasons.reason_name(common_pb2.REASON_POOL_FULL) == "pool_full"
    assert reasons.reason_name(common_pb2.REASON_UNSPECIFIED) == ""
    assert reasons.reason_name(9999) == "reason_9999", "a newer server may know more"


def test_constants_exist_in_the_contract() -> None:
    ours = {"queue_full", "client_closed", "not_in_tensors", ""}
    names = {value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)} - {"REASON_"}
    assert {name for name in names - ours if reasons.reason_value(name) == 0} == set()


def test_back_and_forth() -> None:
    for value in common_pb2.Reason.values():
        assert reasons.reason_value(reasons.reason_name(value)) == value
    assert reasons.reason_value("queue_full") == 0


def test_counts_of_equal_reasons_are_added() -> None:
    counts = [common_pb2.ReasonCount(reason=common_pb2.REASON_POOL_FULL, count=n) for n in (2, 3)]
    assert reasons.count_reasons(counts) == {"pool_full": 5}
