"""What permuting pages costs: 64 blocks between a paged cache and slots, beside a plain copy of the same bytes.

The limit is one torch copy from one flat tensor to another. Cases and limit are run call by call in turn, another one
first in every round; medians and their ratios (limit / case, so 1.0 is as fast as a plain copy). CPU only; `gpu.py` is
for devices. Run: python benchmarks/paged.py --json
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from prefixcache.cli.bench.measure import Case, interleave
from prefixcache_offload.memory import Memory
from prefixcache_offload.paged import PagedCache, PagedTensor, Stretch, gather, scatter
from prefixcache_offload.strides import PartShape
from prefixcache_offload.units import SLOT_GRANULE

BLOCKS, BLOCK_TOKENS = 64, 64
PART = PartShape(kv_heads=8, layers=8, tokens=BLOCK_TOKENS, k_dim=128, v_dim=128, itemsize=2)


@dataclass(frozen=True)
class Layout:
    """Axes, tokens a page, and whether all layers lie in one storage."""

    axes: str
    page_tokens: int
    one_storage: bool


LAYOUTS = {
    "nhd_16": Layout("cbthd", 16, one_storage=False),
    "hnd_16": Layout("cbhtd", 16, one_storage=False),
    "fused_16": Layout("bhtd", 16, one_storage=False),
    "fused_128": Layout("bhtd", 128, one_storage=False),
    "fused_128_one_storage": Layout("bhtd", 128, one_storage=True),
    "cross_layer_16": Layout("blcthd", 16, one_storage=True),
}


def tensors(layout: Layout, pages: int) -> Iterator[PagedTensor]:
    """The tensors of an engine with twice the pages that a prompt needs."""
    fused = 1 if "c" in layout.axes else 2
    sizes = {"c": 2, "b": pages, "h": PART.kv_heads, "t": layout.page_tokens, "l": PART.layers, "d": PART.k_dim * fused}
    if "l" in layout.axes:
        yield PagedTensor(torch.ones([sizes[a] for a in layout.axes], dtype=torch.bfloat16), layout.axes)
        return
    shape = [sizes[a] for a in layout.axes]
    storage = torch.ones([PART.layers, *shape], dtype=torch.bfloat16) if layout.one_storage else None
    for layer in range(PART.layers):
        one = torch.ones(shape, dtype=torch.bfloat16) if storage is None else storage[layer]
        yield PagedTensor(one, layout.axes, first_layer=layer)


def cases() -> dict[str, Case]:
    """Every layout in both directions, and the limit."""
    rng = np.random.default_rng(1)
    granules = PART.part_bytes // SLOT_GRANULE
    pool = np.ones(BLOCKS * PART.part_bytes * 2, np.uint8)
    slots = rng.permutation(BLOCKS * 2)[:BLOCKS] * granules
    memory = Memory.of_bytes(pool)
    found: dict[str, Case] = {}
    for name, layout in LAYOUTS.items():
        pages = BLOCKS * BLOCK_TOKENS // layout.page_tokens
        cache = PagedCache(PART, tensors(layout, 2 * pages))
        stretch = [Stretch(slots, rng.permutation(2 * pages)[:pages], 0, BLOCKS * BLOCK_TOKENS)]
        found[f"gather_{name}"] = Case.of(partial(gather, cache, memory, stretch))
        found[f"scatter_{name}"] = Case.of(partial(scatter, cache, memory, stretch))
    source, target = (torch.ones(BLOCKS * PART.part_bytes, dtype=torch.uint8) for _ in range(2))
    found["plain"] = Case.of(partial(target.copy_, source))
    return found


def measure(rounds: int) -> dict[str, float]:
    """`*_ratio`: seconds of the plain copy / seconds of the case, medians; `plain_gb_per_s` for orientation."""
    medians = {name: statistics.median(times) for name, times in interleave(cases(), rounds).items()}
    plain = medians.pop("plain")
    result = {f"{name}_ratio": plain / seconds for name, seconds in medians.items()}
    return {"mib": BLOCKS * PART.part_bytes / 2**20, "plain_gb_per_s": BLOCKS * PART.part_bytes / plain / 1e9, **result}


def main() -> None:
    """Print the figures, as a line each or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="of torch, for the plain copy")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(options.rounds)
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:36} {value:8.2f}" for name, value in result.items()))


if __name__ == "__main__":
    main()
