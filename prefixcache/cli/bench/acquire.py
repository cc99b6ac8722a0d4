"""`bench acquire`: the one call of a request, all hit, beside an echo of the same bytes over the same transport.

What is timed is the SDK's `acquire` with the tokens given as an array: hashing, the call, the match, the slots back.
Its limits are a bare server of the same kind in a process of its own: the echo alone, and hashing followed by the echo.
The bytes are those of the request as it is sent. Leases are released between the calls, untimed.

Every case meets its server in the same state: each has one of its own, called for nothing else, and ends its turn with
two small calls (the release and a lookup; two small echoes). A server shared by two cases would still be warm from the
first when the second is timed, and on a busy machine that is a third of an echo.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import numpy as np

from prefixcache.cli.bench import cached, daemon, echo, worker
from prefixcache.cli.bench.cached import Words
from prefixcache.cli.bench.measure import Case, interleave, medians_us
from prefixcache.cli.bench.plan import Plan, Progress
from prefixcache.identity import block_keys
from prefixcache.v1 import cache_pb2
from prefixcache_client import Client, ClientOptions, Lease, Namespace

POOL_BYTES: Final = 256 << 20
# The smallest block there is: slots of one page, so that only the call is measured.
LAYERS, KV_HEADS, HEAD_DIM = 1, 1, 16
TIMEOUT_S: Final = 10.0

OpenEcho = Callable[[Path], AbstractContextManager[echo.Echo]]


def run(plan: Plan, progress: Progress) -> dict[str, Any]:
    """`acquire` of the result."""
    progress("acquire: starting a daemon")
    with daemon.running(POOL_BYTES) as started:
        progress("acquire: measuring")
        return {"acquire": worker.ask("acquire", started, plan)}


def measure(address: str, folder: Path, plan: Plan) -> list[dict[str, Any]]:
    """Runs in the worker."""
    transports: list[tuple[str, OpenEcho]] = [("grpc", echo.grpc_echo), ("local", echo.local_echo)]
    rows = []
    for transport, open_echo in transports:
        options = ClientOptions(local_channel=transport == "local", timeout_s=TIMEOUT_S, client_name="bench")
        with (
            Client(address, options) as client,
            open_echo(_made(folder / f"{transport}-echo")) as echo_call,
            open_echo(_made(folder / f"{transport}-hash-echo")) as hash_echo_call,
        ):
            ns = cached.namespace(client, LAYERS, KV_HEADS, HEAD_DIM)
            for count in plan.acquire_tokens:
                cases = _cases(client, ns, (echo_call, hash_echo_call), _stored(client, ns, count))
                us = medians_us(interleave(cases, plan.acquire_rounds))
                rows.append(_row(transport, count, us))
            if client.stats().transport != transport:
                raise RuntimeError(f"calls went by {client.stats().transport}, not by {transport}")
    return rows


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _row(transport: str, tokens: int, us: dict[str, float]) -> dict[str, Any]:
    return {
        "transport": transport,
        "tokens": tokens,
        "p50_us": us["acquire"],
        "echo_p50_us": us["echo"],
        "hash_echo_p50_us": us["hash_echo"],
    }


def _stored(client: Client, ns: Namespace, count: int) -> Words:
    """A prompt of `count` tokens, all of it cached."""
    tokens = cached.tokens_of(count, count)
    if client.lookup(ns, tokens).tokens < count:
        blocks = np.zeros((count // cached.BLOCK_TOKENS, ns.block_bytes), np.uint8)
        cached.store(client, ns, tokens, blocks)
    return tokens


def _cases(client: Client, ns: Namespace, calls: tuple[echo.Echo, echo.Echo], tokens: Words) -> dict[str, Case]:
    root, request = ns.epoch.root, _request(ns, tokens)
    little = tokens[: cached.BLOCK_TOKENS]
    little_request = _request(ns, little)
    echo_call, hash_echo_call = calls

    def release(lease: Lease) -> None:
        if lease.tokens != len(tokens):
            raise RuntimeError(f"{lease.tokens} of {len(tokens)} tokens were hit: {lease.reason}")
        lease.release(len(tokens))
        client.lookup(ns, little)  # nothing of the release is still under way when the next call is timed

    def settle(call: echo.Echo) -> Callable[[object], object]:
        return lambda _: (call(little_request), call(little_request))

    return {
        "acquire": Case.of(lambda: client.acquire(ns, tokens), release),
        "echo": Case.of(lambda: echo_call(request), settle(echo_call)),
        "hash_echo": Case.of(
            lambda: (block_keys(root, tokens, cached.BLOCK_TOKENS), hash_echo_call(request)), settle(hash_echo_call)
        ),
    }


def _request(ns: Namespace, tokens: Words) -> bytes:
    """The request as the SDK sends it; ids are as long as real ones."""
    keys = block_keys(ns.epoch.root, tokens, cached.BLOCK_TOKENS)
    some_id = bytes(range(1, 17))
    blocks, asked = len(tokens) // cached.BLOCK_TOKENS, len(tokens)
    request = cache_pb2.AcquireRequest(
        session=some_id, lease=some_id, namespace_id=1, keys=keys, prompt_tokens=asked, max_blocks=blocks
    )
    return request.SerializeToString()
