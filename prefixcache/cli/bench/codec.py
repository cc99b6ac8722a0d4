"""`bench codec`: what each form of a block's bytes saves, what it costs, and what it does to a model's answers.

raw, int8 and int4 are whole requests through a daemon: `encode_gb_per_s` a store, `decode_gb_per_s` a load into a
cache of the shape that Transformers has, interleaved, in bytes of raw blocks, so that two forms are compared by the
tokens a second that they give. lossless is the disk tier's form, packed and unpacked on one thread, without the disk.
`ratio` is raw bytes by stored bytes; for lossless, of the model's own blocks where it is installed, else of a sample.
`kl` is what `quality` measures, where the model is installed. GB are 10^9 bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np

from prefixcache.cli.bench import cached, daemon, worker
from prefixcache.cli.bench.measure import Call, Case, interleave
from prefixcache.cli.bench.plan import Plan, Progress
from prefixcache_client import Client, ClientOptions, Namespace
from prefixcache_offload.codecs import lossless

# 8 layers x 8 heads x 64 tokens x (128 + 128) x 2 bytes: blocks of 2 MiB.
LAYERS, KV_HEADS, HEAD_DIM = 8, 8, 128
CODECS: Final = ("raw", "int8", "int4")
PROMPTS_HELD: Final = 10
TIMEOUT_S: Final = 20.0


def run(plan: Plan, progress: Progress) -> dict[str, Any]:
    """`codec` of the result."""
    progress("codec: starting a daemon")
    with daemon.running(plan.copy_blocks * plan.block_bytes * PROMPTS_HELD) as started:
        progress("codec: measuring loads and stores")
        told: dict[str, Any] = worker.ask("codec", started, plan)
    progress("codec: asking the model")
    _ask_the_model(told, plan)
    return {"codec": told}


def measure(address: str, folder: Path, plan: Plan) -> dict[str, Any]:
    """Runs in the worker."""
    options = ClientOptions(timeout_s=TIMEOUT_S, store_timeout_s=TIMEOUT_S, client_name="bench")
    with Client(address, options) as client, ExitStack() as stack:
        spaces = {codec: cached.namespace(client, LAYERS, KV_HEADS, HEAD_DIM, codec) for codec in CODECS}
        tensor = _blocks(plan.copy_blocks)
        cases: dict[str, Case] = {}
        for number, (codec, ns) in enumerate(spaces.items(), start=1):
            cases[f"decode {codec}"] = _load(client, ns, tensor, number, stack)
            cases[f"encode {codec}"] = _store(client, ns, tensor, number)
        cases |= _lossless_cases()
        samples = interleave(cases, plan.codec_rounds)
    sizes = dict.fromkeys(CODECS, tensor.nbytes) | {"lossless": lossless.sample().nbytes}
    raw_bytes = spaces["raw"].block_bytes
    packed = lossless.pack(lossless.sample(), lossless.SPLIT_BYTES)
    ratios = {codec: raw_bytes / ns.block_bytes for codec, ns in spaces.items()}
    ratios["lossless"] = 1.0 if packed is None else sizes["lossless"] / packed.memory.nbytes
    return {name: {"ratio": ratios[name]} | _rates(name, size, samples) for name, size in sizes.items()}


def _rates(name: str, size: int, samples: dict[str, list[float]]) -> dict[str, float]:
    return {f"{way}_gb_per_s": size / statistics.median(samples[f"{way} {name}"]) / 1e9 for way in ("encode", "decode")}


def _ask_the_model(told: dict[str, Any], plan: Plan) -> None:
    """Add `kl` of the forms and the ratio of lossless on real blocks, where the model can be run."""
    try:
        from prefixcache.cli.bench import quality
        from prefixcache_transformers.smollm2 import ModelNotInstalledError
    except ImportError:
        return
    try:
        examined = [
            quality.examine(name, prefix=plan.codec_prefix, asked=plan.codec_asked)
            for name in list(quality.texts())[: plan.codec_texts]
        ]
    except (ImportError, ModelNotInstalledError):
        return
    told["raw"]["kl"] = told["lossless"]["kl"] = 0.0
    told["lossless"]["ratio"] = statistics.fmean(each.lossless_ratio() for each in examined)
    for codec in ("int8", "int4"):
        told[codec]["kl"] = statistics.fmean(each.quality(codec).kl for each in examined)


def _blocks(blocks: int) -> Any:
    """bfloat16 [block, head, layer, k|v, token, dim], as the Transformers adapter hands blocks over."""
    import torch

    chance = torch.Generator().manual_seed(1)
    one = torch.randn((1, KV_HEADS, LAYERS, 2, cached.BLOCK_TOKENS, HEAD_DIM), generator=chance).to(torch.bfloat16)
    return one.repeat(blocks, *(1,) * (one.dim() - 1))


def _load(client: Client, ns: Namespace, tensor: Any, number: int, stack: ExitStack) -> Case:
    import torch

    tokens = cached.tokens_of(number, len(tensor) * cached.BLOCK_TOKENS)
    cached.store(client, ns, tokens, tensor)
    stack.enter_context(client.acquire(ns, tokens, ttl_s=600))  # stays whatever is stored later
    blocks, heads, layers, pair, size, dim = tensor.shape
    # As a Transformers cache lies in memory, [layer, k|v, head, token of the prompt, dim], and is seen as blocks.
    cache = torch.zeros((layers, pair, heads, blocks * size, dim), dtype=tensor.dtype)
    target = cache.unflatten(3, (blocks, size)).permute(3, 2, 0, 1, 4, 5)

    def load() -> bool:
        with client.acquire(ns, tokens) as found:
            return bool(found.copy_to(target)) and found.tokens == len(tokens)

    return Case.of(load, _must)


def _store(client: Client, ns: Namespace, tensor: Any, number: int) -> Case:
    """Every round stores a prompt that was never seen; those before it are evicted as the pool fills."""
    numbers: Iterator[int] = count(1000 * number)

    def prepare() -> Call:
        tokens = cached.tokens_of(next(numbers), len(tensor) * cached.BLOCK_TOKENS)
        return lambda: client.store(ns, tokens, tensor).stored_blocks == len(tensor)

    return Case(prepare, _must)


def _lossless_cases() -> dict[str, Case]:
    sample = lossless.sample()
    packed = lossless.pack(sample, lossless.SPLIT_BYTES)
    if packed is None:
        raise RuntimeError("the sample does not shrink")
    stored, target = np.frombuffer(packed.memory, np.uint8), np.zeros(sample.size, np.uint8)
    return {
        "encode lossless": Case.of(lambda: lossless.pack(sample, lossless.SPLIT_BYTES), _must),
        "decode lossless": Case.of(lambda: lossless.unpack(stored, target), _must),
    }


def _must(done: object) -> None:
    """A fast transfer that did not happen is no measurement."""
    if not done:
        raise RuntimeError("a request was not wholly served")
