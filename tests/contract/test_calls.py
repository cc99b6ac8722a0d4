"""Every call over every transport: the usual way, and each refusal with its code and reason."""

import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from prefixcache.identity.keys import block_keys
from prefixcache.server.app import Daemon
from prefixcache.v1 import admin_pb2 as admin
from prefixcache.v1 import cache_pb2 as pb
from prefixcache.v1 import common_pb2 as common
from tests.contract.conftest import (
    BLOCK_TOKENS,
    Worker,
    namespace_spec,
    new_id,
    new_keys,
    start_daemon,
    stop_daemon,
)
from tests.contract.drivers import Driver, Failure, GrpcDriver, LocalDriver

NOT_FOUND, INVALID, EXISTS, DENIED, EXHAUSTED, PRECONDITION = 5, 3, 6, 7, 8, 9


def store(worker: Worker, daemon: Daemon, keys: bytes, fill: int = 7) -> None:
    """Store blocks of `fill` bytes, through the daemon's own mapping where the session could map."""
    reservation = new_id()
    granted = worker.reserve(reservation, keys)
    if worker.driver.transport == "local":
        for grant in granted.grants:
            for slot in np.frombuffer(grant.slots, "<u4").tolist():
                daemon.memory.pool.slot(slot, worker.spec.parts[grant.part].size_bytes)[:] = fill
    else:
        write_blocks(worker, reservation, granted, fill)
    committed = worker.commit(reservation)
    assert committed.done
    assert committed.committed_blocks == len(keys) // 32


def write_blocks(worker: Worker, reservation: bytes, granted: pb.ReserveResponse, fill: int) -> int:
    """Fill all granted slots over gRPC."""
    assert isinstance(worker.driver, GrpcDriver)
    messages = [pb.WriteBlocksRequest(session=worker.session, reservation=reservation)]
    for grant in granted.grants:
        size = worker.spec.parts[grant.part].size_bytes
        data = bytes([fill]) * size
        messages += [
            pb.WriteBlocksRequest(part=grant.part, block=block, data=data)
            for block in np.frombuffer(grant.blocks, "<u4").tolist()
        ]
    stream = worker.driver.channel.stream_unary(
        "/prefixcache.v1.CacheService/WriteBlocks",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=pb.WriteBlocksResponse.FromString,
    )
    written: pb.WriteBlocksResponse = stream(iter(messages), timeout=20)
    return written.bytes


def test_a_stored_prefix_is_acquired_and_released(worker: Worker, daemon: Daemon) -> None:
    keys = new_keys(5)
    assert worker.acquire(keys).planned_blocks == 0
    store(worker, daemon, keys)
    lease = new_id()
    answer = worker.acquire(keys, lease=lease, prompt_tokens=5 * BLOCK_TOKENS + 3)
    assert (answer.planned_blocks, answer.ready_blocks) == (5, 5)
    assert answer.tokens.host == 5 * BLOCK_TOKENS
    assert answer.stop == common.REASON_UNSPECIFIED
    assert 0 < answer.ttl_ms <= 30_000
    slots = np.concatenate([np.frombuffer(run.slots, "<u4") for run in answer.runs])
    generations = np.concatenate([np.frombuffer(run.generations, "<u8") for run in answer.runs])
    assert len(slots) == len(set(slots.tolist())) == 5
    assert daemon.memory.pool.check_generations(slots, generations).all()
    assert all((daemon.memory.pool.slot(slot, 4096) == 7).all() for slot in slots.tolist())
    worker.release(lease, 5)
    with pytest.raises(Failure) as refused:
        worker.release(lease, 5)
    assert (refused.value.code, refused.value.reason) == (NOT_FOUND, common.REASON_LEASE_UNKNOWN)


def test_blocks_below_from_block_are_neither_planned_nor_counted(worker: Worker, daemon: Daemon) -> None:
    keys = new_keys(6)
    store(worker, daemon, keys)
    before = daemon.statistics.snapshot().tokens.looked_up
    lease = new_id()
    answer = worker.acquire(keys, lease=lease, from_block=2, max_blocks=5)
    assert answer.planned_blocks == 5
    assert [run.first_block for run in answer.runs] == [2]
    assert answer.tokens.host == 3 * BLOCK_TOKENS
    assert answer.stop == common.REASON_UNSPECIFIED
    worker.release(lease, 4)
    assert daemon.statistics.snapshot().tokens.looked_up - before == 4 * BLOCK_TOKENS


def test_a_repeated_acquire_gives_the_same_lease(worker: Worker, daemon: Daemon) -> None:
    keys = new_keys(3)
    store(worker, daemon, keys)
    lease = new_id()
    first, second = worker.acquire(keys, lease=lease), worker.acquire(keys, lease=lease)
    assert first.runs == second.runs
    worker.release(lease, 3)


def test_a_prefix_ends_where_blocks_are_missing(worker: Worker, daemon: Daemon) -> None:
    keys = new_keys(2)
    store(worker, daemon, keys)
    answer = worker.acquire(keys + new_keys(2))
    assert answer.planned_blocks == 2
    assert answer.stop == common.REASON_NOT_CACHED


def test_tokens_are_hashed_where_the_session_gave_a_root_key(connect: Callable[[], Driver], daemon: Daemon) -> None:
    root = secrets.token_bytes(32)
    worker = Worker(connect(), namespace_spec(root_key=root))
    tokens = np.arange(3 * BLOCK_TOKENS + 5, dtype="<u4").tobytes()
    store(worker, daemon, block_keys(root, tokens, BLOCK_TOKENS))
    assert worker.acquire(b"", tokens=tokens).planned_blocks == 3
    request = pb.LookupRequest(session=worker.session, namespace_id=worker.namespace, tokens=tokens)
    assert worker.driver.call("Lookup", request).nodes[0].tokens == 3 * BLOCK_TOKENS
    without = common.NamespaceSpec()
    without.CopyFrom(worker.spec)
    without.root_key = b""
    stranger = Worker(connect(), without)
    with pytest.raises(Failure) as refused:
        stranger.acquire(b"", tokens=tokens)
    assert refused.value.reason == common.REASON_BAD_KEYS


def test_lookup_pins_nothing_and_counts_nothing(worker: Worker, daemon: Daemon) -> None:
    keys = new_keys(4)
    store(worker, daemon, keys)
    before = daemon.statistics.snapshot().tokens
    by_id = pb.LookupRequest(session=worker.session, namespace_id=worker.namespace, keys=keys)
    by_name = pb.LookupRequest(fingerprint=worker.spec.fingerprint, keys=keys)
    for request in (by_id, by_name):
        answer = worker.driver.call("Lookup", request)
        assert answer.nodes[0].tokens == 4 * BLOCK_TOKENS
        assert answer.nodes[0].tiers.host == 4 * BLOCK_TOKENS
    assert daemon.statistics.snapshot().tokens == before


def test_what_is_there_is_not_reserved_again(worker: Worker, daemon: Daemon) -> None:
    keys = new_keys(2)
    store(worker, daemon, keys)
    reservation = new_id()
    granted = worker.reserve(reservation, keys + new_keys(1))
    assert np.frombuffer(granted.grants[0].blocks, "<u4").tolist() == [2]
    assert {(item.reason, item.count) for item in granted.refused} == {(common.REASON_ALREADY_STORED, 2)}
    worker.abort(reservation)
    with pytest.raises(Failure) as refused:
        worker.commit(reservation)
    assert refused.value.reason == common.REASON_RESERVATION_UNKNOWN


def test_two_writers_do_not_get_the_same_key(connect: Callable[[], Driver]) -> None:
    one = Worker(connect())
    other = Worker(connect(), one.spec)
    keys, first, second = new_keys(3), new_id(), new_id()
    one.reserve(first, keys)
    granted = other.reserve(second, keys)
    assert not granted.grants
    assert [(item.reason, item.count) for item in granted.refused] == [(common.REASON_BEING_WRITTEN, 3)]
    one.abort(first)
    assert other.reserve(new_id(), keys).grants


def test_what_belongs_to_one_session_is_refused_to_another(connect: Callable[[], Driver], daemon: Daemon) -> None:
    one = Worker(connect())
    other = Worker(connect(), one.spec)
    keys, lease, reservation = new_keys(2), new_id(), new_id()
    store(one, daemon, keys)
    one.acquire(keys, lease=lease)
    one.reserve(reservation, new_keys(1))
    for attempt in (
        lambda: other.release(lease, 2),
        lambda: other.commit(reservation),
        lambda: other.abort(reservation),
    ):
        with pytest.raises(Failure) as refused:
            attempt()
        assert (refused.value.code, refused.value.reason) == (DENIED, common.REASON_NOT_YOURS)
    one.release(lease, 2)
    one.abort(reservation)


def test_an_id_in_use_for_something_else_is_refused(worker: Worker, daemon: Daemon) -> None:
    keys, other, lease = new_keys(2), new_keys(2), new_id()
    store(worker, daemon, keys)
    store(worker, daemon, other)
    worker.acquire(keys, lease=lease)
    with pytest.raises(Failure) as refused:
        worker.acquire(other, lease=lease)
    assert (refused.value.code, refused.value.reason) == (EXISTS, common.REASON_ID_IN_USE)


@pytest.mark.parametrize(
    ("request_fields", "reason"),
    [
        ({"keys": b"x" * 33}, common.REASON_BAD_KEYS),
        ({"keys": b""}, common.REASON_BAD_KEYS),
        ({"keys": b"", "tokens": b"12345"}, common.REASON_BAD_KEYS),
        ({"keys": b"x" * 32, "tokens": b"1234"}, common.REASON_BAD_KEYS),
        ({"keys": b"", "tokens": b"1234"}, common.REASON_BAD_KEYS),
        ({"keys": b"x" * 32, "lease": b"short"}, common.REASON_BAD_ARGUMENT),
        ({"keys": b"x" * 32, "from_block": 2}, common.REASON_BAD_ARGUMENT),
        ({"keys": b"x" * 32, "namespace_id": 999_999}, common.REASON_NAMESPACE_UNKNOWN),
    ],
)
def test_a_malformed_acquire_is_refused(worker: Worker, request_fields: dict[str, object], reason: int) -> None:
    with pytest.raises(Failure) as refused:
        worker.acquire(**request_fields)  # type: ignore[arg-type]  # that is the point
    assert refused.value.reason == reason
    assert refused.value.code == (NOT_FOUND if reason == common.REASON_NAMESPACE_UNKNOWN else INVALID)
    assert refused.value.message


def test_a_prompt_shorter_than_a_block_is_counted(worker: Worker, daemon: Daemon) -> None:
    before = {item.reason: item.count for item in daemon.statistics.snapshot().tokens.miss}
    assert worker.acquire(b"", prompt_tokens=9).planned_blocks == 0
    after = {item.reason: item.count for item in daemon.statistics.snapshot().tokens.miss}
    assert after[common.REASON_PARTIAL_BLOCK] - before.get(common.REASON_PARTIAL_BLOCK, 0) == 9


@pytest.mark.parametrize(("low", "high"), [(0, 0), (2, 9)])
def test_another_protocol_is_refused(connect: Callable[[], Driver], low: int, high: int) -> None:
    with pytest.raises(Failure) as refused:
        connect().call("OpenSession", pb.OpenSessionRequest(protocol_min=low, protocol_max=high))
    assert (refused.value.code, refused.value.reason) == (PRECONDITION, common.REASON_PROTOCOL_VERSION)


def test_the_same_fingerprint_with_another_layout_is_refused(worker: Worker) -> None:
    group = common.LayerGroup(kind=common.GROUP_KIND_FULL, layers=1, kv_heads=2, k_bytes=32, v_bytes=32)
    part = common.Part(group=0, first_layer=0, layers=1, size_bytes=2 * BLOCK_TOKENS * 64)
    other = namespace_spec(fingerprint=worker.spec.fingerprint, groups=[group], parts=[part])
    with pytest.raises(Failure) as refused:
        worker.driver.call("OpenNamespace", pb.OpenNamespaceRequest(session=worker.session, spec=other))
    assert (refused.value.code, refused.value.reason) == (PRECONDITION, common.REASON_NAMESPACE_MISMATCH)
    again = worker.driver.call("OpenNamespace", pb.OpenNamespaceRequest(session=worker.session, spec=worker.spec))
    assert again.namespace_id == worker.namespace


def test_a_layout_whose_sizes_overflow_is_refused(worker: Worker) -> None:
    most = (1 << 32) - 1
    group = common.LayerGroup(kind=common.GROUP_KIND_FULL, layers=most, kv_heads=most, k_bytes=most, v_bytes=most)
    size = most * most * BLOCK_TOKENS * 2 * most
    part = common.Part(group=0, first_layer=0, layers=most, size_bytes=size % (1 << 64))
    spec = namespace_spec(groups=[group], parts=[part])
    with pytest.raises(Failure) as refused:
        worker.driver.call("OpenNamespace", pb.OpenNamespaceRequest(session=worker.session, spec=spec))
    assert (refused.value.code, refused.value.reason) == (INVALID, common.REASON_BAD_LAYOUT)


def test_a_block_larger_than_the_pool_is_refused(worker: Worker) -> None:
    group = common.LayerGroup(kind=common.GROUP_KIND_FULL, layers=64, kv_heads=64, k_bytes=256, v_bytes=256)
    part = common.Part(group=0, first_layer=0, layers=64, size_bytes=64 * 64 * BLOCK_TOKENS * 512)
    spec = namespace_spec(groups=[group], parts=[part])
    with pytest.raises(Failure) as refused:
        worker.driver.call("OpenNamespace", pb.OpenNamespaceRequest(session=worker.session, spec=spec))
    assert refused.value.reason == common.REASON_TOO_LARGE


def test_an_unknown_session_is_told_to_open_one(connect: Callable[[], Driver]) -> None:
    driver = connect()
    with pytest.raises(Failure) as refused:
        driver.call("KeepAlive", pb.KeepAliveRequest(session=new_id()))
    assert (refused.value.code, refused.value.reason) == (NOT_FOUND, common.REASON_SESSION_UNKNOWN)
    worker = Worker(driver)
    assert driver.call("KeepAlive", pb.KeepAliveRequest(session=worker.session)).ttl_ms > 0


def test_a_message_over_the_limit_is_refused_and_the_next_one_answered(worker: Worker, daemon: Daemon) -> None:
    with pytest.raises(Failure) as refused:
        worker.acquire(bytes(daemon.config.max_message_bytes + 32))
    assert (refused.value.code, refused.value.reason) == (EXHAUSTED, common.REASON_MESSAGE_TOO_LARGE)
    assert worker.acquire(new_keys(1)).planned_blocks == 0


def test_a_commit_of_some_heads_waits_for_the_others(worker: Worker, daemon: Daemon) -> None:
    keys, reservation = new_keys(2), new_id()
    granted = worker.reserve(reservation, keys)
    if worker.driver.transport == "grpc":
        write_blocks(worker, reservation, granted, 3)
    half = pb.WrittenPart(part=0, first_head=0, heads=1)
    with pytest.raises(Failure) as refused:
        worker.commit(reservation, parts=[half])
    assert (refused.value.code, refused.value.reason) == (PRECONDITION, common.REASON_RESERVATION_INCOMPLETE)
    assert not worker.commit(reservation, parts=[half], more=True).done
    assert worker.acquire(keys).planned_blocks == 0
    assert worker.commit(reservation, parts=[pb.WrittenPart(part=0, first_head=1, heads=1)]).done
    assert worker.acquire(keys).planned_blocks == 2


def test_each_namespace_has_its_own_part_of_the_closed_sum(worker: Worker, daemon: Daemon) -> None:
    keys = new_keys(4)
    store(worker, daemon, keys[: 3 * 32])
    lease = new_id()
    worker.acquire(keys, lease=lease, prompt_tokens=4 * BLOCK_TOKENS + 1)
    pending = namespace_tokens(daemon, worker.namespace)
    assert (pending.looked_up, pending.pending, pending.hit.host) == (4 * BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS, 0)
    worker.release(lease, 2)
    ended = namespace_tokens(daemon, worker.namespace)
    misses = {item.reason: item.count for item in ended.miss}
    assert (ended.pending, ended.hit.host) == (0, 2 * BLOCK_TOKENS)
    assert misses == {
        common.REASON_NOT_CACHED: BLOCK_TOKENS, common.REASON_UNUSED: BLOCK_TOKENS, common.REASON_PARTIAL_BLOCK: 1
    }  # fmt: skip


def namespace_tokens(daemon: Daemon, number: int) -> admin.TokenSums:
    """One namespace's part of the sum."""
    return next(space for space in daemon.statistics.snapshot().namespaces if space.namespace_id == number).tokens


def test_an_empty_namespace_makes_room_and_is_opened_anew(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path, max_namespaces=2)
    driver = LocalDriver(daemon.place.local_path)
    worker = Worker(driver)
    for _ in range(2):
        spec = namespace_spec()
        driver.call("OpenNamespace", pb.OpenNamespaceRequest(session=worker.session, spec=spec))
    with pytest.raises(Failure) as refused:
        worker.acquire(new_keys(1))
    assert (refused.value.code, refused.value.reason) == (NOT_FOUND, common.REASON_NAMESPACE_UNKNOWN)
    again = driver.call("OpenNamespace", pb.OpenNamespaceRequest(session=worker.session, spec=worker.spec))
    assert worker.acquire(new_keys(1), namespace_id=again.namespace_id).planned_blocks == 0
    driver.close()
    stop_daemon(daemon)
