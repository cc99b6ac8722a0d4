"""The table of sessions."""

import pytest

from prefixcache.server.errors import CallError
from prefixcache.server.sessions import Sessions
from prefixcache.v1 import common_pb2 as pb


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_grpc_sessions_live_by_calls_and_local_ones_by_their_connection() -> None:
    clock = Clock()
    sessions = Sessions(10, clock)
    over_grpc = sessions.open("a", "grpc", 5.0, can_map=False)
    local = sessions.open("b", "local", 5.0, pid=3, process=1, can_map=True)
    clock.now = 4.0
    assert sessions.require(over_grpc.id) is over_grpc
    clock.now = 9.0
    assert sessions.overdue() == []
    clock.now = 9.5
    assert sessions.overdue() == [over_grpc]
    assert sessions.remove(over_grpc)
    assert not sessions.remove(over_grpc)
    assert list(sessions) == [local]


def test_there_is_a_bound_and_unknown_ids_are_told_apart() -> None:
    sessions = Sessions(1)
    sessions.open("a", "grpc", 5.0, can_map=False)
    with pytest.raises(CallError) as refused:
        sessions.open("b", "grpc", 5.0, can_map=False)
    assert refused.value.reason == pb.REASON_LIMIT
    for session_id, reason in ((b"x" * 16, pb.REASON_SESSION_UNKNOWN), (b"", pb.REASON_BAD_ARGUMENT)):
        with pytest.raises(CallError) as refused:
            sessions.require(session_id)
        assert refused.value.reason == reason
