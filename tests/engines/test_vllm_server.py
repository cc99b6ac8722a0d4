"""The OpenAI server with the documented flag. First without a daemon, beside a server without the connector: as fast,
the same tokens, and reuse begins when the daemon does. Killed and restarted, its prompts are still there. Then, under
one server that goes on: the daemon frozen, killed in the middle of a load, full, restarted; the same tokens, in time,
and reuse comes back by itself.

One server after the other, and the tests in the order of the file: a server takes a minute to start.
"""

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.processes import DaemonProcess, wait_until
from tests.engines.conftest import Checkpoints
from tests.engines.test_vllm import prompt
from tests.engines.vllm_server import Server, documented_flag

LONG, HUGE = prompt(1, 700), prompt(2, 1900)
OTHERS = [prompt(10 + number, 400) for number in range(3)]
HITS = "vllm:external_prefix_cache_hits_total"
OURS = "vllm:prefixcache_"
LATEST_S = 1.0


class Host:
    """A host's daemon, not there at first, then one after the other, and its second server; `cold`: what follows each
    prompt, computed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "daemon").mkdir()
        (folder / "told").mkdir()
        self.address = f"unix://{folder}/daemon/d.sock"
        self.cold: dict[str, list[int]] = {}
        self.no_cache_s = 0.0
        self._daemon: DaemonProcess | None = None
        self._server: Server | None = None

    @property
    def daemon(self) -> DaemonProcess:
        """The one that was started last."""
        assert self._daemon is not None
        return self._daemon

    @property
    def server(self) -> Server:
        """The second server."""
        assert self._server is not None
        return self._server

    def restart(self, host_bytes: str = "64MiB") -> None:
        """A daemon, in the place of the one before if there was one."""
        self.stop()
        self._daemon = DaemonProcess(self.folder / "daemon", host_bytes=host_bytes)

    def stop(self) -> None:
        """Kill the daemon, if there is one."""
        if self._daemon is not None:
            self._daemon.kill()

    def serve(self, server: Server) -> None:
        """From here on this is the server; learns what it says without the cache, and how long that takes."""
        self._server = server
        for tokens in (LONG, HUGE, *OTHERS):
            began = time.monotonic()
            self.cold[str(tokens)] = server.complete(tokens, cache_salt="nobody's")
            self.no_cache_s = max(self.no_cache_s, time.monotonic() - began)

    def in_time(self, tokens: list[int]) -> None:
        """The same tokens; the daemon holds no request up for more than a second, and the whole of it takes no longer
        than what is computed for nobody, and that second."""
        began = time.monotonic()
        assert self.server.complete(tokens) == self.cold[str(tokens)]
        took = time.monotonic() - began
        assert max(self.held_s()) <= LATEST_S
        assert took <= 2 * self.no_cache_s + LATEST_S  # a busy machine is no metronome

    def held_s(self) -> list[float]:
        """How long the connector kept each request from being scheduled since the last call."""
        held = self.folder / "told" / "held"
        lines = held.read_text().split()
        held.write_text("")
        return [float(line) for line in lines]

    def reuse_returns(self) -> bool:
        """Whether LONG comes from the daemon after some time; until then it is computed and stored."""
        wanted = self.server.metric(HITS) + 640
        cold = self.cold[str(LONG)]
        return wait_until(lambda: self.server.complete(LONG) == cold and self.server.metric(HITS) >= wanted)

    def while_loading(self, act: Callable[[], None]) -> None:
        """LONG, with `act` done in the middle of its copy."""
        throttle, loading = (self.folder / "told" / name for name in ("throttle", "loading"))
        throttle.touch()
        loading.unlink(missing_ok=True)
        try:
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(self.server.complete, LONG)
                assert wait_until(lambda: loading.exists() or asked.done())
                assert loading.exists(), "it was not loaded"
                act()
                throttle.unlink()
                assert asked.result() == self.cold[str(LONG)]
        finally:
            throttle.unlink(missing_ok=True)
        assert max(self.held_s()) <= LATEST_S


class Beside:
    """The first server, whose daemon was never started, and one without the connector, of the same checkpoint."""

    def __init__(self, host: Host, ours: Server, plain: Server) -> None:
        self.host, self.ours, self.plain = host, ours, plain
        for server in (plain, ours):
            server.complete(LONG)  # the first request of a server makes its kernels

    def is_in_time(self, tokens: list[int]) -> bool:
        """The same tokens from both; whether ours took no longer than the other, asked before and after, and a
        second."""
        plain, ours, again = (self._asked(server, tokens) for server in (self.plain, self.ours, self.plain))
        assert plain[0] == ours[0] == again[0]
        return ours[1] <= max(plain[1], again[1]) + LATEST_S

    def reuses(self) -> bool:
        """Whether LONG comes from the daemon; if not, it is computed and stored."""
        hits = self.ours.metric(HITS)
        assert self.ours.complete(LONG) == self.host.cold[str(LONG)]
        return self.ours.metric(HITS) == hits + 640

    def _asked(self, server: Server, tokens: list[int]) -> tuple[list[int], float]:
        began = time.monotonic()
        said = server.complete(tokens)
        return said, time.monotonic() - began


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(tmp_path_factory.mktemp("host"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def beside(host: Host, checkpoints: Checkpoints) -> Iterator[Beside]:
    """See Beside; the servers start side by side."""
    model, alone = checkpoints("llama"), ("--no-enable-prefix-caching",)
    flags = (*alone, "--kv-transfer-config", documented_flag(host.address))
    with ExitStack() as stack:

        def start(name: str, flags: tuple[str, ...]) -> Server:
            return stack.enter_context(Server(model, host.folder / f"{name}.log", *flags))

        with ThreadPoolExecutor(2) as pool:
            ours, plain = pool.map(start, ("first", "plain"), (flags, alone))
        yield Beside(host, ours, plain)


@pytest.fixture(scope="module")
def stored(beside: Beside) -> Host:
    """The daemon is there, the first server stored LONG in it, and is gone."""
    host, server = beside.host, beside.ours
    host.cold[str(LONG)] = beside.plain.complete(LONG)
    beside.plain.kill()
    if host._daemon is None:
        host.restart()
    assert wait_until(beside.reuses)
    assert wait_until(lambda: server.metric(f"{OURS}saved_tokens_total") >= 704)
    server.kill()
    return host


@pytest.fixture(scope="module")
def second(stored: Host, checkpoints: Checkpoints) -> Iterator[Host]:
    """The second server, whose loads can be held up, is running."""
    flag = json.loads(documented_flag(stored.address)) | {"kv_connector_module_path": "tests.engines.throttled"}
    flags = ("--kv-transfer-config", json.dumps(flag), "--no-enable-prefix-caching")
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("PREFIXCACHE_TEST_FOLDER", str(stored.folder / "told"))
        with Server(checkpoints("llama"), stored.folder / "second.log", *flags) as server:
            yield host_with(stored, server)


def host_with(host: Host, server: Server) -> Host:
    """`host`, with LONG asked of a server that never computed it."""
    # On a busy machine the daemon's first answer may come too late.
    assert wait_until(lambda: server.complete(LONG) == host.cold[str(LONG)] and server.metric(HITS) >= 640)
    assert server.metric(f"{OURS}saved_tokens_total") == 0, "all of it is what the first server stored"
    assert wait_until(lambda: server.metric(f"{OURS}loaded_tokens_total") == server.metric(HITS))
    hits = server.metric(f"{OURS}hits_total")
    assert hits == server.metric(HITS) / 640
    assert server.metric(f"{OURS}load_seconds_count") == server.metric(f"{OURS}loads_total") == hits
    assert server.metric(f"{OURS}load_bytes_total") > 0
    assert server.metric(f"{OURS}not_loaded_total", reason="not_cached") == 0
    loaded = host.cold[str(LONG)]
    host.serve(server)
    assert host.cold[str(LONG)] == loaded
    return host


def test_daemon_never_started(beside: Beside) -> None:
    """Nothing says so but the counter; then it is started, and reuse begins by itself."""
    server = beside.ours
    assert server.metric(f"{OURS}hits_total") == 0, "a counter is there before it counts"
    for tokens in (LONG, OTHERS[0], HUGE, LONG):
        # A machine may be busy three times in a row, but what waits for a daemon waits every time.
        assert any(beside.is_in_time(tokens) for _ in range(3))
    with ThreadPoolExecutor(len(OTHERS)) as pool:  # batches change the last digits of sums, so tokens as well
        assert [len(answer) for answer in pool.map(server.complete, OTHERS)] == [16] * len(OTHERS)
    assert server.metric(HITS) == server.metric(f"{OURS}saved_tokens_total") == 0
    assert server.metric(f"{OURS}not_loaded_total", reason="server_unavailable") > 0
    beside.host.cold[str(LONG)] = beside.plain.complete(LONG)
    beside.host.restart()
    assert wait_until(beside.reuses)


def test_second_server_reuses_and_counts(second: Host) -> None:
    salts = itertools.count()

    def counted() -> bool:
        """With a later step, unless the daemon's answer came too late."""
        second.server.complete(OTHERS[0], max_tokens=1, cache_salt=f"nobody's {next(salts)}")
        return second.server.metric(f"{OURS}not_loaded_total", reason="not_cached") > 0

    assert wait_until(counted)
    assert second.reuse_returns()
    second.held_s()


def test_daemon_frozen(second: Host) -> None:
    os.kill(second.daemon.pid, signal.SIGSTOP)
    try:
        for _ in range(3):
            second.in_time(LONG)
        with ThreadPoolExecutor(len(OTHERS)) as pool:  # batches change the last digits of sums, so tokens as well
            answers = pool.map(second.server.complete, OTHERS)
            assert [len(answer) for answer in answers] == [16] * len(OTHERS)
        assert max(second.held_s()) <= LATEST_S
    finally:
        os.kill(second.daemon.pid, signal.SIGCONT)
    assert second.reuse_returns()


def test_daemon_frozen_in_mid_load(second: Host) -> None:
    second.held_s()
    try:
        second.while_loading(lambda: os.kill(second.daemon.pid, signal.SIGSTOP))
        second.in_time(LONG)
    finally:
        os.kill(second.daemon.pid, signal.SIGCONT)
    assert second.reuse_returns()


def test_daemon_killed_in_mid_load(second: Host) -> None:
    second.held_s()
    second.while_loading(second.daemon.kill)
    for _ in range(3):
        second.in_time(LONG)
    second.restart()
    assert second.reuse_returns()


def test_daemon_full(second: Host) -> None:
    second.restart("2MiB")  # 1365 tokens
    second.held_s()
    for tokens in (HUGE, *OTHERS, LONG, HUGE, *OTHERS):
        second.in_time(tokens)
    assert second.reuse_returns(), "what fits is still reused"
    second.restart()
    assert second.reuse_returns()
    assert wait_until(lambda: second.server.metric(f"{OURS}not_saved_total", reason="pool_full") > 0)
