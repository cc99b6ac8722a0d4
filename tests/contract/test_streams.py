"""ReadBlocks and WriteBlocks: bytes of workers that cannot map the pools."""

import secrets
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from prefixcache.server.app import Daemon
from prefixcache.server.errors import CallError
from prefixcache.server.streams import StreamCalls
from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common
from tests.contract.conftest import BLOCK_TOKENS, Worker, namespace_spec, new_id, new_keys, start_daemon, stop_daemon
from tests.contract.drivers import Failure, GrpcDriver, LocalDriver, grpc_failure, raw
from tests.e2e.processes import wait_until

MIB = 1 << 20


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Blocks of more than 1 MiB need more room than other tests."""
    daemon = start_daemon(tmp_path_factory.mktemp("daemon"), host_bytes="64MiB")
    yield daemon
    stop_daemon(daemon)


@pytest.fixture
def driver(daemon: Daemon) -> Iterator[GrpcDriver]:
    driver = GrpcDriver(f"unix:{daemon.config.socket}")
    yield driver
    driver.close()


def large_spec() -> common.NamespaceSpec:
    """Two parts: 1.25 MiB, so that it takes two pieces, and 4 KiB."""
    groups = [
        common.LayerGroup(kind=common.GROUP_KIND_FULL, layers=2, kv_heads=2, k_bytes=10 << 10, v_bytes=10 << 10),
        common.LayerGroup(kind=common.GROUP_KIND_FULL, layers=1, kv_heads=1, k_bytes=128, v_bytes=128),
    ]
    parts = [
        common.Part(group=0, layers=2, size_bytes=2 * 2 * BLOCK_TOKENS * (20 << 10)),
        common.Part(group=1, layers=1, size_bytes=BLOCK_TOKENS * 256),
    ]
    return namespace_spec(groups=groups, parts=parts)


def write(driver: GrpcDriver, messages: list[pb.WriteBlocksRequest]) -> int:
    """Send a stream; the bytes that the server says came. Raises Failure."""
    method = driver.channel.stream_unary(
        "/prefixcache.v1.CacheService/WriteBlocks",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=pb.WriteBlocksResponse.FromString,
    )
    try:
        answer: pb.WriteBlocksResponse = method(iter(messages), timeout=20)
    except grpc.RpcError as error:
        raise grpc_failure(error) from error
    return answer.bytes


def read(driver: GrpcDriver, request: pb.ReadBlocksRequest) -> dict[tuple[int, int], bytes]:
    """The bytes of each (part, block) of a stream. Raises Failure."""
    method = driver.channel.unary_stream(
        "/prefixcache.v1.CacheService/ReadBlocks",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=pb.ReadBlocksResponse.FromString,
    )
    found: dict[tuple[int, int], bytes] = {}
    try:
        for piece in method(request, timeout=20):
            assert 0 < len(piece.data) <= MIB
            before = found.setdefault((piece.part, piece.block), b"")
            assert piece.offset == len(before)
            found[piece.part, piece.block] = before + piece.data
    except grpc.RpcError as error:
        raise grpc_failure(error) from error
    return found


def pieces(part: int, block: int, data: bytes) -> list[pb.WriteBlocksRequest]:
    """A part's bytes in pieces of at most 1 MiB."""
    return [
        pb.WriteBlocksRequest(part=part, block=block, offset=offset, data=data[offset : offset + MIB])
        for offset in range(0, len(data), MIB)
    ]


def filled(worker: Worker, reservation: bytes, blocks: int) -> dict[tuple[int, int], bytes]:
    """Write random bytes into all blocks and commit them."""
    sizes = [part.size_bytes for part in worker.spec.parts]
    content = {(part, block): secrets.token_bytes(size) for block in range(blocks) for part, size in enumerate(sizes)}
    first = pb.WriteBlocksRequest(session=worker.session, reservation=reservation)
    messages = [piece for (part, block), data in content.items() for piece in pieces(part, block, data)]
    assert write(as_grpc(worker), [first, *messages]) == sum(map(len, content.values()))
    assert worker.commit(reservation).committed_blocks == blocks
    return content


def as_grpc(worker: Worker) -> GrpcDriver:
    assert isinstance(worker.driver, GrpcDriver)
    return worker.driver


def test_bytes_written_are_the_bytes_read(driver: GrpcDriver) -> None:
    worker = Worker(driver, large_spec())
    keys, reservation, lease = new_keys(2), new_id(), new_id()
    worker.reserve(reservation, keys)
    content = filled(worker, reservation, 2)
    assert worker.acquire(keys, lease=lease).planned_blocks == 2
    everything = pb.ReadBlocksRequest(session=worker.session, lease=lease)
    assert read(driver, everything) == content
    second = pb.ReadBlocksRequest(session=worker.session, lease=lease, first_block=1, blocks=1, part_mask=0b10)
    assert read(driver, second) == {(1, 1): content[1, 1]}
    worker.release(lease, 2)
    with pytest.raises(Failure) as refused:
        read(driver, everything)
    assert refused.value.reason == common.REASON_LEASE_UNKNOWN


def test_a_truncated_stream_keeps_the_slots_and_can_be_repeated(driver: GrpcDriver) -> None:
    worker = Worker(driver, large_spec())
    keys, reservation = new_keys(1), new_id()
    worker.reserve(reservation, keys)
    first = pb.WriteBlocksRequest(session=worker.session, reservation=reservation)
    with pytest.raises(Failure) as refused:
        write(driver, [first, *pieces(0, 0, bytes(worker.spec.parts[0].size_bytes))[:1]])
    assert refused.value.reason == common.REASON_STREAM_TRUNCATED
    with pytest.raises(Failure) as refused:
        worker.commit(reservation)
    assert refused.value.reason == common.REASON_RESERVATION_INCOMPLETE
    filled(worker, reservation, 1)
    assert worker.acquire(keys).planned_blocks == 1


def test_an_empty_stream_is_truncated(driver: GrpcDriver) -> None:
    with pytest.raises(Failure) as refused:
        write(driver, [])
    assert refused.value.reason == common.REASON_STREAM_TRUNCATED


def test_a_cancelled_stream_keeps_the_slots(driver: GrpcDriver, daemon: Daemon) -> None:
    worker = Worker(driver, large_spec())
    reservation = new_id()
    worker.reserve(reservation, new_keys(1))
    method = raw(driver.channel).stream_unary("/prefixcache.v1.CacheService/WriteBlocks")
    first = pb.WriteBlocksRequest(session=worker.session, reservation=reservation).SerializeToString()

    def messages() -> Iterator[bytes]:
        yield first
        call.cancel()

    call: Any = method.future(messages(), timeout=20)
    with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
        call.result()
    filled(worker, reservation, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"part": 7}, {"block": 9}, {"offset": 4096 * 400}, {"data": b""}, {"data": bytes(MIB + 1)},
        {"offset": (1 << 64) - 1},
    ],
)  # fmt: skip
def test_a_piece_outside_what_was_granted_is_refused(driver: GrpcDriver, change: dict[str, Any]) -> None:
    worker = Worker(driver, large_spec())
    reservation = new_id()
    worker.reserve(reservation, new_keys(1))
    first = pb.WriteBlocksRequest(session=worker.session, reservation=reservation)
    piece = pb.WriteBlocksRequest(**{"part": 0, "block": 0, "offset": 0, "data": b"x", **change})
    with pytest.raises(Failure) as refused:
        write(driver, [first, piece])
    assert refused.value.reason == common.REASON_BAD_ARGUMENT


def test_only_the_owner_reads_and_writes(driver: GrpcDriver) -> None:
    owner = Worker(driver, large_spec())
    stranger = Worker(driver, owner.spec)
    keys, reservation, lease = new_keys(1), new_id(), new_id()
    owner.reserve(reservation, keys)
    first = pb.WriteBlocksRequest(session=stranger.session, reservation=reservation, data=b"x")
    with pytest.raises(Failure) as refused:
        write(driver, [first])
    assert refused.value.reason == common.REASON_NOT_YOURS
    filled(owner, reservation, 1)
    owner.acquire(keys, lease=lease)
    with pytest.raises(Failure) as refused:
        read(driver, pb.ReadBlocksRequest(session=stranger.session, lease=lease))
    assert refused.value.reason == common.REASON_NOT_YOURS
    owner.release(lease, 1)


def test_a_lease_that_ends_while_it_is_read_is_lost_not_wrong(driver: GrpcDriver, daemon: Daemon) -> None:
    worker = Worker(driver, large_spec())
    keys, reservation, lease = new_keys(2), new_id(), new_id()
    worker.reserve(reservation, keys)
    filled(worker, reservation, 2)
    worker.acquire(keys, lease=lease)
    # The server's own stream, piece by piece: gRPC would have sent an unknown number of them ahead.
    request = pb.ReadBlocksRequest(session=worker.session, lease=lease)
    stream = StreamCalls(daemon.shell).read_blocks(daemon.shell.sessions.require(worker.session), request)
    next(stream)
    worker.release(lease, 0)
    with pytest.raises(CallError) as lost:
        next(stream)
    assert lost.value.reason == common.REASON_LEASE_LOST


def test_streams_have_a_bound_and_unary_calls_go_on(tmp_path: Any) -> None:
    daemon = start_daemon(tmp_path, max_streams=1, grpc_threads=1)
    driver = GrpcDriver(f"unix:{daemon.config.socket}")
    try:
        worker = Worker(driver)
        worker.reserve(reservation := new_id(), new_keys(1))
        first = pb.WriteBlocksRequest(session=worker.session, reservation=reservation, data=b"x" * 16)
        begun, gate = threading.Event(), threading.Event()

        def slow() -> Iterator[bytes]:
            yield first.SerializeToString()
            begun.set()
            gate.wait(20)

        stream = raw(driver.channel).stream_unary("/prefixcache.v1.CacheService/WriteBlocks")
        running = stream.future(slow(), timeout=20)
        assert begun.wait(20)
        # The first stream may not have reached its handler yet.
        assert wait_until(lambda: outcome_of_write(driver, first) == common.REASON_LIMIT)
        driver.call("KeepAlive", pb.KeepAliveRequest(session=worker.session))
        gate.set()
        with pytest.raises(grpc.RpcError):
            running.result()
    finally:
        driver.close()
        stop_daemon(daemon)


def outcome_of_write(driver: GrpcDriver, message: pb.WriteBlocksRequest) -> int:
    """The reason of a refused stream, 0 when it was taken."""
    try:
        write(driver, [message])
    except Failure as failure:
        return failure.reason
    return 0


def test_a_local_session_may_write_through_the_server_as_well(driver: GrpcDriver, daemon: Daemon) -> None:
    """A worker that reached the local channel but may not map memory needs no second session."""
    worker = Worker(LocalDriver(daemon.place.local_path), large_spec())
    keys, reservation, lease = new_keys(1), new_id(), new_id()
    worker.reserve(reservation, keys)
    data = [secrets.token_bytes(part.size_bytes) for part in worker.spec.parts]
    first = pb.WriteBlocksRequest(session=worker.session, reservation=reservation)
    write(driver, [first, *pieces(0, 0, data[0]), *pieces(1, 0, data[1])])
    assert worker.commit(reservation).committed_blocks == 1
    worker.acquire(keys, lease=lease)
    found = read(driver, pb.ReadBlocksRequest(session=worker.session, lease=lease))
    assert found == {(0, 0): data[0], (1, 0): data[1]}
    worker.release(lease, 1)
    worker.driver.close()
