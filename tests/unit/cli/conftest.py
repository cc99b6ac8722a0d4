"""An admin service that answers what a test gives it, on a real unix socket, and a runner of command lines.

Faults it makes: refusals with our Error in the details, a call that never answers in time, no service at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from typer.testing import CliRunner, Result

from prefixcache.cli.main import app
from prefixcache.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, common_pb2

FINGERPRINT = bytes(range(32))
OTHER_FINGERPRINT = bytes(range(100, 132))


@dataclass
class FakeAdmin(admin_pb2_grpc.AdminServiceServicer, cache_pb2_grpc.CacheServiceServicer):
    """Answers `stats` and `described`, refuses with `refusal`, hangs while `hanging`."""

    address: str
    stats: admin_pb2.GetStatsResponse
    described: admin_pb2.DescribePrefixResponse = field(default_factory=admin_pb2.DescribePrefixResponse)
    evicted: admin_pb2.EvictResponse = field(default_factory=admin_pb2.EvictResponse)
    pinned: admin_pb2.PinResponse = field(default_factory=admin_pb2.PinResponse)
    pins: admin_pb2.ListPinsResponse = field(default_factory=admin_pb2.ListPinsResponse)
    prefetched: admin_pb2.PrefetchResponse = field(default_factory=admin_pb2.PrefetchResponse)
    prefixes: admin_pb2.ListPrefixesResponse = field(default_factory=admin_pb2.ListPrefixesResponse)
    drained: admin_pb2.DrainResponse = field(default_factory=admin_pb2.DrainResponse)
    looked_up: cache_pb2.LookupResponse = field(default_factory=cache_pb2.LookupResponse)
    events: list[admin_pb2.WatchEventsResponse] = field(default_factory=list)
    watch_refusal: common_pb2.Error | None = None
    refusal: common_pb2.Error | None = None
    hanging: bool = False
    release: threading.Event = field(default_factory=threading.Event)
    requests: list[object] = field(default_factory=list)

    def GetStats(self, request: object, context: grpc.ServicerContext) -> admin_pb2.GetStatsResponse:
        self._enter(request, context)
        return self.stats

    def DescribePrefix(self, request: object, context: grpc.ServicerContext) -> admin_pb2.DescribePrefixResponse:
        self._enter(request, context)
        return self.described

    def Evict(self, request: object, context: grpc.ServicerContext) -> admin_pb2.EvictResponse:
        self._enter(request, context)
        return self.evicted

    def Pin(self, request: object, context: grpc.ServicerContext) -> admin_pb2.PinResponse:
        self._enter(request, context)
        return self.pinned

    def Unpin(self, request: object, context: grpc.ServicerContext) -> admin_pb2.UnpinResponse:
        self._enter(request, context)
        return admin_pb2.UnpinResponse()

    def ListPins(self, request: object, context: grpc.ServicerContext) -> admin_pb2.ListPinsResponse:
        self._enter(request, context)
        return self.pins

    def Prefetch(self, request: object, context: grpc.ServicerContext) -> admin_pb2.PrefetchResponse:
        self._enter(request, context)
        return self.prefetched

    def ListPrefixes(self, request: object, context: grpc.ServicerContext) -> admin_pb2.ListPrefixesResponse:
        self._enter(request, context)
        return self.prefixes

    def Drain(self, request: object, context: grpc.ServicerContext) -> admin_pb2.DrainResponse:
        self._enter(request, context)
        return self.drained

    def Flush(self, request: object, context: grpc.ServicerContext) -> admin_pb2.FlushResponse:
        self._enter(request, context)
        return admin_pb2.FlushResponse(blocks=7, left_blocks=3)

    def Lookup(self, request: object, context: grpc.ServicerContext) -> cache_pb2.LookupResponse:
        self._enter(request, context)
        return self.looked_up

    def WatchEvents(
        self, request: object, context: grpc.ServicerContext
    ) -> Iterator[admin_pb2.WatchEventsResponse]:  # fmt: skip
        self._enter(request, context)
        if self.watch_refusal is not None:
            _refuse(context, self.watch_refusal)
        gone = threading.Event()
        context.add_callback(gone.set)
        yield from self.events
        gone.wait(30)

    def _enter(self, request: object, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        if self.hanging:
            self.release.wait(30)
        if self.refusal is not None:
            _refuse(context, self.refusal)


def _refuse(context: grpc.ServicerContext, error: common_pb2.Error) -> NoReturn:
    status = common_pb2.Status(code=int(error.code), message=error.message)
    status.details.add().Pack(error)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)


def a_namespace(label: str = "SmolLM2", fingerprint: bytes = FINGERPRINT) -> admin_pb2.NamespaceStats:
    """One namespace with 64-token blocks of 1 MiB, ten of them held."""
    hit = common_pb2.TierTokens(host=192)
    miss = [common_pb2.ReasonCount(reason=common_pb2.REASON_NOT_CACHED, count=64)]
    tokens = admin_pb2.TokenSums(looked_up=320, hit=hit, miss=miss, pending=64)
    return admin_pb2.NamespaceStats(
        namespace_id=1,
        fingerprint=fingerprint,
        label=label,
        block_tokens=64,
        block_bytes=1 << 20,
        blocks=10,
        tokens=tokens,
    )


def some_stats(*namespaces: admin_pb2.NamespaceStats) -> admin_pb2.GetStatsResponse:
    """A healthy daemon with a half-full host tier and one session."""
    host = admin_pb2.TierStats(
        tier=common_pb2.TIER_HOST,
        state="on",
        capacity_bytes=20 << 20,
        ready_bytes=20 << 20,
        used_bytes=10 << 20,
        blocks=10,
    )
    session = admin_pb2.SessionStats(client_name="worker", transport="local", pid=7, leases=1, age_s=2.5)
    listed = namespaces or (a_namespace(),)
    return admin_pb2.GetStatsResponse(
        version="1.2.3", incarnation=b"\x01" * 16, uptime_s=9.0, health="serving",
        parts=[admin_pb2.Heartbeat(part="planner", age_s=0.1, alive=True)],
        tiers=[host], namespaces=listed, tokens=listed[0].tokens, sessions=[session],
        addresses=["unix:///x.sock", "http://127.0.0.1:4321"],
    )  # fmt: skip


@pytest.fixture
def admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAdmin]:
    """A fake daemon that PREFIXCACHE_ADDRESS points at."""
    address = f"unix://{tmp_path}/d.sock"
    monkeypatch.setenv("PREFIXCACHE_ADDRESS", address)
    fake = FakeAdmin(address, some_stats())
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(fake, server)
        cache_pb2_grpc.add_CacheServiceServicer_to_server(fake, server)
        server.add_insecure_port(address)
        server.start()
        try:
            yield fake
        finally:
            fake.release.set()
            server.stop(None).wait()


Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Runs one command line as a user would, standard output and error apart."""
    runner = CliRunner()

    def invoke(*arguments: str, stdin: str | bytes | None = None) -> Result:
        return runner.invoke(app, list(arguments), input=stdin, prog_name="prefixcache")

    return invoke
