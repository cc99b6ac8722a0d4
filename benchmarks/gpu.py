"""What the GPU tier reaches of a device's own copies; needs a CUDA device, torch and the extra `gpu`.

    copy_in, copy_out   64 slots of 2 MiB between a pinned host pool and a device pool, beside one torch copy of as many
                        pinned bytes in that direction
    gather, scatter     64 blocks between paged tensors and slots on the device, by the kernel and by a list copy of
                        torch, beside one device-to-device copy of the same bytes
    staged              the same from and to pinned host slots, beside the copies over the bus

Run call by call in turn, another one first in every round, each until the device is done; medians, and the ratio
limit / case. Run: python benchmarks/gpu.py --json
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from prefixcache.cli.bench.measure import Case, interleave
from prefixcache_offload import transfer
from prefixcache_offload.gpu import DevicePool, PoolContext, open_device_pool
from prefixcache_offload.gpu.ticket import Ticket
from prefixcache_offload.memory import Memory
from prefixcache_offload.paged import PagedCache, PagedTensor, Stretch, gather, scatter
from prefixcache_offload.pinning import MAX_CHUNK_BYTES, open_pinner
from prefixcache_offload.pool import HostPool
from prefixcache_offload.strides import PartShape
from prefixcache_offload.units import SLOT_GRANULE, chunk_ranges

BLOCKS = 64
PART = PartShape(kv_heads=8, layers=8, tokens=64, k_dim=128, v_dim=128, itemsize=2)
TOTAL = BLOCKS * PART.part_bytes
SLAB = 64 << 20
LIMITS = {"copy_in": "h2d", "copy_out": "d2h", "staged_scatter": "h2d", "staged_gather": "d2h"}


def until_done(call: Callable[[], object]) -> None:
    """Run something that the device does by itself, and wait."""
    answer = call()
    if isinstance(answer, Ticket):
        answer.wait()
        if answer.error is not None:
            raise answer.error
    torch.cuda.synchronize()


def paged_cases(host: HostPool, slots: list[int]) -> dict[str, Callable[[], object]]:
    """Pages of 16 tokens, NHD and HND, to slots on the device and in host memory."""
    found: dict[str, Callable[[], object]] = {}
    pages = BLOCKS * PART.tokens // 16
    on_device = Memory.of_tensor(torch.ones(2 * TOTAL, dtype=torch.uint8, device="cuda"))[0]
    on_host = Memory.of_bytes(host.data)
    for name, axes in (("nhd", "cbthd"), ("hnd", "cbhtd")):
        sizes = {"c": 2, "b": 2 * pages, "h": PART.kv_heads, "t": 16, "d": PART.k_dim}
        shape = [sizes[a] for a in axes]
        layers = [torch.ones(shape, dtype=torch.bfloat16, device="cuda") for _ in range(PART.layers)]
        cache = PagedCache(PART, [PagedTensor(each, axes, first_layer=i) for i, each in enumerate(layers)])
        ids = np.random.default_rng(2).permutation(2 * pages)[:pages]
        stretch = [Stretch(slots, ids, 0, BLOCKS * PART.tokens)]
        found[f"gather_{name}"] = partial(gather, cache, on_device, stretch)
        found[f"scatter_{name}"] = partial(scatter, cache, on_device, stretch)
        jobs = cache.jobs(stretch)
        found[f"torch_gather_{name}"] = partial(transfer._by_torch, on_device, jobs, to_engine=False)
        found[f"torch_scatter_{name}"] = partial(transfer._by_torch, on_device, jobs, to_engine=True)
        found[f"staged_gather_{name}"] = partial(gather, cache, on_host, stretch)
        found[f"staged_scatter_{name}"] = partial(scatter, cache, on_host, stretch)
    return found


def limits() -> dict[str, Callable[[], object]]:
    """The device's own copies of as many bytes."""
    pinned = torch.ones(TOTAL, dtype=torch.uint8).pin_memory()
    one, two = (torch.ones(TOTAL, dtype=torch.uint8, device="cuda") for _ in range(2))
    return {
        "h2d": partial(one.copy_, pinned, non_blocking=True),
        "d2h": partial(pinned.copy_, one, non_blocking=True),
        "d2d": partial(two.copy_, one),
    }


def measure(pool: DevicePool, host: HostPool, rounds: int) -> dict[str, float]:
    """`*_gb_per_s` of the limits, `*_ratio` of everything else."""
    granules = PART.part_bytes // SLOT_GRANULE
    slots = (np.random.default_rng(1).permutation(2 * BLOCKS)[:BLOCKS] * granules).tolist()
    targets = (np.random.default_rng(3).permutation(2 * BLOCKS)[:BLOCKS] * granules).tolist()
    calls = limits() | {
        "copy_in": partial(pool.copy_in, host, slots, targets, PART.part_bytes),
        "copy_out": partial(pool.copy_out, host, targets, slots, PART.part_bytes),
        **paged_cases(host, slots),
    }
    samples = interleave({name: Case.of(partial(until_done, call)) for name, call in calls.items()}, rounds)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    result: dict[str, float] = {"mib": TOTAL / 2**20}
    result |= {f"{name}_gb_per_s": TOTAL / medians[name] / 1e9 for name in ("h2d", "d2h", "d2d")}
    for name, seconds in medians.items():
        if name not in ("h2d", "d2h", "d2d"):
            limit = next((limit for start, limit in LIMITS.items() if name.startswith(start)), "d2d")
            result[f"{name}_ratio"] = medians[limit] / seconds
    return result


def main() -> None:
    """Print the figures, as a line each or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: benchmarks/paged.py measures the CPU path")
    torch.cuda.set_device(options.device)
    host = HostPool.create(1, 2 * TOTAL, SLAB)
    host.data[:] = 1
    pinner = open_pinner(host.mapping)
    for start, end in chunk_ranges(host.descriptor.size_bytes, SLAB, MAX_CHUNK_BYTES):
        pinner.register(start, end)
    pool = open_device_pool(options.device, 2 * TOTAL, context=PoolContext(2, SLAB))
    result = {
        "context_s": pool.cost.seconds,
        "context_host_mib": pool.cost.host_bytes / 2**20,
        "device_used_mib": pool.cost.device_used_bytes / 2**20,
        "pinned_mib": pinner.pinned_bytes / 2**20,
        **measure(pool, host, options.rounds),
    }
    pool.close()
    pinner.close()
    host.close()
    print(
        json.dumps(result) if options.json else "\n".join(f"{name:28} {value:10.3f}" for name, value in result.items())
    )


if __name__ == "__main__":
    main()
