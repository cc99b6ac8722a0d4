"""Ranks of an engine against a real daemon: what any number of ranks stored, any other number loads, in any form.

The KV is written into each rank's tensors without the code under test, and the daemon's bytes are compared with those
of one rank.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from prefixcache.identity.fingerprint import NamespaceIdentity
from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache.server.app import Daemon
from prefixcache_client import Client, ClientOptions, Namespace
from prefixcache_client.ids import new_id
from prefixcache_vllm.identity import EngineIdentity, GroupPages
from prefixcache_vllm.orders import LoadOrder, PageRun, SaveOrder, StepOrders, page_run
from prefixcache_vllm.ranks import Rank, splits
from prefixcache_vllm.worker import WorkerSide
from tests.contract.conftest import start_daemon, stop_daemon
from tests.e2e.processes import wait_until

SIZE, TOKENS, LAYERS, DIM, MLA_DIM, PAGE, WINDOW = 32, 160, 2, 16, 576, 16, 48
BLOCKS = TOKENS // SIZE
FAST = ClientOptions(timeout_s=20, store_timeout_s=20, reservation_ttl_s=20)

Kv = list[torch.Tensor]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = start_daemon(tmp_path_factory.mktemp("daemon"), host_bytes="32MiB")
    yield daemon
    stop_daemon(daemon)


def identity_of(heads: int, weights: bytes, *, mla: bool = False) -> NamespaceIdentity:
    dims = (MLA_DIM, 0) if mla else (DIM, DIM)
    layout = Layout.of(LayerGroup(GroupKind.FULL, tuple(range(LAYERS)), heads, *dims, "bfloat16"))
    return NamespaceIdentity(weights=weights, layout=layout, block_tokens=SIZE)


def hybrid(weights: bytes) -> NamespaceIdentity:
    """Two layers of four heads, and one of one head that sees a window."""
    layout = Layout.of(
        LayerGroup(GroupKind.FULL, (0, 1), 4, DIM, DIM, "bfloat16"),
        LayerGroup(GroupKind.SLIDING, (2,), 1, DIM, DIM, "bfloat16", WINDOW),
    )
    return NamespaceIdentity(weights=weights, layout=layout, block_tokens=SIZE)


def group_of(identity: NamespaceIdentity, layer: int) -> LayerGroup:
    return next(group for group in identity.layout.groups if layer in group.layers)


def kv_of(identity: NamespaceIdentity, seed: int) -> Kv:
    """A prompt's KV, by layer: [k or v, token, head, value]; MLA has no v."""
    made = torch.Generator().manual_seed(seed)
    groups = [group_of(identity, layer) for layer in range(sum(len(each.layers) for each in identity.layout.groups))]
    return [
        torch.rand((2 if each.v_dim else 1, TOKENS, each.kv_heads, each.k_dim), generator=made).bfloat16()
        for each in groups
    ]


# By form: the shape of a layer's tensor of so many pages and heads, and K or V of one token in it, [head, value].
Shape = Callable[[int, int], tuple[int, ...]]
Token = Callable[[torch.Tensor, int, int, int], torch.Tensor]
FORMS: dict[str, tuple[Shape, Token]] = {
    "fused": (lambda pages, heads: (pages, heads, PAGE, 2 * DIM), lambda t, c, p, at: t[p, :, at, c * DIM :][:, :DIM]),
    "cbthd": (lambda pages, heads: (2, pages, PAGE, heads, DIM), lambda t, c, p, at: t[c, p, at]),
    "bcthd": (lambda pages, heads: (pages, 2, PAGE, heads, DIM), lambda t, c, p, at: t[p, c, at]),
    "cbhtd": (lambda pages, heads: (2, pages, heads, PAGE, DIM), lambda t, c, p, at: t[c, p, :, at]),
    "bchtd": (lambda pages, heads: (pages, 2, heads, PAGE, DIM), lambda t, c, p, at: t[p, c, :, at]),
    # Tokens before heads in the shape, heads before tokens in memory: what CUDA's HND is.
    "hnd": (lambda pages, heads: (2, pages, PAGE, heads, DIM), lambda t, c, p, at: t[c, p, at]),
    "mla": (lambda pages, heads: (pages, PAGE, MLA_DIM), lambda t, c, p, at: t[p, at][None]),
    "mla_1": (lambda pages, heads: (pages, 1, PAGE, MLA_DIM), lambda t, c, p, at: t[p, :, at]),
}


@dataclass
class Worker:
    """One rank: the tensors and heads of its layers, and the side under test."""

    side: WorkerSide
    tensors: dict[int, torch.Tensor]
    heads: dict[int, range]
    token: Token

    def write(self, kv: Kv, pages: list[int]) -> None:
        for mine, theirs in self.pairs(kv, pages, [0] * len(kv)):
            mine.copy_(theirs)

    def holds(self, kv: Kv, pages: list[int], first_tokens: list[int]) -> bool:
        """`first_tokens`: by layer, from where on it has to."""
        return all(torch.equal(mine, theirs) for mine, theirs in self.pairs(kv, pages, first_tokens))

    def pairs(self, kv: Kv, pages: list[int], first_tokens: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What this rank has of one token's K or V beside what the prompt has."""
        for layer, heads in self.heads.items():
            values = kv[layer]
            for component, token in np.ndindex(*values.shape[:2]):
                if token >= first_tokens[layer]:
                    mine = self.token(self.tensors[layer], component, pages[token // PAGE], token % PAGE)
                    yield mine, values[component, token, heads.start : heads.stop]


class RankedEngine:
    """All ranks of one engine, driven as the connector drives them."""

    def __init__(
        self, daemon: Daemon, identity: NamespaceIdentity, count: int, form: str, save_queue: int = 8, stages: int = 1
    ) -> None:
        """`count` ranks in each of `stages` stages, which have the layers in equal shares."""
        self.identity, self.namespace = identity, Namespace(identity, label="ranks")
        self.pages = [int(page) for page in 1 + np.random.default_rng(count).permutation(TOKENS // PAGE + 2)]
        shape, token = FORMS[form]
        self.ranks: list[Worker] = []
        every = sum(len(group.layers) for group in identity.layout.groups)
        for stage, number in np.ndindex(stages, count):
            rank = Rank(number, count, stage, stages)
            mine = set(range(stage * every // stages, (stage + 1) * every // stages))
            layers = [[i for i in group.layers if i in mine] for group in identity.layout.groups]
            if stages > 1:  # then there is one KV cache group
                layers = [sorted(mine)]
            groups = tuple(GroupPages({f"model.layers.{i}.self_attn.attn": i for i in each}, PAGE) for each in layers)
            heads = {layer: rank.holds(group_of(identity, layer).kv_heads) for layer in mine}
            tensors = {
                layer: torch.zeros(shape(len(self.pages) + 1, len(held)), dtype=torch.bfloat16)
                for layer, held in heads.items()
            }
            if form == "hnd":
                tensors = {i: each.transpose(2, 3).contiguous().transpose(2, 3) for i, each in tensors.items()}
            client = Client(f"unix://{daemon.config.socket}", FAST)
            self.groups = len(groups)
            engine = EngineIdentity(identity, groups, "ranks")
            side = WorkerSide(client, engine, rank, save_queue, tells_requests=True)
            side.register({name: tensors[i] for group in groups for name, i in group.layers.items()}, "plain")
            assert side.reason_off == ""
            self.ranks.append(Worker(side, tensors, heads, token))

    def loaded(self, kv: Kv) -> bool:
        """Whether every rank has what a prompt of all its tokens needs."""
        kinds = [group_of(self.identity, layer).kind for layer in range(len(kv))]
        needed = [0 if kind is GroupKind.FULL else TOKENS - WINDOW for kind in kinds]
        return all(rank.holds(kv, self.pages, needed) for rank in self.ranks)

    def runs(self, tokens: int) -> tuple[PageRun, ...]:
        return (page_run(self.pages, PAGE, 0, tokens),) * self.groups

    def close(self) -> None:
        for rank in self.ranks:
            rank.side.close()

    def order(self, prompt: int) -> SaveOrder:
        keys = self.namespace.hash(tokens_of(prompt), self.namespace.epoch).keys
        return SaveOrder("r", self.identity.fingerprint(), keys, 0, BLOCKS, self.runs(TOKENS), 7, new_id())

    def store(self, kv: Kv, prompt: int) -> None:
        """Every rank its heads."""
        order = self.order(prompt)
        for rank in self.ranks:
            rank.write(kv, self.pages)
            rank.side.save(StepOrders(saves=[order], namespaces={order.fingerprint: self.identity}))
        self.settle()

    def store_in_turn(self, kv: Kv, prompt: int, ranks: Iterable[int]) -> None:
        """As `store`, each rank when the one before has written."""
        order = self.order(prompt)
        for number in ranks:
            self.ranks[number].write(kv, self.pages)
            self.ranks[number].side.save(StepOrders(saves=[order], namespaces={order.fingerprint: self.identity}))
            self.settle()

    def settle(self) -> None:
        assert all(wait_until(lambda rank=rank: not rank.side.transfers.busy) for rank in self.ranks)

    def visible(self) -> list[int]:
        """The numbers of saves that each rank says are visible."""
        return [number for rank in self.ranks for number in rank.side.transfers.take_visible()]

    def counts(self) -> tuple[int, int, dict[str, int]]:
        """Saved blocks, bytes, and blocks not saved by reason, over all ranks."""
        found = [rank.side.transfers.take_counts() for rank in self.ranks]
        not_saved: dict[str, int] = {}
        for each in found:
            for reason, blocks in each.not_saved_blocks.items():
                not_saved[reason] = not_saved.get(reason, 0) + blocks
        return sum(each.saved_blocks for each in found), sum(each.save_bytes for each in found), not_saved

    def load(self, client: Client, prompt: int) -> int:
        """Tokens that every rank has loaded."""
        with client.acquire(self.namespace, tokens_of(prompt)) as lease:
            ticket = lease.ticket()
            if ticket is None:
                return 0
            end = ticket.blocks * SIZE
            order = LoadOrder("r", self.identity.fingerprint(), ticket, 0, end, self.runs(end))
            for rank in self.ranks:
                rank.side.load(StepOrders(loads=[order], namespaces={order.fingerprint: self.identity}), now=True)
                assert rank.side.ended().bad_pages == set()
            return ticket.blocks * SIZE


def tokens_of(prompt: int) -> list[int]:
    return np.random.default_rng(prompt).integers(1, 4000, TOKENS).tolist()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(f"unix://{daemon.config.socket}", FAST) as client:
        yield client


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Callable[..., RankedEngine]]:
    made: list[RankedEngine] = []

    def make(identity: NamespaceIdentity, count: int, form: str, **more: int) -> RankedEngine:
        made.append(RankedEngine(daemon, identity, count, form, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


def stored_bytes(client: Client, identity: NamespaceIdentity, prompt: int) -> list[bytes]:
    with client.acquire(Namespace(identity, label="ranks"), tokens_of(prompt)) as lease:
        found = []
        for block in range(lease.tokens // SIZE):
            with lease.view(block) as data:
                found.append(bytes(data))
        return found


@pytest.mark.parametrize(
    ("form", "writers"),
    [("fused", 1), ("fused", 2), ("cbthd", 2), ("bcthd", 4), ("cbhtd", 8), ("bchtd", 2), ("hnd", 4), ("hnd", 8)],
)
def test_any_number_of_ranks_reads_what_any_other_stored(
    engine: Callable[..., RankedEngine], client: Client, form: str, writers: int
) -> None:
    identity = identity_of(4, f"{form} {writers}".encode().ljust(32, b"."))
    kv = kv_of(identity, writers)
    first = engine(identity, writers, form)
    first.store(kv, 1)
    assert first.visible() == [7], "one rank says so"
    group = identity.layout.groups[0]
    assert first.counts() == (BLOCKS, BLOCKS * SIZE * LAYERS * group.kv_heads * 2 * DIM * 2, {})
    one = engine(identity, 1, "cbthd")
    one.store(kv, 2)
    assert stored_bytes(client, identity, 1) == stored_bytes(client, identity, 2)
    for readers, other in ((1, "fused"), (2, "hnd"), (4, "bcthd"), (8, form)):
        reader = engine(identity, readers, other)
        assert reader.load(client, 1) == TOKENS
        assert reader.loaded(kv)


@pytest.mark.parametrize("last", [0, 1])
def test_tokens_are_counted_by_the_rank_that_makes_them_visible(
    engine: Callable[..., RankedEngine], client: Client, last: int
) -> None:
    identity = identity_of(4, f"tokens {last}".encode().ljust(32, b"."))
    pair = engine(identity, 2, "fused")
    pair.store_in_turn(kv_of(identity, 1), 1, (1 - last, last))
    numbers = [rank.side.numbers() for rank in pair.ranks]
    assert numbers[last]["saved_tokens"] == BLOCKS * SIZE
    assert "saved_tokens" not in numbers[1 - last]


@pytest.mark.parametrize("form", ["mla", "mla_1"])
def test_mla_is_stored_by_one_rank_and_read_by_all(
    engine: Callable[..., RankedEngine], client: Client, form: str
) -> None:
    identity = identity_of(1, form.encode().ljust(32, b"."), mla=True)
    kv = kv_of(identity, 1)
    first = engine(identity, 2, form)
    first.store(kv, 1)
    assert first.counts() == (BLOCKS, BLOCKS * SIZE * LAYERS * MLA_DIM * 2, {})
    reader = engine(identity, 4, "mla" if form == "mla_1" else "mla_1")
    assert reader.load(client, 1) == TOKENS
    assert reader.loaded(kv)


@pytest.mark.parametrize("writers", [1, 2, 4])
def test_layers_with_other_heads_and_windows(engine: Callable[..., RankedEngine], client: Client, writers: int) -> None:
    """Rank 1 has nothing to store of the layer with one head, and loads it all the same."""
    identity = hybrid(f"hybrid {writers}".encode().ljust(32, b"."))
    kv = kv_of(identity, 1)
    first = engine(identity, writers, "cbthd")
    first.store(kv, 1)
    assert first.visible() == [7]
    assert first.counts()[0] == BLOCKS
    for readers in (1, 2, 8):
        reader = engine(identity, readers, "bcthd")
        assert reader.load(client, 1) == TOKENS
        assert reader.loaded(kv)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_stages_of_a_pipeline(engine: Callable[..., RankedEngine], client: Client, ranks: int) -> None:
    """Each has its layers of every block; what stages stored one process reads, and the other way round."""
    identity = identity_of(2, f"stages {ranks}".encode().ljust(32, b"."))
    kv = kv_of(identity, 1)
    pipeline = engine(identity, ranks, "cbthd", stages=2)
    pipeline.store(kv, 1)
    assert pipeline.visible() == [7]
    assert pipeline.counts() == (BLOCKS, BLOCKS * SIZE * LAYERS * 2 * 2 * DIM * 2, {})
    alone = engine(identity, 1, "bcthd")
    alone.store(kv, 2)
    assert stored_bytes(client, identity, 1) == stored_bytes(client, identity, 2)
    assert alone.load(client, 1) == TOKENS
    assert alone.loaded(kv)
    again = engine(identity, ranks, "hnd", stages=2)
    assert again.load(client, 2) == TOKENS
    assert again.loaded(kv)


def test_stages_of_layers_of_two_kinds(engine: Callable[..., RankedEngine], client: Client) -> None:
    """In one KV cache group: the second stage has no layer that sees everything, the first none with a window."""
    kinds = (
        LayerGroup(GroupKind.FULL, (0,), 4, DIM, DIM, "bfloat16"),
        LayerGroup(GroupKind.SLIDING, (1,), 1, DIM, DIM, "bfloat16", WINDOW),
    )
    identity = NamespaceIdentity(weights=b"kinds".ljust(32, b"."), layout=Layout.of(*kinds), block_tokens=SIZE)
    kv = kv_of(identity, 1)
    pipeline = engine(identity, 2, "cbthd", stages=2)
    pipeline.store(kv, 1)
    assert pipeline.counts()[0] == BLOCKS
    for readers, stages in ((1, 1), (1, 2)):
        reader = engine(identity, readers, "cbthd", stages=stages)
        assert reader.load(client, 1) == TOKENS
        assert reader.loaded(kv)


def test_what_is_stored_already_is_counted_once(engine: Callable[..., RankedEngine]) -> None:
    identity = identity_of(4, b"twice".ljust(32, b"."))
    pair, kv = engine(identity, 2, "cbthd"), kv_of(identity, 1)
    pair.store(kv, 1)
    pair.counts(), pair.visible()
    pair.store(kv, 1)
    assert pair.counts() == (0, 0, {"already_stored": BLOCKS})
    assert 7 in pair.visible()


def test_a_rank_with_too_much_to_do_is_not_waited_for(
    engine: Callable[..., RankedEngine], client: Client, daemon: Daemon
) -> None:
    identity = identity_of(4, b"queue".ljust(32, b"."))
    pair, kv = engine(identity, 2, "cbthd", save_queue=1), kv_of(identity, 1)
    order = pair.order(1)
    orders = StepOrders(saves=[order], namespaces={order.fingerprint: identity})
    pair.ranks[1].side.transfers._waiting_count = 1  # full
    pair.ranks[1].side._client.open()
    for rank in pair.ranks:
        rank.write(kv, pair.pages)
        rank.side.save(orders)
    pair.ranks[1].side.transfers._waiting_count = 0
    pair.settle()
    saved, _, not_saved = pair.counts()
    assert saved == 0
    assert not_saved["queue_full"] == BLOCKS
    assert pair.load(client, 1) == 0
    assert wait_until(lambda: not daemon.planner.state.reservations)
    pair.store(kv, 1)
    assert pair.load(client, 1) == TOKENS


def test_pages_that_one_rank_gave_away_are_stored_by_none(
    engine: Callable[..., RankedEngine], client: Client, daemon: Daemon
) -> None:
    identity = identity_of(4, b"called".ljust(32, b"."))
    pair, kv = engine(identity, 2, "cbthd"), kv_of(identity, 1)
    transfers = pair.ranks[1].side.transfers
    plain = transfers.save

    def called_off(request_id: str, blocks: int, save: Callable[..., object], number: int = 0) -> bool:
        def late(task: object) -> object:
            transfers.let_go(request_id)
            return save(task)

        return plain(request_id, blocks, late, number)  # type: ignore[arg-type] # a Save

    transfers.save = called_off  # type: ignore[method-assign] # a preemption right before the copy
    pair.store(kv, 1)
    assert pair.counts()[2]["called_off"] == BLOCKS
    assert pair.load(client, 1) == 0
    assert wait_until(lambda: not daemon.planner.state.reservations)


def test_a_rank_whose_memory_is_not_known_gives_up(
    engine: Callable[..., RankedEngine], client: Client, daemon: Daemon
) -> None:
    identity = identity_of(4, b"unknown".ljust(32, b"."))
    pair, kv = engine(identity, 2, "cbthd"), kv_of(identity, 1)
    pair.ranks[0].side.reason_off = "kv_cache_form"
    pair.store(kv, 1)
    assert pair.counts()[2]["kv_cache_form"] == BLOCKS
    assert wait_until(lambda: not daemon.planner.state.reservations)
    assert pair.load(client, 1) == 0


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16])
def test_every_head_is_stored_by_one_rank(heads: int, count: int) -> None:
    if not splits(heads, count):
        assert heads % count or count % heads
        return
    ranks = [Rank(number, count) for number in range(count)]
    assert sorted(head for rank in ranks for head in rank.stores(heads)) == list(range(heads))
    assert {head for rank in ranks for head in rank.holds(heads)} == set(range(heads))
    for rank in ranks:
        assert set(rank.stores(heads)) <= set(rank.holds(heads))
        assert rank.holds(heads).start == rank.number * heads // count, "as vLLM gives heads to ranks"
