"""The composition root: every part is made, wired, started and ended here, in this order and the reverse.

`run` is the process (signals, ready line, exit code); `Daemon` is all of it without the process, for tests. Nothing
here decides anything.
"""

import gc
import importlib.metadata
import json
import logging
import os
import resource
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from prefixcache.core import events as e
from prefixcache.core.ids import HOST_POOL
from prefixcache.core.leases import known_digest
from prefixcache.core.planner import Planner
from prefixcache.core.spec import Limits, PlannerConfig, PoolSpec
from prefixcache.server import http, logs, scheduling, signals, units, wiring
from prefixcache.server.admin_calls import AdminCalls, drain
from prefixcache.server.config import DEFAULT_HTTP, Config, ConfigError, Loaded
from prefixcache.server.disk import DiskStore, flush
from prefixcache.server.dispatch import CallCounters
from prefixcache.server.executor import Executor
from prefixcache.server.gpu import GpuStore
from prefixcache.server.grpc_server import GrpcServer
from prefixcache.server.health import GrpcHealth, Health
from prefixcache.server.heartbeats import Heartbeats
from prefixcache.server.local_channel import ChannelLimits, LocalChannel
from prefixcache.server.loop import Owner, Timer
from prefixcache.server.memory import HostMemory
from prefixcache.server.metrics import Metrics
from prefixcache.server.pin_calls import PinCalls
from prefixcache.server.pinbook import PinBook
from prefixcache.server.service import Shell
from prefixcache.server.sockets import OnlyOwner, SocketPlace
from prefixcache.server.stats import Statistics
from prefixcache.server.warm import restore, take_snapshot
from prefixcache.server.watchers import Watchers

log = logging.getLogger(__name__)

_BEAT_LIMIT_S: Final = 5.0
_GRACE_S: Final = 1.0
# How long a busy thread may keep the interpreter from one that has just got a request. With Python's 5 ms, an acquire
# on the local channel beside a ReadBlocks stream took 187 us p50 and 2.7 ms p99; with this, 104-118 us and 1.4-2 ms.
_SWITCH_S: Final = 0.0002
_LOOK_S: Final = 0.5
_CHECKSUM_S: Final = 20.0  # at the end of a warm run: what has no checksum could not be verified, so it is not kept
_MOST_FILES: Final = 1 << 16
_PART_OF_THREAD: Final = {
    "prefixcache-timer": "planner",
    "prefixcache-executor": "executor",
    "prefixcache-disk": "disk",
    "prefixcache-local": "local channel",
    "prefixcache-http": "http",
}
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_GENERATION_BITS: Final = 62


class Daemon:
    """One running daemon. `start`, then `stop` (graceful) exactly once."""

    def __init__(self, loaded: Loaded) -> None:
        """Take the socket's place and make every part; nothing answers yet. Raises ConfigError."""
        self.config = config = loaded.config
        self._loaded = loaded
        self.stopping = threading.Event()
        self.hurry = threading.Event()
        self.place = SocketPlace(config.socket)
        try:
            self.memory = HostMemory(config)
        except (OSError, ValueError) as error:
            self.place.close()
            raise ConfigError(f"host_bytes: a pool of {units.format_size(config.host_bytes)}: {error}") from error
        self.heartbeats = Heartbeats()
        self.counters = CallCounters()
        self.gpus = self._open_gpus()
        self.disk = self._open_disk()
        self.planner = Planner(_planner_config(config, self.memory, self.disk, self.gpus))
        self.executor = Executor(
            {HOST_POOL: self.memory.pool}, self.heartbeats.register("executor", _BEAT_LIMIT_S), self.gpus.pools
        )
        self.owner = Owner(self.planner, self.executor.orders)
        self.shell = Shell(
            config,
            release(),
            self.owner,
            {HOST_POOL: self.memory.pool},
            local_channel=self.place.local_path,
            is_growing=self.memory.is_growing,
            digest_of=self._digest_of,
            blocks_of=lambda namespace: self.planner.state.namespaces[namespace].table.used,
        )
        self.executor.orders.update(self.gpus.orders)
        self.shell.gpus = self.gpus
        if self.disk is not None:
            self.executor.orders.update(self.disk.table)
            self.shell.clear_lasts = self.disk.wait_revoked
        wiring.follow_ends(self.executor.orders, self.shell)
        self.watchers = Watchers(self.shell, self.planner.state)
        self.executor.orders.update(self.watchers.orders)
        self.health = Health(self.heartbeats, self._troubles, self._failure)
        self.statistics = Statistics(self.shell, self.planner, self.memory, self.health, self.counters)
        self.statistics.backlog = lambda: self.executor.backlog
        self.statistics.watch_counters = self.watchers.counters
        self.statistics.disk = self.disk.report if self.disk is not None else None
        self.statistics.gpus = self.gpus if config.gpu else None
        self.pins = PinBook(self.shell, self.planner, self.disk.usable_folder if self.disk is not None else None)
        self.statistics.pin_faults = self.pins.faults
        self.admin = AdminCalls(
            self.shell, self.statistics, PinCalls(self.shell, self.planner, self.pins), self.watchers, self.stopping.set
        )
        self.metrics = Metrics(self.statistics, self.counters)
        self.grpc = GrpcServer(config.grpc_threads + config.max_streams + config.max_watchers, config.max_message_bytes)
        self.timer = Timer(self.owner, self.heartbeats.register("planner", _BEAT_LIMIT_S))
        self._grpc_health = GrpcHealth(self.health)
        self._next_look = 0.0
        self._http: http.HttpServer | None = None
        self._local_thread: threading.Thread | None = None
        self._local: LocalChannel | None = None

    def _digest_of(self, lease_id: bytes, part: int, block: int, generation: int) -> bytes:
        """The checksum of a leased block's part, where it is known."""
        with self.owner.lock:
            lease = self.planner.state.leases.get(lease_id)
            return known_digest(lease, part, block, generation) if lease is not None else b""

    @property
    def addresses(self) -> list[str]:
        """Where it listens, real ports: `unix:///...`, `HOST:PORT`, `http://HOST:PORT`."""
        return self.statistics.addresses

    def start(self) -> None:
        """Answer calls. Raises ConfigError where an address is taken; then everything is given up again."""
        try:
            self._start()
        except (ConfigError, OSError) as error:
            self.hurry.set()
            self.stop()
            raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error

    def stop(self) -> None:
        """Drain (unless `hurry` is set), end every part, and leave nothing behind but a pool to be found again."""
        remaining = drain(self.shell, 0 if self.hurry.is_set() else self.config.drain_timeout, self.hurry)
        if any(remaining):
            log.warning(
                "ended with work running",
                extra={"facts": dict(zip(("leases", "reservations"), remaining, strict=True))},
            )
        if self.planner.demoter is not None and not self.hurry.is_set():
            flush(self.owner, self.planner.demoter, self.config.disk_flush_timeout, self.hurry)
        self.health.ending = True
        self._grpc_health.refresh()
        self.timer.stop()  # before the pools that its chores use
        self._end_transports()
        self.gpus.close()
        if self.disk is None or self.disk.stop():
            self.memory.close()  # else a read that hangs in the kernel still has its place in the pool
        self.place.close()

    def _end_transports(self) -> None:
        """No calls any more; then what they began; then the snapshot, of a state that nothing changes any more."""
        self.watchers.close()
        self.grpc.stop(_GRACE_S)
        if self._local is not None and self._local_thread is not None:
            self._local.stop()
            self._local_thread.join()
        is_warm = self.config.warm_restart and not self.owner.failure
        if is_warm and not self.executor.finish(0 if self.hurry.is_set() else _CHECKSUM_S):
            log.warning("blocks without a checksum are not kept", extra={"facts": {"orders": self.executor.backlog}})
        self.executor.stop()
        self.pins.close()
        if self._local is not None:
            self._local.dispose()  # only now: the executor's last answers were posted to it
        if self._http is not None:
            self._http.stop()
        if is_warm:
            take_snapshot(self.owner, self.memory, self.pins.entries())

    def _open_gpus(self) -> GpuStore:
        """The GPU pools, maybe none. Raises ConfigError where a device can never be used."""
        try:
            return GpuStore(self.config, self.memory.pool)
        except ConfigError:
            self.memory.close()
            self.place.close()
            raise

    def _open_disk(self) -> DiskStore | None:
        """The disk tier, if one is configured. Raises ConfigError where its directory can never be used."""
        if not self.config.disk:
            return None
        try:
            return DiskStore(self.config, self.memory.pool, self.heartbeats.register("disk", _BEAT_LIMIT_S))
        except ConfigError:
            self.gpus.close()
            self.memory.close()
            self.place.close()
            raise

    def part_died(self, args: threading.ExceptHookArgs) -> None:
        """A thread ended with an exception: its part is dead now, not when its heartbeat runs out."""
        name = args.thread.name if args.thread is not None else "unknown"
        failure = args.exc_value or RuntimeError("unknown")
        log.critical("a part of the server died", extra={"facts": {"thread": name}}, exc_info=failure)
        self.heartbeats.fail(_PART_OF_THREAD.get(name, name), f"its thread died: {type(failure).__name__}")

    def _start(self) -> None:
        config = self.config
        self.executor.start(self.shell.background.post)
        self.gpus.start(self.executor.later)
        if config.warm_restart:
            pinned = restore(self.owner, self.memory)
            for space in self.planner.state.namespaces.values():
                self.shell.add_namespace(space.number, space.fingerprint, space.spec, "")
            self.pins.restore(pinned)
        self.pins.start()
        self.memory.start(self._capacity_ready)
        if self.disk is not None:
            self.disk.namespaces_known = self.pins.directory_opened
            self.disk.start(self.shell)
        self._start_local()  # before gRPC: a worker that finds that alone takes the slow way for as long as it lives
        self._start_grpc()
        if config.http:
            self._start_http()
        self.timer.add(self._look_around)
        self.timer.add(self._grpc_health.refresh)
        self.timer.add(self.watchers.look)
        self.timer.add(self.grpc.prober(self.heartbeats.register("grpc", _BEAT_LIMIT_S)))
        self.timer.start()

    def _start_grpc(self) -> None:
        server = self.grpc
        wiring.add_services(server, self.shell, self.counters, self.admin)
        self._grpc_health.register(server.server)
        server.add_reflection("grpc.health.v1.Health")
        with OnlyOwner():
            server.listen(f"unix:{self.config.socket}")
        self.addresses.append(f"unix://{self.config.socket}")
        if self.config.listen:
            host, port = units.parse_host_port(self.config.listen)
            real = server.listen(units.format_host_port(host, port))
            if host not in _LOOPBACK:
                log.warning("anyone who reaches this address can use the cache", extra={"facts": {"listen": host}})
            self.addresses.append(units.format_host_port(host, real))
        server.start()

    def _start_local(self) -> None:
        limits = ChannelLimits(self.config.max_message_bytes, self.config.max_sessions, self.config.any_user)
        backend = wiring.local_backend(self.shell, self.counters, self.admin.pins)
        beat = self.heartbeats.register("local channel", _BEAT_LIMIT_S)
        self._local = LocalChannel(self.place.listen_local(), backend, self.counters, beat, limits)
        self._local_thread = threading.Thread(target=self._local.run, name="prefixcache-local", daemon=True)
        self._local_thread.start()

    def _start_http(self) -> None:
        try:
            sock = http.bind(self.config.http)
        except OSError as error:
            if self._loaded.is_explicit("http"):
                raise ConfigError(f"http: cannot listen on {self.config.http}: {error.strerror}") from error
            # Nobody asked for that port, so a second daemon must not fail over it.
            log.warning("the default http port is taken, using a free one", extra={"facts": {"default": DEFAULT_HTTP}})
            sock = http.bind("127.0.0.1:0")
        sources = http.Sources(self.health, self.statistics, self.metrics)
        self._http = http.HttpServer(sock, self.heartbeats.register("http", _BEAT_LIMIT_S), sources)
        self._http.start()
        self.addresses.append(self._http.address)

    def _capacity_ready(self, ready_bytes: int) -> None:
        if not self.owner.failure:
            self.owner.call(e.CapacityReady(HOST_POOL, ready_bytes))

    def _look_around(self) -> None:
        """Twice a second: end silent sessions (they live for seconds), note what time it is."""
        now = self.owner.clock()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        self.statistics.note_time()
        for session in self.shell.sessions.overdue():
            log.info("a session went silent and was ended", extra={"facts": {"client": session.name}})
            self.shell.end(session)

    def _failure(self) -> str:
        return f"planner: {self.owner.failure}; restart the server" if self.owner.failure else ""

    def _troubles(self) -> list[str]:
        state, detail = self.memory.state()
        troubles = [f"host pool {state}: {detail}"] if state != "on" else []
        if self.disk is not None and (trouble := self.disk.trouble()):
            troubles.append(trouble)
        troubles += self.gpus.troubles(self.planner)
        return [*troubles, "draining"] if self.shell.draining else troubles


def run(loaded: Loaded, ready_fd: int | None = None, on_ready: Callable[[Daemon], None] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. A second signal ends the drain at once. Raises ConfigError.

    One line on standard output says that it is ready; `ready_fd` gets a newline and is closed then.
    """
    config = loaded.config
    logs.setup(config.log_format, config.log_level)
    _raise_file_limit()
    scheduling.take_short_turns()  # before there are threads: they inherit it
    daemon = Daemon(loaded)
    threading.excepthook = daemon.part_died

    signals.watch(lambda count: (daemon.stopping if count == 1 else daemon.hurry).set())
    daemon.start()
    np.unique(np.zeros(1))  # imports a part of numpy at its first call: 12 ms, and calls would wait for them
    # What lives now lives until the end: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)
    _say_ready(daemon, ready_fd)
    if on_ready is not None:
        on_ready(daemon)
    daemon.stopping.wait()
    log.info("draining")
    daemon.stop()
    log.info("ended")
    return 0


def release() -> str:
    """The installed release; "0+unknown" when run from a bare checkout."""
    try:
        return importlib.metadata.version("prefixcache")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def _planner_config(config: Config, memory: HostMemory, disk: DiskStore | None, gpus: GpuStore) -> PlannerConfig:
    return PlannerConfig(
        pools=(PoolSpec(memory.size_bytes, memory.slab_bytes), *gpus.specs()),
        # Random, so that no restart repeats a generation that a worker still remembers.
        first_generation=secrets.randbits(_GENERATION_BITS) + 1,
        # A pool that was found again is in memory already, and its slots must be there for the snapshot.
        ready_bytes=0 if memory.snapshot is None else None,
        publish=True,
        checksum=config.checksums,
        disk=disk.spec() if disk is not None else None,
        policy=config.policy,
        pin_bytes=config.pin_budget,
        policy_seed=secrets.randbits(_GENERATION_BITS),
        limits=Limits(
            max_sessions=config.max_sessions,
            max_namespaces=config.max_namespaces,
            max_leases_per_session=config.max_leases,
            max_reservations_per_session=config.max_reservations,
            max_keys=config.max_keys,
            max_ttl_s=max(config.lease_ttl_max, config.reservation_ttl_max),
        ),
    )


def _say_ready(daemon: Daemon, ready_fd: int | None) -> None:
    facts = {"pid": os.getpid(), "addresses": daemon.addresses, "host_bytes": daemon.memory.size_bytes}
    if daemon.config.log_format == "json":
        line = json.dumps({"ready": True, "version": daemon.shell.version, **facts})
    else:
        size = units.format_size(daemon.memory.size_bytes)
        where = ", ".join(daemon.addresses)
        line = f"prefixcache {daemon.shell.version} ready: {where} (pool {size}, pid {os.getpid()})"
    print(line, flush=True)
    if ready_fd is not None:
        os.write(ready_fd, b"\n")
        os.close(ready_fd)
    _notify_supervisor()


def _notify_supervisor() -> None:
    """Tell systemd (Type=notify), where it asked for it."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"READY=1", "\0" + address[1:] if address.startswith("@") else address)


def _raise_file_limit() -> None:
    """A connection takes two descriptors: the soft limit of 1024 would end at 500 workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
