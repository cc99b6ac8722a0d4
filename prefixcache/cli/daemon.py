"""Asking the daemon: an address, the admin service, and gRPC's failures in plain words.

What belongs here: everything the commands need of gRPC. It must not know how answers are shown.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar, cast

import grpc

from prefixcache.cli.errors import CliError, bad_usage
from prefixcache.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, common_pb2
from prefixcache_client.address import parse_address

TIMEOUT_S: Final = 5.0
# Clearing a large cache or draining takes as long as it takes; a hanging daemon must still end the command.
LONG_TIMEOUT_S: Final = 120.0
_DETAILS: Final = "grpc-status-details-bin"
# Loopback must not be sent through a proxy of the environment.
_OPTIONS: Final = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 << 20))

Request = TypeVar("Request")
Response = TypeVar("Response")


def resolve_address(given: str | None) -> str:
    """The address to ask, as `Client()` finds it: the one given, else PREFIXCACHE_ADDRESS, else the default socket.

    Raises CliError for what is none, and for a default that somebody else may have made: he could answer anything.
    """
    try:
        address = parse_address(given)
    except ValueError as error:
        raise bad_usage(str(error), "give --address unix:///PATH or HOST:PORT") from error
    if address.is_foreign:
        what = f"the folder of {address.socket_path} belongs to another user"
        raise CliError(what, "name the daemon that you trust with --address", reason="foreign_folder")
    return f"unix://{address.socket_path}" if address.socket_path else address.target


class Daemon:
    """One connection to a daemon's admin service."""

    def __init__(self, address: str, channel: grpc.Channel) -> None:
        self.address = address
        self._stub = admin_pb2_grpc.AdminServiceStub(channel)
        self._cache = cache_pb2_grpc.CacheServiceStub(channel)

    def stats(self) -> admin_pb2.GetStatsResponse:
        """Counters, tiers, namespaces, sessions and health of this moment. Raises CliError."""
        return self._call(self._stub.GetStats, admin_pb2.GetStatsRequest())

    def describe(self, fingerprint: bytes, keys: bytes) -> admin_pb2.DescribePrefixResponse:
        """Where the blocks of a prompt lie. `keys`: n x 32 bytes from block 0. Raises CliError."""
        request = admin_pb2.DescribePrefixRequest(fingerprint=fingerprint, keys=keys)
        return self._call(self._stub.DescribePrefix, request)

    def lookup(self, fingerprint: bytes, keys: bytes) -> cache_pb2.LookupResponse:
        """What each node holds of a prompt. Raises CliError."""
        return self._call(self._cache.Lookup, cache_pb2.LookupRequest(fingerprint=fingerprint, keys=keys))

    def evict(self, request: admin_pb2.EvictRequest) -> admin_pb2.EvictResponse:
        """Drop blocks: of a prefix, of a namespace, or all. Raises CliError."""
        return self._call(self._stub.Evict, request, LONG_TIMEOUT_S)

    def pin(self, request: admin_pb2.PinRequest) -> admin_pb2.PinResponse:
        """Keep a prefix. Raises CliError."""
        return self._call(self._stub.Pin, request)

    def unpin(self, pin: bytes) -> None:
        """End a pin. Raises CliError."""
        self._call(self._stub.Unpin, admin_pb2.UnpinRequest(pin=pin))

    def list_pins(self) -> admin_pb2.ListPinsResponse:
        """All pins. Raises CliError."""
        return self._call(self._stub.ListPins, admin_pb2.ListPinsRequest())

    def prefetch(self, fingerprint: bytes, keys: bytes) -> admin_pb2.PrefetchResponse:
        """Begin to bring a prefix to memory. Raises CliError."""
        return self._call(self._stub.Prefetch, admin_pb2.PrefetchRequest(fingerprint=fingerprint, keys=keys))

    def list_prefixes(self, request: admin_pb2.ListPrefixesRequest) -> admin_pb2.ListPrefixesResponse:
        """A page of the hottest or largest prefixes. Raises CliError."""
        return self._call(self._stub.ListPrefixes, request)

    def drain(self, timeout_s: float, *, shutdown: bool) -> admin_pb2.DrainResponse:
        """Take no new work and wait for what runs; 0 waits as long as the daemon is configured to. Raises CliError."""
        request = admin_pb2.DrainRequest(timeout_ms=int(timeout_s * 1000), shutdown=shutdown)
        return self._call(self._stub.Drain, request, max(LONG_TIMEOUT_S, timeout_s + TIMEOUT_S))

    def flush(self) -> admin_pb2.FlushResponse:
        """Write what only memory holds. Raises CliError."""
        return self._call(self._stub.Flush, admin_pb2.FlushRequest(), LONG_TIMEOUT_S)

    def _call(self, method: Callable[..., Response], request: object, timeout_s: float = TIMEOUT_S) -> Response:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._explain(error, timeout_s) from error

    def _explain(self, error: grpc.RpcError, timeout_s: float) -> CliError:
        """The same failure in the words of `Error`, or of what a person can do about it."""
        told = _error_of(error)
        if told is not None:
            name = reason_name(told.reason)
            return CliError(told.message or f"the daemon refused: {name}", reason=name)
        code = _call_of(error).code()
        if code is grpc.StatusCode.UNAVAILABLE and not _may_connect(self.address):
            hint = "run this as the user who runs the daemon, or name another one with --address"
            return CliError(f"no permission to open {self.address}", hint, reason="permission_denied")
        if code is grpc.StatusCode.UNAVAILABLE:
            hint = "start one with `prefixcache serve`, or name another with --address"
            return CliError(f"no daemon answers at {self.address}", hint, reason="server_unavailable")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            hint = "it may be stopped or overloaded; its log tells more"
            return CliError(f"the daemon at {self.address} did not answer in {timeout_s:g} s", hint, reason="deadline")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            hint = "the daemon may be older than this command; compare `prefixcache --version` on both sides"
            return CliError(f"the daemon at {self.address} does not know this call", hint, reason="unimplemented")
        failed = f"the daemon at {self.address} failed: {_call_of(error).details()}"
        return CliError(failed, "its log tells more", reason=code.name.lower())


@contextmanager
def connect(address: str | None) -> Iterator[Daemon]:
    """A connection to the daemon at `address` (or the default one) for the length of a command."""
    target = resolve_address(address)
    with grpc.insecure_channel(target, options=list(_OPTIONS)) as channel:
        yield Daemon(target, channel)


def _may_connect(address: str) -> bool:
    """Whether it is not for want of permission that a socket cannot be reached; gRPC's own words differ by release."""
    path = address.removeprefix("unix://")
    if path == address:
        return True
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            probe.connect(path)
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def reason_name(reason: int) -> str:
    """`not_cached` of REASON_NOT_CACHED; the number of one that this build does not know."""
    names: dict[int, str] = {value: name for name, value in common_pb2.Reason.items()}
    return names[reason].removeprefix("REASON_").lower() if reason in names else str(reason)


def _call_of(error: grpc.RpcError) -> grpc.Call:
    """Every error that a blocking stub raises is also the call that failed, which the type does not say."""
    return cast(grpc.Call, error)


def _error_of(error: grpc.RpcError) -> common_pb2.Error | None:
    """The daemon's own Error in the status details, if it sent one."""
    for item in _call_of(error).trailing_metadata() or ():
        key, value = item[0], item[1]
        if key == _DETAILS and isinstance(value, bytes):
            status = common_pb2.Status.FromString(value)
            packed = common_pb2.Error()
            if any(detail.Unpack(packed) for detail in status.details):
                return packed
    return None
