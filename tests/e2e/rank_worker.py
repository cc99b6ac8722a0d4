"""One rank of an engine that stores together with others, as a process: `python -m tests.e2e.rank_worker SOCKET RANK
RANKS CODEC [hang]`. Tensors are pages of its own heads, made from a seed that all ranks know.

Commands on stdin: `store TICKET SEED` (hex, int), `give_up TICKET`; what came of each on stdout. With `hang` a store
says "copied" when its bytes are in the slots, and waits for a line before it looks at generations and commits.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import Client, ClientOptions, Namespace, Portion
from prefixcache_client.blocks import BlockFormat
from prefixcache_offload.engine import Job
from prefixcache_offload.paged import PagedCache, PagedTensor, Stretch

SIZE, BLOCKS, DIM = 16, 5, 8
HEADS = (4, 1)
LAYOUT = Layout.of(
    LayerGroup(GroupKind.FULL, (0, 1), HEADS[0], DIM, DIM, "float32"),
    LayerGroup(GroupKind.SLIDING, (2,), HEADS[1], DIM, DIM, "float32", 24),
)

Array = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


def namespace(client: Client, digest: bytes = b"r" * 32, codec: str = "raw") -> Namespace:
    return client.namespace(LAYOUT, digest, block_tokens=SIZE, codec=codec)


def tokens_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 1000, BLOCKS * SIZE).tolist()


def pages_of(seed: int) -> list[Array]:
    """By layer: [page, K or V, token, head, dim] of all heads; pages are blocks, and lie in another order."""
    rng = np.random.default_rng(seed)
    return [rng.random((BLOCKS, 2, SIZE, heads, DIM), np.float32) for heads in (HEADS[0], HEADS[0], HEADS[1])]


def heads_of(part: int, rank: int, ranks: int) -> range:
    """The heads that a rank writes: each its own, and of a head that several have the first of them."""
    heads = HEADS[part]
    if heads >= ranks:
        return range(rank * heads // ranks, (rank + 1) * heads // ranks)
    each = ranks // heads
    return range(rank // each, rank // each + 1) if rank % each == 0 else range(0)


@dataclass
class RankTensors:
    """A rank's heads of every layer. `hang`: see the module."""

    layers: list[Array]
    rank: int
    ranks: int
    hang: bool = False

    def held(self) -> AbstractContextManager[None]:
        return _hanging() if self.hang else nullcontext()

    def covers(self, form: BlockFormat, part: int) -> range:
        return range(BLOCKS)

    def jobs(self, form: BlockFormat, part: int, blocks: Ints, slots: npt.NDArray[np.uint32]) -> list[Job]:
        first = self.rank * HEADS[part] // self.ranks
        count = max(1, HEADS[part] // self.ranks)
        mine = [
            PagedTensor(np.ascontiguousarray(self.layers[layer][:, :, :, first : first + count]), "bcthd", "kv", place)
            for place, layer in enumerate(form.layers_of(part))
        ]
        cache = PagedCache(form.shapes[part], mine, first_head=first)
        pages = np.arange(BLOCKS)[::-1]
        return cache.jobs(
            [
                Stretch(slots[at : at + 1], pages, block * SIZE, (block + 1) * SIZE, block)
                for at, block in enumerate(blocks.tolist())
            ]
        )


@contextmanager
def _hanging() -> Iterator[None]:
    yield
    print("copied", flush=True)
    sys.stdin.readline()


def main(socket: str, rank: int, ranks: int, codec: str, *, hang: bool) -> None:
    client = Client(f"unix://{socket}", ClientOptions(timeout_s=20, store_timeout_s=20, reservation_ttl_s=2.0))
    ns = namespace(client, codec=codec)
    client.open()
    print("ready", flush=True)
    while words := sys.stdin.readline().split():
        if words[0] == "give_up":
            client.give_up(ns, bytes.fromhex(words[1]))
            print("given up", flush=True)
            continue
        seed = int(words[2])
        portion = Portion(bytes.fromhex(words[1]), tuple(heads_of(part, rank, ranks) for part in range(len(HEADS))))
        tensors = RankTensors(pages_of(seed), rank, ranks, hang)
        result = client.store_portion(ns, tokens_of(seed), tensors, portion)
        print(result.stored_blocks, result.reason or "-", *sorted(result.refused), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], hang="hang" in sys.argv)
