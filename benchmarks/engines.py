"""vLLM on the CPU with and without the connector: what a warm prefix is worth, and what a request without one pays.

Everything stands beside its limit, measured in the same run and in turn: vLLM's own prefix cache, an engine without
connector, a synchronous load of the same bytes. Engines run in processes of their own (`engine_child.py`).
Run: make bench-engines, or python benchmarks/engines.py --json in an environment that has vLLM.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_child import VOCABULARY, Child, make_model

from prefixcache.cli.bench import daemon

SECTIONS = ("first_tokens", "overhead", "scheduler", "loads", "start")
IN_A_ROW = 3
"""Requests one behind the other in one measurement: what the first ones store costs the next ones."""
RESAMPLES = 2000
MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """How much is measured. `pairs`: of requests that share nothing; `requests`: for the scheduler's cost."""

    model: str
    heavy_model: str
    pool_bytes: int
    prompts: tuple[int, ...]
    rounds: int
    pairs: int
    requests: int
    load_pairs: int


FULL = Sizes("mid", "heavy", 1536 * MIB, (2048, 2049, 8192), 3, 40, 200, 12)
QUICK = Sizes("tiny", "tiny", 256 * MIB, (512, 513, 1024), 2, 4, 8, 2)
ENGINES = 4
"""So many times both engines of a comparison are started: two processes of the same program differ by some percent for
as long as they live, which pairs of requests alone would take for a difference between the programs."""


def main() -> int:
    """Print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON object on standard output")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, not how fast")
    parser.add_argument(
        "--only", choices=SECTIONS, nargs="*", default=SECTIONS, help="what to measure; else everything"
    )
    parser.add_argument("--lmcache", metavar="PYTHON", help="of an environment with vLLM and LMCache, to compare with")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prefixcache-engines-"))
    try:
        figures = measure(folder, set(options.only), quick=options.quick)
        if options.lmcache:
            figures["lmcache"] = lmcache(folder, options.lmcache, QUICK if options.quick else FULL)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(figures))
    return 0


def measure(folder: Path, sections: set[str], *, quick: bool) -> dict[str, Any]:
    """All figures; seconds unless the name says otherwise."""
    sizes = QUICK if quick else FULL
    models = {kind: make_model(kind, folder / kind) for kind in {sizes.model, sizes.heavy_model, "tiny"}}
    figures: dict[str, Any] = {}
    with daemon.running(sizes.pool_bytes) as running:
        address = running.address
        if "first_tokens" in sections:
            figures["vllm"] = first_tokens(models[sizes.model], address, sizes.prompts, sizes.rounds)
        if "overhead" in sections:
            figures |= overhead(models[sizes.model], address, sizes.pairs)
        if "scheduler" in sections:
            figures |= scheduler(models["tiny"], address, sizes.requests)
        if "loads" in sections:
            figures |= loads(models[sizes.heavy_model], address, sizes.prompts[-1], sizes.load_pairs)
        if "start" in sections:
            figures |= start(models["tiny"], folder)
    return figures


def first_tokens(model: Path, address: str, sizes: tuple[int, ...], rounds: int) -> list[dict[str, float]]:
    """Time to the first token: computed and from its own cache in an engine without the connector, and from the daemon
    in a process that never saw the prompt.

    An engine's own cache holds whole pages of 128 tokens of a prompt without its last token: of 2,048 tokens it
    computes 128 again, which is its worst case, of 2,049 one, which is its best. The daemon's blocks are of 64 tokens.
    """
    prompts = {size: [prompt(size * 100 + i, size) for i in range(rounds if size < 8000 else 1)] for size in sizes}
    with Child(model, address) as engine:
        engine.warm_up()
        for listed in prompts.values():
            for each in listed:
                engine.first_token_s(each)
        engine.settle()
    rows = []
    settings = {"enable_prefix_caching": True}
    with Child(model, address, **settings) as engine, Child(model, None, **settings) as plain:
        engine.warm_up()
        plain.warm_up()
        for size, listed in prompts.items():
            cold = [plain.first_token_s(each) for each in listed]
            warm, own = [], []
            for each in listed * (3 // len(listed)):
                warm.append(engine.first_token_s(each))
                engine.forget_own_cache()
                own.append(plain.first_token_s(each))
            rows.append(
                {
                    "tokens": size,
                    "cold_ttft_s": statistics.median(cold),
                    "own_warm_ttft_s": statistics.median(own),
                    "warm_ttft_s": statistics.median(warm),
                }
            )
    return rows


def overhead(model: Path, address: str, pairs: int) -> dict[str, float]:
    """Requests that share nothing, with and without the connector in turn; and the connector's own CPU time."""
    ratios: list[float] = []
    for number in range(ENGINES):
        done = len(ratios)
        ratios += no_reuse(model, address, range(done, done + (pairs - done) // (ENGINES - number)))
    with Child(model, address, profile=True) as engine:
        engine.warm_up()
        for i in range(max(4, pairs // 4)):
            engine.request_s(*[prompt(40_000 + i * IN_A_ROW + j, 256) for j in range(IN_A_ROW)], max_tokens=8)
            engine.request_s(prompt(20_000 + i, 2048), max_tokens=1)
        share = engine.profile()["share"]
    low, high = interval(ratios)
    return {
        "no_reuse_ratio": high,
        "no_reuse_ratio_low": low,
        "no_reuse_ratio_median": statistics.median(ratios),
        "client_cpu_share": share,
    }


def no_reuse(model: Path, address: str, pairs: range) -> list[float]:
    """Time without the connector / with it, of each pair, in two engines started for it."""
    with Child(model, address) as ours, Child(model, None) as plain:
        for engine in (ours, plain):
            engine.warm_up()
        ratios = []
        for i in pairs:
            each = [prompt(10_000 + i * IN_A_ROW + j, 256) for j in range(IN_A_ROW)]
            order = [(ours, "with"), (plain, "without")] if i % 2 else [(plain, "without"), (ours, "with")]
            took = {name: engine.request_s(*each, max_tokens=8) for engine, name in order}
            ratios.append(took["without"] / took["with"])
    return ratios


def scheduler(model: Path, address: str, requests: int) -> dict[str, float]:
    """The connector's CPU time on the scheduler's thread, of requests of 2,048 tokens that share nothing."""
    with Child(model, address, profile=True) as engine:
        engine.warm_up()
        for i in range(requests):
            engine.request_s(prompt(30_000 + i, 2048), max_tokens=1)
        profile = engine.profile()
    return {name: profile[name] for name in ("scheduler_us_p50", "scheduler_us_p99")}


def loads(model: Path, address: str, tokens: int, pairs: int) -> dict[str, float]:
    """The same prefix into two engines that decode meanwhile, in turn: loaded beside the steps, and inside one."""
    shared = prompt(77, tokens)
    took: dict[str, list[float]] = {"async": [], "sync": []}
    with (
        Child(model, address, connector={"load": "async"}) as beside,
        Child(model, address, connector={"load": "sync"}) as inside,
    ):
        engines = {"async": beside, "sync": inside}
        for engine in engines.values():
            engine.warm_up()
        beside.first_token_s(shared)
        beside.settle()
        for engine in engines.values():
            engine.first_token_beside_s(shared)  # touches the pool's pages
        for i in range(pairs):
            for kind in ("async", "sync") if i % 2 else ("sync", "async"):
                took[kind].append(engines[kind].first_token_beside_s(shared))
    ratios = [one / other for one, other in zip(took["async"], took["sync"], strict=True)]
    low, high = interval(ratios)
    return {
        "async_over_sync": statistics.median(ratios),
        "async_over_sync_low": low,
        "async_over_sync_high": high,
        "async_load_ttft_s": statistics.median(took["async"]),
        "sync_load_ttft_s": statistics.median(took["sync"]),
    }


def lmcache(folder: Path, python: str, sizes: Sizes) -> list[dict[str, float]]:
    """The first token beside LMCache's connector, in turn: both engines computed the prompt themselves and were made to
    forget their own cache. LMCache keeps blocks in the engine's own memory, ours come from the daemon."""
    os.environ.update(LMCACHE_LOCAL_CPU="True", LMCACHE_MAX_LOCAL_CPU_SIZE="1.0", LMCACHE_TRACK_USAGE="false")
    theirs = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    model, rows = folder / sizes.model, []
    with (
        daemon.running(sizes.pool_bytes) as running,
        Child(model, running.address, enable_prefix_caching=True) as one,
        Child(model, None, python=python, enable_prefix_caching=True, kv_transfer_config=theirs) as other,
    ):
        engines = {"": one, "lmcache_": other}
        for engine in engines.values():
            engine.warm_up()
        for size in sizes.prompts:
            shared = prompt(size + 7, size)
            took: dict[str, list[float]] = {name: [] for name in engines}
            cold = {f"{name}cold_ttft_s": engine.first_token_s(shared) for name, engine in engines.items()}
            for _ in range(2 * sizes.rounds):
                for name, engine in engines.items():
                    engine.forget_own_cache()
                    took[name].append(engine.first_token_s(shared))
            warm = {f"{name}warm_ttft_s": statistics.median(times) for name, times in took.items()}
            rows.append({"tokens": size} | cold | warm)
    return rows


def start(model: Path, folder: Path) -> dict[str, float]:
    """What an engine's start gets longer by when no daemon is there."""
    took = []
    for _ in range(3):
        with Child(model, f"unix://{folder}/nobody.sock") as engine:
            took.append(engine.connector_start_s)
    return {"start_extra_s": statistics.median(took)}


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95% interval of the median, by bootstrap."""
    medians = sorted(statistics.median(random.Random(i).choices(ratios, k=len(ratios))) for i in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def prompt(seed: int, tokens: int) -> list[int]:
    """Random token ids."""
    generator = random.Random(seed)
    return [generator.randrange(10, VOCABULARY - 10) for _ in range(tokens)]


if __name__ == "__main__":
    sys.exit(main())
