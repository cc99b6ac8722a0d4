"""Reservations that several sessions fill, over every transport; and the bytes of several processes' portions."""

from collections.abc import Callable

import grpc
import numpy as np
import pytest

from prefixcache.server.app import Daemon
from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common
from tests.contract.conftest import BLOCK_TOKENS, Worker, new_id, new_keys
from tests.contract.drivers import Driver, Failure, GrpcDriver, LocalDriver
from tests.contract.test_calls import write_blocks
from tests.e2e.processes import wait_until

PRECONDITION = 9
HEADS = [pb.WrittenPart(part=0, first_head=head, heads=1) for head in range(2)]


def pair(connect: Callable[[], Driver]) -> tuple[Worker, Worker]:
    """Two sessions in one namespace."""
    first = Worker(connect())
    return first, Worker(connect(), first.spec)


def fill(worker: Worker, ticket: bytes, granted: pb.ReserveResponse) -> None:
    """Over gRPC the server only commits what came through it."""
    if worker.driver.transport == "grpc":
        write_blocks(worker, ticket, granted, 3)


def skipped(daemon: Daemon, label: str) -> int:
    counters = daemon.statistics.snapshot().counters
    return sum(each.value for each in counters if (each.name, each.label) == ("blocks_skipped", label))


def quarantined(daemon: Daemon) -> int:
    return daemon.statistics.snapshot().tiers[0].quarantined_bytes


def refused_as_over(call: Callable[[], object]) -> None:
    with pytest.raises(Failure) as refused:
        call()
    assert (refused.value.code, refused.value.reason) == (PRECONDITION, common.REASON_RESERVATION_EXPIRED)


def test_two_sessions_fill_one_reservation(connect: Callable[[], Driver]) -> None:
    one, other = pair(connect)
    keys, ticket = new_keys(2), new_id()
    granted = one.reserve(ticket, keys, shared=True)
    again = other.reserve(ticket, keys, shared=True)
    assert granted.grants
    assert again.grants == granted.grants
    fill(one, ticket, granted)
    first = one.commit(ticket, parts=HEADS[:1])
    assert (first.committed_blocks, first.done) == (0, False)
    assert one.acquire(keys).planned_blocks == 0
    fill(other, ticket, granted)
    last = other.commit(ticket, parts=HEADS[1:])
    assert (last.committed_blocks, last.done) == (2, True)
    assert one.acquire(keys).planned_blocks == 2
    refused_as_over(lambda: Worker(connect(), one.spec).reserve(ticket, keys, shared=True))


def test_one_that_wrote_nothing_says_so_and_holds_nothing_up(connect: Callable[[], Driver]) -> None:
    one, other = pair(connect)
    keys, ticket = new_keys(2), new_id()
    granted = one.reserve(ticket, keys, shared=True)
    other.reserve(ticket, keys, shared=True)
    assert not other.commit(ticket).done
    fill(one, ticket, granted)
    assert one.commit(ticket, parts=HEADS).committed_blocks == 2


def test_another_session_has_no_part_in_it_unless_it_asks(connect: Callable[[], Driver]) -> None:
    one, other = pair(connect)
    keys, ticket = new_keys(1), new_id()
    one.reserve(ticket, keys, shared=True)
    for call in (lambda: other.commit(ticket, parts=HEADS), lambda: other.abort(ticket)):
        with pytest.raises(Failure) as refused:
            call()
        assert refused.value.reason == common.REASON_NOT_YOURS
    for wrong in ({"keys": new_keys(1), "shared": True}, {"keys": keys}):
        with pytest.raises(Failure) as refused:
            other.reserve(ticket, **wrong)
        assert refused.value.reason == common.REASON_ID_IN_USE
    one.abort(ticket)


@pytest.mark.parametrize("asked", [True, False])
def test_one_gives_up(connect: Callable[[], Driver], daemon: Daemon, *, asked: bool) -> None:
    one, other = pair(connect)
    keys, ticket, before, held = new_keys(2), new_id(), skipped(daemon, "called_off"), quarantined(daemon)
    granted = one.reserve(ticket, keys, shared=True)
    if asked:
        other.reserve(ticket, keys, shared=True)
    request = pb.AbortRequest(session=other.session, reservation=ticket, shared=True)
    other.driver.call("Abort", request)
    assert skipped(daemon, "called_off") == before + 2
    if one.driver.transport == "local":
        assert quarantined(daemon) > held
        refused_as_over(lambda: one.commit(ticket, parts=HEADS[:1]))
    assert quarantined(daemon) == held
    refused_as_over(lambda: one.commit(ticket, parts=HEADS[:1]))
    assert one.acquire(keys).planned_blocks == 0
    assert one.reserve(new_id(), keys).grants, "the keys are free"
    assert granted.grants


def test_one_gives_up_before_anybody_asked(connect: Callable[[], Driver]) -> None:
    one, other = pair(connect)
    ticket = new_id()
    other.driver.call("Abort", pb.AbortRequest(session=other.session, reservation=ticket, shared=True))
    refused_as_over(lambda: one.reserve(ticket, new_keys(1), shared=True))


def test_one_hangs_up(connect: Callable[[], Driver], daemon: Daemon) -> None:
    one, other = pair(connect)
    keys, ticket, before, held = new_keys(2), new_id(), skipped(daemon, "worker_gone"), quarantined(daemon)
    one.reserve(ticket, keys, shared=True)
    other.reserve(ticket, keys, shared=True)
    if other.driver.transport == "local":
        other.driver.close()
    else:
        other.driver.call("CloseSession", pb.CloseSessionRequest(session=other.session))
    assert wait_until(lambda: skipped(daemon, "worker_gone") == before + 2)
    refused_as_over(lambda: one.commit(ticket, parts=HEADS[:1]))
    if one.driver.transport == "local":  # in its process, this one, it may still be writing
        assert quarantined(daemon) > held
        Worker(connect(), one.spec).abort(ticket)
    assert quarantined(daemon) == held
    assert one.acquire(keys).planned_blocks == 0


def test_one_never_comes(daemon: Daemon) -> None:
    driver = LocalDriver(daemon.place.local_path)
    one = Worker(driver)
    keys, ticket, before, held = new_keys(2), new_id(), skipped(daemon, "reservation_expired"), quarantined(daemon)
    granted = one.reserve(ticket, keys, shared=True, ttl_ms=1000)
    assert not one.commit(ticket, parts=HEADS[:1]).done
    assert wait_until(lambda: skipped(daemon, "reservation_expired") == before + 2)
    assert quarantined(daemon) == held
    again = one.reserve(new_id(), keys)
    assert np.frombuffer(again.grants[0].generations, "<u8")[0] > np.frombuffer(granted.grants[0].generations, "<u8")[0]
    driver.close()


def test_nothing_to_write_is_told_to_all(connect: Callable[[], Driver]) -> None:
    one, other = pair(connect)
    keys, ticket = new_keys(1), new_id()
    held = new_id()
    one.reserve(held, keys)
    told = one.reserve(ticket, keys, shared=True)
    one.abort(held)
    assert not told.grants
    assert other.reserve(ticket, keys, shared=True).refused == told.refused, "although there is something by now"


def test_sessions_may_write_layers_of_their_own(connect: Callable[[], Driver]) -> None:
    """Of heads of two layers; over gRPC what was not sent cannot be committed."""
    one, other = pair(connect)
    keys, ticket = new_keys(1), new_id()
    granted = one.reserve(ticket, keys, shared=True)
    other.reserve(ticket, keys, shared=True)
    layers = [pb.WrittenPart(part=0, first_layer=layer, layers=1) for layer in range(2)]
    if isinstance(one.driver, GrpcDriver):
        head, layer = BLOCK_TOKENS * 64 * 2, BLOCK_TOKENS * 64
        first = pb.WriteBlocksRequest(session=one.session, reservation=ticket)
        pieces = [pb.WriteBlocksRequest(part=0, offset=each * head, data=bytes(layer)) for each in range(2)]
        method = one.driver.channel.stream_unary(
            "/prefixcache.v1.CacheService/WriteBlocks",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=pb.WriteBlocksResponse.FromString,
        )
        with pytest.raises(grpc.RpcError):  # a stream ends at a head's end, or what is missing is told
            method(iter([first, *pieces]), timeout=20)
        with pytest.raises(Failure) as refused:
            other.commit(ticket, parts=layers[1:])
        assert refused.value.reason == common.REASON_RESERVATION_INCOMPLETE
    assert not one.commit(ticket, parts=layers[:1]).done
    fill(other, ticket, granted)
    assert other.commit(ticket, parts=layers[1:]).committed_blocks == 1
