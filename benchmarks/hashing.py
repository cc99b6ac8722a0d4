"""How much dearer block keys are than the hashing they consist of.

Measures `block_keys` beside its limit, the bare loop `k = sha256(k + body).digest()` over as many ready-made bodies,
call by call in turn, so that a busy machine slows both; prints medians and their ratio.
Run: python benchmarks/hashing.py --json
"""

import argparse
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

from prefixcache.identity import KeyChain, block_keys

ROOT = bytes(range(32))


def bare_loop(bodies: list[bytes]) -> bytes:
    """The limit: a chain of SHA-256 over bodies that are already in place."""
    key = ROOT
    for body in bodies:
        key = hashlib.sha256(key + body).digest()
    return key


def interleaved_medians_us(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median microseconds of each call, all of them run once per round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def measure(tokens: int = 32768, block_tokens: int = 64, rounds: int = 200) -> dict[str, float]:
    """Figures for one prompt of random tokens: microseconds of each form, and `ratio` = packed tokens to bare loop."""
    packed = os.urandom(4 * tokens)
    size = 4 * block_tokens
    bodies = [bytes(4) + packed[offset : offset + size] for offset in range(0, len(packed) - size + 1, size)]
    array = np.frombuffer(packed, "<u4").astype(np.int64)
    listed = array.tolist()
    calls: dict[str, Callable[[], object]] = {
        "bare_us": lambda: bare_loop(bodies),
        "packed_us": lambda: block_keys(ROOT, packed, block_tokens),
        "array_us": lambda: block_keys(ROOT, array, block_tokens),
        "list_us": lambda: block_keys(ROOT, listed, block_tokens),
        "extras_us": lambda: block_keys(ROOT, packed, block_tokens, {0: b"extra"}),
        "chain_us": lambda: KeyChain(ROOT, block_tokens).append(packed),
    }
    result = interleaved_medians_us(calls, rounds)
    return {"tokens": tokens, "block_tokens": block_tokens, **result, "ratio": result["packed_us"] / result["bare_us"]}


def main() -> None:
    """Print the figures, as a line each or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.tokens, options.block_tokens, options.rounds)
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:12} {value:10.3f}" for name, value in result.items()))


if __name__ == "__main__":
    main()
