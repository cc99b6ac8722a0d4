"""The daemon as a process: start, signals, neighbours on the same socket, what it leaves behind."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixcache.v1 import admin_pb2, common_pb2
from prefixcache.v1 import cache_pb2 as pb
from tests.contract.conftest import Worker, new_id, new_keys
from tests.contract.drivers import Failure, GrpcDriver, LocalDriver
from tests.e2e.processes import DaemonProcess, wait_until, warm_files

MIB = 1 << 20
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def daemon(folder: Path) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(folder, "--drain-timeout=1ms")
    yield daemon
    daemon.kill()


def stats_of(daemon: DaemonProcess) -> admin_pb2.GetStatsResponse:
    """GetStats over gRPC."""
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        method = channel.unary_unary(
            "/prefixcache.v1.AdminService/GetStats",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=admin_pb2.GetStatsResponse.FromString,
        )
        answer: admin_pb2.GetStatsResponse = method(admin_pb2.GetStatsRequest(), timeout=20)
        return answer


def bytes_held(daemon: DaemonProcess) -> tuple[int, int, int]:
    """Filling, quarantined, used."""
    tier = stats_of(daemon).tiers[0]
    return tier.filling_bytes, tier.quarantined_bytes, tier.used_bytes


def is_serving(daemon: DaemonProcess) -> bool:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=20)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_it_is_ready_soon_and_small_with_a_4_gib_pool(folder: Path) -> None:
    daemon = DaemonProcess(folder, host_bytes="4GiB")
    try:
        assert is_serving(daemon)
        resident = daemon.resident()
        assert resident["RssAnon"] + resident["RssFile"] < 250 * MIB
        # 2 s on an idle machine; the tests may share two cores with a build.
        assert daemon.startup_s < 8
    finally:
        daemon.kill()


def test_its_files_are_for_its_user_only(folder: Path) -> None:
    inside = folder / "new"
    daemon = DaemonProcess(inside)
    try:
        assert inside.stat().st_mode & 0o777 == 0o700
        for path in (daemon.socket, daemon.local):
            assert path.stat().st_mode & 0o177 == 0
        assert daemon.process.stdout is not None
        assert f"unix://{daemon.socket}" in daemon.process.stdout.readline()
    finally:
        assert daemon.terminate() == 0
    assert not daemon.socket.exists()
    assert not daemon.local.exists()


def test_a_second_daemon_on_the_same_socket_is_refused_and_the_first_goes_on(daemon: DaemonProcess) -> None:
    command = [sys.executable, "-m", "prefixcache.server", f"--socket={daemon.socket}", "--host-bytes=8MiB"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert second.returncode == 2
    assert f"another daemon serves {daemon.socket}, pid {daemon.pid}" in second.stderr
    assert is_serving(daemon)


def test_the_socket_of_a_killed_daemon_is_taken_over(daemon: DaemonProcess, folder: Path) -> None:
    daemon.kill()
    assert daemon.socket.exists()
    successor = DaemonProcess(folder)
    try:
        assert is_serving(successor)
    finally:
        successor.kill()


def test_nothing_is_left_in_shared_memory_after_kill_9(daemon: DaemonProcess) -> None:
    client = LocalDriver(str(daemon.local))
    store(Worker(client))
    daemon.kill()
    assert warm_files(daemon) == set()
    assert not Path(f"/proc/{daemon.pid}").exists(), "a memfd lives in no folder: it went with its process"
    with pytest.raises((EOFError, ConnectionError)):
        client.call("KeepAlive", pb.KeepAliveRequest())
    client.close()


def test_sigterm_waits_for_leases_and_the_second_signal_does_not(folder: Path) -> None:
    daemon = DaemonProcess(folder, "--drain-timeout=60s")
    worker = Worker(LocalDriver(str(daemon.local)))
    keys, lease = store(worker), new_id()
    assert worker.acquire(keys, lease=lease).planned_blocks == 2
    daemon.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: stats_of(daemon).health == "degraded")
    with pytest.raises(Failure) as refused:
        worker.acquire(keys)
    assert refused.value.reason == common_pb2.REASON_DRAINING
    with pytest.raises(Failure) as refused:
        worker.reserve(new_id(), new_keys(1))
    assert refused.value.reason == common_pb2.REASON_DRAINING
    assert daemon.process.poll() is None
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait() == 0
    worker.driver.close()


def test_sigterm_ends_at_once_when_the_last_lease_is_released(folder: Path) -> None:
    daemon = DaemonProcess(folder, "--drain-timeout=60s")
    worker = Worker(LocalDriver(str(daemon.local)))
    keys, lease = store(worker), new_id()
    worker.acquire(keys, lease=lease)
    daemon.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: stats_of(daemon).health == "degraded")
    worker.release(lease, 2)
    assert daemon.wait() == 0
    worker.driver.close()


def test_a_worker_killed_while_filling_gives_its_slots_back(daemon: DaemonProcess) -> None:
    child = spawn_worker(daemon, "fill")
    assert stats_of(daemon).tiers[0].filling_bytes > 0
    child.kill()
    child.wait()
    assert wait_until(lambda: bytes_held(daemon) == (0, 0, 0), 5)
    close_pipes(child)


def test_a_worker_killed_while_its_forked_child_holds_the_socket(daemon: DaemonProcess) -> None:
    """The socket stays open in the child, so only the pidfd tells."""
    child = spawn_worker(daemon, "fill-and-fork")
    grandchild = int(child.stdout.readline())  # type: ignore[union-attr]  # it was opened as a pipe
    try:
        child.kill()
        child.wait()
        assert wait_until(lambda: bytes_held(daemon) == (0, 0, 0), 5)
    finally:
        os.kill(grandchild, signal.SIGKILL)
        close_pipes(child)


def test_a_worker_killed_while_reading_gives_its_lease_back(daemon: DaemonProcess) -> None:
    child = spawn_worker(daemon, "read")
    assert stats_of(daemon).tokens.pending > 0
    child.kill()
    child.wait()
    assert wait_until(lambda: stats_of(daemon).tokens.pending == 0, 5)
    missed = {item.reason: item.count for item in stats_of(daemon).tokens.miss}
    assert missed[common_pb2.REASON_WORKER_GONE] == 32
    close_pipes(child)


def test_a_worker_that_only_hangs_up_keeps_its_slots_quarantined_until_it_exits(daemon: DaemonProcess) -> None:
    child = spawn_worker(daemon, "fill-and-hang-up")
    assert wait_until(lambda: stats_of(daemon).tiers[0].quarantined_bytes > 0, 5)
    keys = bytes.fromhex(child.stdout.readline())  # type: ignore[union-attr]  # it was opened as a pipe
    spec = common_pb2.NamespaceSpec.FromString(bytes.fromhex(child.stdout.readline()))  # type: ignore[union-attr]  # as above
    worker = Worker(LocalDriver(str(daemon.local)), spec)
    assert worker.reserve(new_id(), keys).grants, "the keys are free for others at once"
    child.kill()
    child.wait()
    assert wait_until(lambda: stats_of(daemon).tiers[0].quarantined_bytes == 0, 5)
    worker.driver.close()
    close_pipes(child)


@pytest.fixture
def many_files() -> Iterator[None]:
    """A thousand sockets need more than the usual soft limit of 1024 descriptors, here as in the daemon."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_thousand_sessions_at_once(daemon: DaemonProcess) -> None:
    clients = [LocalDriver(str(daemon.local)) for _ in range(1000)]
    hello = pb.OpenSessionRequest(protocol_min=1, protocol_max=1)
    sessions = {client.call("OpenSession", hello).session for client in clients}
    assert len(sessions) == 1000
    over_grpc = GrpcDriver(f"unix:{daemon.socket}")
    sessions |= {over_grpc.call("OpenSession", hello).session for _ in range(1000)}
    assert len(sessions) == 2000
    opened = {item.name: item.value for item in stats_of(daemon).counters if not item.label}
    assert opened["sessions_open"] == 2000
    for client in clients:
        assert client.raw(11, b"hello") == b"hello"
        client.close()
    assert wait_until(
        lambda: {i.name: i.value for i in stats_of(daemon).counters if not i.label}["sessions_open"] == 1000, 10
    )
    over_grpc.close()


def test_http_tells_health_metrics_and_stats(daemon: DaemonProcess) -> None:
    worker = Worker(LocalDriver(str(daemon.local)))
    keys, lease = store(worker), new_id()
    worker.acquire(keys + new_keys(1), lease=lease, prompt_tokens=50)
    address = next(item for item in stats_of(daemon).addresses if item.startswith("http://"))
    text = fetch(address + "/metrics")
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}
    looked_up = values["prefixcache_tokens_looked_up_total"]
    hits = sum(value for name, value in values.items() if name.startswith("prefixcache_tokens_hit_total"))
    misses = sum(value for name, value in values.items() if name.startswith("prefixcache_tokens_miss_total"))
    assert looked_up == hits + misses + values["prefixcache_tokens_pending"] == 50
    assert values["prefixcache_tokens_pending"] == 32
    assert fetch(address + "/healthz").startswith("serving")
    assert fetch(address + "/readyz").startswith("serving")
    stats = json.loads(fetch(address + "/stats.json"))
    assert stats["tokens"]["pending"] == 32
    assert next(iter(stats["tiers"]))["tier"] == "host"
    assert {part["part"] for part in stats["parts"]} >= {"planner", "executor", "local channel", "http", "grpc"}
    worker.driver.close()


@pytest.mark.parametrize("flag", ["http", "listen"])
def test_an_address_that_is_taken_is_refused_and_nothing_stays_behind(folder: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = {"socket": f"{folder}/e.sock", "host-bytes": "8MiB", "http": "127.0.0.1:0", flag: f"127.0.0.1:{port}"}
        command = [sys.executable, "-m", "prefixcache.server", *(f"--{key}={value}" for key, value in flags.items())]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert refused.returncode == 2
    assert f"127.0.0.1:{port}" in refused.stderr
    assert refused.stderr.startswith("error: ") or "\nerror: " in refused.stderr
    assert sorted(os.listdir(folder)) == ["e.sock.lock"]


def store(worker: Worker, blocks: int = 2) -> bytes:
    """Commit blocks (of whatever bytes are in the slots) and answer their keys."""
    keys, reservation = new_keys(blocks), new_id()

    def reserved() -> bool:
        return bool(worker.reserve(reservation, keys).grants)

    assert wait_until(reserved)  # the pool may still be growing
    assert worker.commit(reservation).committed_blocks == blocks
    return keys


_WORKER = """
import os, sys, time
from tests.contract.conftest import Worker, new_id, new_keys
from tests.contract.drivers import LocalDriver
from tests.e2e.test_daemon_process import store, wait_until
worker = Worker(LocalDriver(sys.argv[1]))
action = sys.argv[2]
told = []
if action == "read":
    worker.acquire(store(worker), lease=new_id())
else:
    keys, reservation = new_keys(3), new_id()
    assert wait_until(lambda: bool(worker.reserve(reservation, keys).grants))
if action == "fill-and-fork":
    child = os.fork()
    if child == 0:
        sys.stdout.close()
        time.sleep(600)
    told = [str(child)]
if action == "fill-and-hang-up":
    worker.driver.close()
    told = [keys.hex(), worker.spec.SerializeToString().hex()]
print("ready", *told, sep=chr(10), flush=True)
time.sleep(600)
"""


def spawn_worker(daemon: DaemonProcess, action: str) -> "subprocess.Popen[str]":
    """A worker process that does `action` and then waits to be killed."""
    child = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(daemon.local), action], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def close_pipes(child: "subprocess.Popen[str]") -> None:
    if child.stdout is not None:
        child.stdout.close()


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())
