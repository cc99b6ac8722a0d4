"""What only gRPC has: health, reflection, the admin service, later rpcs that say so."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from prefixcache.server.app import Daemon
from prefixcache.server.config import Loaded, load
from prefixcache.v1 import admin_pb2, cache_pb2
from prefixcache.v1 import common_pb2 as common
from tests.contract.conftest import BLOCK_TOKENS, Worker, new_id, new_keys, start_daemon, stop_daemon
from tests.contract.drivers import Failure, LocalDriver, grpc_failure, raw
from tests.e2e.processes import wait_until

SERVICES = ("", "prefixcache.v1.CacheService", "prefixcache.v1.AdminService")


@pytest.fixture
def channel(daemon: Daemon) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"unix:{daemon.config.socket}") as channel:
        yield channel


def admin(channel: grpc.Channel, rpc: str, request: Any) -> Any:
    """One admin call. Raises Failure."""
    method = channel.unary_unary(
        f"/prefixcache.v1.AdminService/{rpc}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=getattr(admin_pb2, f"{rpc}Response").FromString,
    )
    try:
        return method(request, timeout=20)
    except grpc.RpcError as error:
        raise grpc_failure(error) from error


def stored(daemon: Daemon, blocks: int) -> tuple[Worker, bytes]:
    """A local worker with blocks in a namespace of its own."""
    worker = Worker(LocalDriver(daemon.place.local_path))
    keys, reservation = new_keys(blocks), new_id()
    worker.reserve(reservation, keys)
    worker.commit(reservation)
    return worker, keys


@pytest.mark.parametrize("service", SERVICES)
def test_health_is_computed_from_the_parts(daemon: Daemon, channel: grpc.Channel, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    assert stub.Check(request, timeout=20).status == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(request, timeout=20)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    daemon.heartbeats.register("a part that never beats", -1.0)
    try:
        assert stub.Check(request, timeout=20).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        daemon.heartbeats.unregister("a part that never beats")
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


def test_an_unknown_service_has_no_health(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    with pytest.raises(grpc.RpcError) as refused:
        stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=20)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_services(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(stub.ServerReflectionInfo(iter([request]), timeout=20))
    names = {item.name for item in answer.list_services_response.service}
    assert names >= {*SERVICES[1:], "grpc.health.v1.Health"}


def test_every_rpc_of_the_contract_is_answered(tmp_path: Path) -> None:
    """None is unknown to the server: that would be UNIMPLEMENTED without our reason."""
    daemon = start_daemon(tmp_path)  # one of the rpcs drains it
    files = (cache_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
    paths = [
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    ]
    assert len(paths) == 24
    with grpc.insecure_channel(f"unix:{daemon.config.socket}") as channel:
        outcomes = {path: outcome(channel, path) for path in paths}
    assert [path for path, (code, reason) in outcomes.items() if code == 12 and reason == 0] == []
    assert daemon.shell.draining
    stop_daemon(daemon)


def outcome(channel: grpc.Channel, path: str) -> tuple[int, int]:
    """(code, reason) of a call with an empty message."""
    try:
        list(raw(channel).stream_stream(path)(iter([b""]), timeout=1 if path.endswith("/WatchEvents") else 20))
    except grpc.RpcError as error:
        failure = grpc_failure(error)
        return failure.code, failure.reason
    return 0, 0


def test_drain_waits_for_what_runs_and_can_end_the_server(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path)
    worker, keys = stored(daemon, 2)
    worker.acquire(keys)
    with grpc.insecure_channel(f"unix:{daemon.config.socket}") as channel:
        answer = admin(channel, "Drain", admin_pb2.DrainRequest(timeout_ms=50))
        assert (answer.leases, answer.reservations) == (1, 0)
        assert not daemon.stopping.is_set()
        worker.driver.close()
        answer = admin(channel, "Drain", admin_pb2.DrainRequest(shutdown=True))
        assert (answer.leases, answer.reservations) == (0, 0)
    assert daemon.stopping.is_set()
    stop_daemon(daemon)


def test_evict_drops_a_subtree_a_namespace_and_everything(daemon: Daemon, channel: grpc.Channel) -> None:
    worker, keys = stored(daemon, 4)
    below = admin_pb2.EvictRequest(fingerprint=worker.spec.fingerprint, keys=keys[:64])
    assert admin(channel, "Evict", below).blocks == 3
    assert worker.acquire(keys).planned_blocks == 1
    kept = admin(channel, "Evict", admin_pb2.EvictRequest(fingerprint=worker.spec.fingerprint))
    assert (kept.blocks, kept.kept) == (0, 1)
    assert admin(channel, "Evict", admin_pb2.EvictRequest()).kept == 0
    with pytest.raises(Failure) as refused:
        admin(channel, "Evict", admin_pb2.EvictRequest(keys=keys))
    assert refused.value.reason == common.REASON_BAD_ARGUMENT
    worker.driver.close()


def test_describe_prefix_tells_where_blocks_lie(daemon: Daemon, channel: grpc.Channel) -> None:
    worker, keys = stored(daemon, 3)
    request = admin_pb2.DescribePrefixRequest(fingerprint=worker.spec.fingerprint, keys=keys + new_keys(1))
    answer = admin(channel, "DescribePrefix", request)
    assert (answer.block_tokens, answer.tokens) == (BLOCK_TOKENS, 4 * BLOCK_TOKENS)
    assert answer.tiers.host == 3 * BLOCK_TOKENS
    assert [list(block.tiers) for block in answer.blocks] == [[common.TIER_HOST]] * 3
    assert [block.leases for block in answer.blocks] == [0, 0, 0]
    worker.acquire(keys[:64])
    worker.acquire(keys)
    answer = admin(channel, "DescribePrefix", request)
    assert [block.leases for block in answer.blocks] == [2, 2, 1]

    def is_idle() -> bool:
        return all(block.idle_s > 0.2 for block in admin(channel, "DescribePrefix", request).blocks)

    assert wait_until(is_idle)
    assert answer.stop == common.REASON_NOT_CACHED
    unknown = admin_pb2.DescribePrefixRequest(fingerprint=bytes(32), keys=keys)
    with pytest.raises(Failure) as refused:
        admin(channel, "DescribePrefix", unknown)
    assert refused.value.reason == common.REASON_NAMESPACE_UNKNOWN
    worker.driver.close()


def test_get_stats_shows_tiers_namespaces_and_sessions(daemon: Daemon, channel: grpc.Channel) -> None:
    worker, keys = stored(daemon, 3)
    lease = new_id()
    worker.acquire(keys, lease=lease)
    stats = admin(channel, "GetStats", admin_pb2.GetStatsRequest())
    assert stats.incarnation == worker.welcome.incarnation
    assert stats.addresses[0] == f"unix://{daemon.config.socket}"
    tier = stats.tiers[0]
    assert tier.capacity_bytes == tier.ready_bytes == daemon.memory.size_bytes
    assert tier.used_bytes >= tier.leased_bytes == 3 * worker.opened.block_bytes
    mine = next(item for item in stats.namespaces if item.fingerprint == worker.spec.fingerprint)
    assert (mine.blocks, mine.block_tokens, mine.block_bytes) == (3, BLOCK_TOKENS, worker.opened.block_bytes)
    assert any(session.leases == 1 and session.transport == "local" for session in stats.sessions)
    hits = stats.tokens.hit
    missed = sum(item.count for item in stats.tokens.miss)
    assert stats.tokens.looked_up == hits.gpu + hits.host + hits.disk + hits.peer + missed + stats.tokens.pending
    worker.driver.close()


def test_blocks_get_their_checksums_in_the_background(daemon: Daemon) -> None:
    worker, _ = stored(daemon, 2)
    table = daemon.planner.state.namespaces[worker.namespace].table
    assert wait_until(lambda: bool(table.parts[0].flags[: table.high_water].all()))
    worker.driver.close()


def test_a_taken_default_http_port_is_no_reason_to_fail(tmp_path: Path) -> None:
    """Nobody asked for 8440: a second daemon on the host takes a free port and says which."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = {"socket": str(tmp_path / "d.sock"), "host_bytes": "8MiB", "drain_timeout": "1ms"}
        loaded = load(flags, environ={})
        config = replace(loaded.config, http=f"127.0.0.1:{port}")
        daemon = Daemon(Loaded(config, loaded.sources))
        daemon.start()
    assert daemon.addresses[-1].startswith("http://127.0.0.1:")
    assert not daemon.addresses[-1].endswith(f":{port}")
    daemon.stop()


def test_flush_without_a_disk_tier_says_so(channel: grpc.Channel) -> None:
    with pytest.raises(Failure) as refused:
        admin(channel, "Flush", admin_pb2.FlushRequest())
    assert refused.value.reason == common.REASON_TIER_OFF
