"""`bench load` and `bench store`: one request's blocks through the daemon, beside a bare copy of the same blocks.

A load is acquire, copy into the worker's tensor, release; a store is hashing, reserve, copy, commit. The limit is
`numpy.copyto` of the same number of blocks of the same size, one call a block, on one thread of the same process with
the same tunables: for a load out of the very slots that are loaded, for a store into shared memory touched before.
GB are 10^9 bytes.
"""

from __future__ import annotations

import mmap
import os
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from prefixcache.cli.bench import cached, daemon, worker
from prefixcache.cli.bench.measure import Call, Case, interleave
from prefixcache.cli.bench.plan import Plan, Progress
from prefixcache_client import Client, ClientOptions, Namespace

# 8 layers x 8 heads x 64 tokens x (128 + 128) x 2 bytes: blocks of 2 MiB.
LAYERS, KV_HEADS, HEAD_DIM = 8, 8, 128
REQUESTS_HELD: Final = 8
TIMEOUT_S: Final = 10.0

Bytes = npt.NDArray[np.uint8]


def run(plan: Plan, progress: Progress, wanted: tuple[str, ...]) -> dict[str, Any]:
    """`load` and `store` of the result, those that are wanted."""
    progress("load, store: starting a daemon")
    with daemon.running(plan.copy_blocks * plan.block_bytes * REQUESTS_HELD) as started:
        progress("load, store: measuring")
        told = worker.ask("transfer", started, plan)
    return {name: told[name] for name in wanted}


def measure(address: str, folder: Path, plan: Plan) -> dict[str, Any]:
    """Runs in the worker."""
    options = ClientOptions(timeout_s=TIMEOUT_S, store_timeout_s=TIMEOUT_S, client_name="bench")
    with Client(address, options) as client, ExitStack() as stack:
        ns = cached.namespace(client, LAYERS, KV_HEADS, HEAD_DIM)
        if ns.block_bytes != plan.block_bytes:
            raise RuntimeError(f"blocks are {ns.block_bytes} bytes, not {plan.block_bytes}")
        tensor = _tensor(plan.copy_blocks, ns.block_bytes)
        cases = _load_cases(client, ns, tensor, stack) | _store_cases(client, ns, tensor)
        samples = interleave(cases, plan.copy_rounds)
    size_bytes = plan.copy_blocks * plan.block_bytes
    rate = {name: size_bytes / statistics.median(seconds) / 1e9 for name, seconds in samples.items()}
    return {
        "load": {"gb_per_s": rate["load"], "copy_gb_per_s": rate["load_copy"]},
        "store": {"gb_per_s": rate["store"], "copy_gb_per_s": rate["store_copy"]},
    }


def _tensor(blocks: int, block_bytes: int) -> Any:
    """The worker's own memory: a torch tensor u8[blocks, block_bytes], every page touched."""
    import torch

    tensor = torch.empty((blocks, block_bytes), dtype=torch.uint8)
    tensor.numpy()[:] = np.random.default_rng(1).integers(256, size=block_bytes, dtype=np.uint8)
    return tensor


def _load_cases(client: Client, ns: Namespace, tensor: Any, stack: ExitStack) -> dict[str, Case]:
    tokens = cached.tokens_of(1, len(tensor) * cached.BLOCK_TOKENS)
    cached.store(client, ns, tokens, tensor)
    lease = stack.enter_context(client.acquire(ns, tokens, ttl_s=600))
    sources = [stack.enter_context(lease.view(block)) for block in range(len(tensor))]
    rows = list(tensor.numpy())

    def load() -> bool:
        with client.acquire(ns, tokens) as found:
            return bool(found.copy_to(tensor)) and found.tokens == len(tokens)

    return {"load": Case.of(load, _must), "load_copy": Case.of(lambda: _copy(rows, sources))}


def _store_cases(client: Client, ns: Namespace, tensor: Any) -> dict[str, Case]:
    """Every round stores a prompt that was never seen; those before it are evicted as the pool fills."""
    numbers: Iterator[int] = count(2)
    targets = _shared(len(tensor), ns.block_bytes)
    rows = list(tensor.numpy())

    def prepare() -> Call:
        tokens = cached.tokens_of(next(numbers), len(tensor) * cached.BLOCK_TOKENS)
        return lambda: client.store(ns, tokens, tensor).stored_blocks == len(tensor)

    return {"store": Case(prepare, _must), "store_copy": Case.of(lambda: _copy(targets, rows))}


def _copy(targets: list[Bytes], sources: list[Bytes]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def _shared(blocks: int, block_bytes: int) -> list[Bytes]:
    """Shared memory as the pool is, every page touched: one array per block."""
    descriptor = os.memfd_create("prefixcache-bench")
    try:
        os.ftruncate(descriptor, blocks * block_bytes)
        memory = mmap.mmap(descriptor, blocks * block_bytes)
    finally:
        os.close(descriptor)
    whole = np.frombuffer(memory, np.uint8).reshape(blocks, block_bytes)
    whole[:] = 1
    return list(whole)


def _must(done: object) -> None:
    """A fast transfer that did not happen is no measurement."""
    if not done:
        raise RuntimeError("a request was not wholly served")
