"""vLLM on the CPU with and without the connector: what a warm prefix is worth, and what a request without one pays.

Everything stands beside its limit, measured in the same run and in turn: vLLM's own prefix cache, an engine without
connector, a synchronous load of the same bytes. Engines run in processes of their own (`engine_child.py`).
Run: make bench-engines, or python benchmarks/engines.py --json in an environment that has vLLM.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine_child import VOCABULARY, Child, make_model

from prefixcache.cli.bench import daemon

PAIRS = 40
RESAMPLES = 2000
MIB = 1 << 20


def main() -> int:
    """Print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON object on standard output")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, not how fast")
    quick = bool(parser.parse_args().quick)
    folder = Path(tempfile.mkdtemp(prefix="prefixcache-engines-"))
    try:
        figures = measure(folder, quick=quick)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(figures))
    return 0


def measure(folder: Path, *, quick: bool) -> dict[str, Any]:
    """All figures; seconds unless the name says otherwise."""
    kinds = ("tiny", "tiny") if quick else ("mid", "heavy")
    models = {kind: make_model(kind, folder / kind) for kind in dict.fromkeys(kinds)}
    figures: dict[str, Any] = {}
    with daemon.running((256 if quick else 1536) * MIB) as running:
        address = running.address
        sizes = (512, 1024) if quick else (2048, 8192)
        figures["vllm"] = first_tokens(models[kinds[0]], address, sizes, rounds=2 if quick else 3)
        figures |= overhead(models[kinds[0]], address, pairs=4 if quick else PAIRS)
        figures |= loads(models[kinds[1]], address, 1024 if quick else 8192, rounds=2 if quick else 3)
    return figures


def first_tokens(model: Path, address: str, sizes: tuple[int, ...], rounds: int) -> list[dict[str, float]]:
    """Time to the first token: computed, from vLLM's own cache, and from the daemon in a process that never saw it."""
    prompts = {size: [prompt(size * 100 + i, size) for i in range(rounds if size < 8000 else 1)] for size in sizes}
    cold: dict[int, list[float]] = {}
    with Child(model, address) as engine:
        engine.warm_up()
        for size, listed in prompts.items():
            cold[size] = [engine.first_token_s(each) for each in listed]
        engine.settle()
    rows = []
    with Child(model, address, enable_prefix_caching=True) as engine:
        engine.warm_up()
        for size, listed in prompts.items():
            warm, own = [], []
            for each in listed * (3 // len(listed)):
                engine.forget_own_cache()
                warm.append(engine.first_token_s(each))
                own.append(engine.first_token_s(each))
            rows.append(
                {
                    "tokens": size,
                    "cold_ttft_s": statistics.median(cold[size]),
                    "own_warm_ttft_s": statistics.median(own),
                    "warm_ttft_s": statistics.median(warm),
                }
            )
    return rows


def overhead(model: Path, address: str, pairs: int) -> dict[str, float]:
    """Requests that share nothing, with and without the connector in turn; and the connector's own CPU time."""
    with Child(model, address, profile=True) as ours, Child(model, None) as plain:
        for engine in (ours, plain):
            engine.warm_up()
        ratios = []
        for i in range(pairs):
            each = prompt(10_000 + i, 512)
            order = [(ours, "with"), (plain, "without")] if i % 2 else [(plain, "without"), (ours, "with")]
            took = {name: engine.request_s(each, 8) for engine, name in order}
            ratios.append(took["without"] / took["with"])
        for i in range(max(4, pairs // 2)):
            ours.request_s(prompt(20_000 + i, 2048), 1)
        profile = ours.profile()
    low_high = sorted(statistics.median(random.Random(i).choices(ratios, k=len(ratios))) for i in range(RESAMPLES))
    return {
        "no_reuse_ratio": low_high[int(0.975 * RESAMPLES)],
        "no_reuse_ratio_median": statistics.median(ratios),
        "client_cpu_share": profile["share"],
        "scheduler_us_p99": profile["scheduler_us_p99"],
        "scheduler_us_p50": profile["scheduler_us_p50"],
        "start_extra_s": ours.connector_start_s,
    }


def loads(model: Path, address: str, tokens: int, rounds: int) -> dict[str, float]:
    """The same prefix into an engine that decodes meanwhile: loaded beside its steps, and inside one."""
    shared = prompt(77, tokens)
    with Child(model, address) as engine:
        engine.first_token_s(shared)
        engine.settle()
    took: dict[str, list[float]] = {"async": [], "sync": []}
    for _ in range(2):
        for kind in took:
            with Child(model, address, connector={"load": kind}) as engine:
                engine.warm_up()
                took[kind] += [engine.first_token_beside_s(shared) for _ in range(rounds)]
    medians = {kind: statistics.median(times) for kind, times in took.items()}
    return {
        "async_over_sync": medians["async"] / medians["sync"],
        "async_load_ttft_s": medians["async"],
        "sync_load_ttft_s": medians["sync"],
    }


def prompt(seed: int, tokens: int) -> list[int]:
    """Random token ids."""
    generator = random.Random(seed)
    return [generator.randrange(10, VOCABULARY - 10) for _ in range(tokens)]


if __name__ == "__main__":
    sys.exit(main())
