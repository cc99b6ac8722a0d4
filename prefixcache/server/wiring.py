"""Tables: which rpc is answered by what, on which transport. Made once at start; no behaviour of its own."""

from collections.abc import Callable
from functools import partial
from typing import Any

from prefixcache.core import commands as c
from prefixcache.server.admin_calls import AdminCalls, unimplemented
from prefixcache.server.cache_calls import CacheCalls
from prefixcache.server.dispatch import CallCounters, local_call, parse
from prefixcache.server.grpc_server import ADMIN_SERVICE, CACHE_SERVICE, GrpcCalls, GrpcServer
from prefixcache.server.local_channel import Backend
from prefixcache.server.pin_calls import PinCalls
from prefixcache.server.processes import Process
from prefixcache.server.service import Method, SessionCalls, Shell, export_message
from prefixcache.server.sessions import Session
from prefixcache.server.streams import StreamCalls
from prefixcache.v1 import admin_pb2, cache_pb2, local_pb2

Answers = dict[str, Callable[[Any, Any], Any]]


def follow_ends(orders: dict[type, Callable[..., None]], shell: Shell) -> None:
    """Keep the tables of leases, reservations and namespaces as the planner ends them, and what it left for later."""
    holdings = shell.holdings

    def lease_ended(order: c.LeaseEnded) -> None:
        lease = holdings.leases.pop(order.lease, None)
        if lease is not None:
            lease.ended(order.reason)

    def arrived(order: c.Arrived) -> None:
        lease = holdings.leases.get(order.lease)
        if lease is not None:
            lease.arrived(order)

    def reservation_ended(order: c.ReservationEnded) -> None:
        holdings.ran_out(order.reservation, order.quarantined_slots)

    def namespace_forgotten(order: c.NamespaceForgotten) -> None:
        shell.forget_namespace(order.namespace)

    orders[c.Arrived] = arrived
    orders[c.MoreToDo] = shell.background.note_more
    orders[c.LeaseEnded] = lease_ended
    orders[c.NamespaceForgotten] = namespace_forgotten
    orders[c.ReservationEnded] = reservation_ended


def session_methods(shell: Shell, sessions: SessionCalls) -> dict[str, Method]:
    """Methods of CacheService with one request and one answer, all needing a session but where said."""
    calls = CacheCalls(shell)
    answers: Answers = {
        "KeepAlive": sessions.keep_alive,
        "OpenNamespace": sessions.open_namespace,
        "Acquire": calls.acquire,
        "Release": calls.release,
        "Reserve": calls.reserve,
        "Commit": calls.commit,
        "Abort": calls.abort,
    }
    methods = {name: Method(name, _request(cache_pb2, name), answer) for name, answer in answers.items()}
    methods["Lookup"] = Method("Lookup", _request(cache_pb2, "Lookup"), calls.lookup, needs_session=False)
    return methods


def add_services(server: GrpcServer, shell: Shell, counters: CallCounters, admin: AdminCalls) -> None:
    """Everything that gRPC answers."""
    grpc_calls = GrpcCalls(shell, counters)
    sessions, streams = SessionCalls(shell), StreamCalls(shell)
    methods = session_methods(shell, sessions)
    methods["CloseSession"] = Method("CloseSession", _request(cache_pb2, "CloseSession"), sessions.close_session)
    methods["OpenSession"] = Method(
        "OpenSession", _request(cache_pb2, "OpenSession"), sessions.open_over_grpc, needs_session=False
    )
    handlers = {name: grpc_calls.unary(method) for name, method in methods.items()}
    for name, answer in (("ReadBlocks", streams.read_blocks), ("Arrivals", streams.arrivals)):
        handlers[name] = grpc_calls.server_stream(Method(name, _request(cache_pb2, name), answer))
    handlers["WriteBlocks"] = grpc_calls.write_blocks(streams)
    server.add(CACHE_SERVICE, handlers)
    server.add(ADMIN_SERVICE, _admin_handlers(grpc_calls, admin))


def _admin_handlers(grpc_calls: GrpcCalls, admin: AdminCalls) -> dict[str, Any]:
    answers: Answers = {
        "Evict": admin.evict,
        "DescribePrefix": admin.describe_prefix,
        "GetStats": admin.get_stats,
        "Drain": admin.drain,
        "Flush": admin.flush,
        "Pin": admin.pins.pin,
        "Unpin": admin.pins.unpin,
        "ListPins": admin.pins.list_pins,
        "Prefetch": admin.pins.prefetch,
        "ListPrefixes": admin.list_prefixes,
    }
    handlers = {
        name: grpc_calls.unary(Method(name, _request(admin_pb2, name), answer, needs_session=False))
        for name, answer in answers.items()
    }
    watch = Method("WatchEvents", _request(admin_pb2, "WatchEvents"), admin.watchers.watch, needs_session=False)
    return handlers | {"WatchEvents": grpc_calls.watch_events(watch, admin.watchers)}


def local_backend(shell: Shell, counters: CallCounters, pins: PinCalls) -> Backend:
    """Everything that the local channel answers."""
    sessions, streams = SessionCalls(shell), StreamCalls(shell)
    methods = session_methods(shell, sessions)
    methods["Arrivals"] = Method("Arrivals", _request(cache_pb2, "Arrivals"), streams.subscribe)
    answers: Answers = {"Pin": pins.pin, "Unpin": pins.unpin, "Prefetch": pins.prefetch}
    for name, answer in answers.items():
        methods[name] = Method(name, _request(admin_pb2, name), answer, needs_session=False)
    calls = {}
    for name, method in methods.items():
        number = local_pb2.Method.Value("METHOD_" + _upper_snake(name))
        calls[int(number)] = local_call(method, counters.latency_of("local", name))
    opening = Method("OpenSession", _request(cache_pb2, "OpenSession"), sessions.open_session)
    return Backend(
        calls=calls,
        open_session=partial(_open_local, sessions, opening),
        map_pool=partial(_map_pool, shell),
        end=shell.end,
        exited=shell.exited,
        background=shell.background,
    )


def _open_local(sessions: SessionCalls, opening: Method, payload: bytes, process: Process) -> tuple[Session, bytes]:
    request = parse(opening, payload)
    session = sessions.open_session(request, "local", pid=process.pid, process=process.number)
    return session, sessions.describe(session).SerializeToString()


def _map_pool(shell: Shell, payload: bytes) -> tuple[bytes, tuple[int, ...]]:
    request = parse(Method("MapPool", local_pb2.MapPoolRequest.FromString, unimplemented("MapPool")), payload)
    export = shell.export(request.pool)
    return local_pb2.MapPoolResponse(pool=export_message(export)).SerializeToString(), export.fds


def _request(module: Any, name: str) -> Callable[[bytes], Any]:
    parser: Callable[[bytes], Any] = getattr(module, f"{name}Request").FromString
    return parser


def _upper_snake(name: str) -> str:
    return "".join(f"_{letter}" if letter.isupper() else letter for letter in name).lstrip("_").upper()
