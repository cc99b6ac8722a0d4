"""The HTTP port: /metrics, /healthz, /readyz, /stats.json. Reads only; it changes nothing and knows no worker.

aiohttp on a thread of its own, imported there, so that a daemon is ready before its web server is.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from prefixcache.server import units
from prefixcache.server.health import Health
from prefixcache.server.metrics import Metrics
from prefixcache.server.report import describe_stats
from prefixcache.server.stats import Statistics

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)


class _OneLine(logging.Filter):
    """aiohttp logs whatever is no HTTP with a traceback, as an error: anybody who can connect could fill the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        failure = record.exc_info[1] if record.exc_info else None
        if isinstance(failure, ValueError | LookupError) or type(failure).__module__.startswith("aiohttp."):
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            record.msg, record.args = "a request that is no HTTP was refused", ()
            record.exc_info = record.exc_text = None
            return log.isEnabledFor(logging.DEBUG)
        return True


_QUIET: Final = logging.getLogger(f"{__name__}.requests")
_QUIET.addFilter(_OneLine())

_BEAT_S: Final = 0.25
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def bind(address: str) -> socket.socket:
    """A listening socket at HOST:PORT. Raises OSError."""
    host, port = units.parse_host_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


class HttpServer:
    """Serves until `stop`."""

    def __init__(self, sock: socket.socket, beat: Callable[[], None], sources: "Sources") -> None:
        self._sock = sock
        self._beat = beat
        self._sources = sources
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="prefixcache-http", daemon=True)
        self.address = "http://" + units.format_host_port(*sock.getsockname()[:2])

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        from aiohttp import web

        application = web.Application()
        application.add_routes(self._sources.routes())
        runner = web.AppRunner(application, access_log=None, handle_signals=False, logger=_QUIET)
        await runner.setup()
        await web.SockSite(runner, self._sock).start()
        while not self._stopping.is_set():
            self._beat()
            try:
                await asyncio.wait_for(self._stopping.wait(), _BEAT_S)
            except TimeoutError:
                continue
        await runner.cleanup()


class Sources:
    """The answers."""

    def __init__(self, health: Health, statistics: Statistics, metrics: Metrics) -> None:
        self._health = health
        self._statistics = statistics
        self._metrics = metrics

    def routes(self) -> "list[web.RouteDef]":
        """Every path."""
        from aiohttp import web

        return [
            web.get("/metrics", self._show_metrics),
            web.get("/healthz", self._show_health),
            web.get("/readyz", self._show_ready),
            web.get("/stats.json", self._show_stats),
        ]

    async def _show_metrics(self, _: "web.Request") -> "web.Response":
        from aiohttp import web

        text = await asyncio.to_thread(self._metrics.text)
        return web.Response(body=text, headers={"Content-Type": _METRICS_TYPE})

    async def _show_health(self, _: "web.Request") -> "web.Response":
        return self._state(good=self._health.is_serving())

    async def _show_ready(self, _: "web.Request") -> "web.Response":
        return self._state(good=self._health.state()[0] == "serving")

    def _state(self, *, good: bool) -> "web.Response":
        from aiohttp import web

        state, detail = self._health.state()
        return web.Response(status=200 if good else 503, text=f"{state}\n{detail}\n" if detail else f"{state}\n")

    async def _show_stats(self, _: "web.Request") -> "web.Response":
        from aiohttp import web

        stats = await asyncio.to_thread(self._statistics.snapshot)
        return web.json_response(describe_stats(stats))
