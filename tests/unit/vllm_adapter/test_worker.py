"""One rank's side with a client that fails on purpose: nothing that was computed behind a failed load is stored."""

from typing import Any, cast

import pytest
import torch

from prefixcache_client import Client, CopyResult, StoreResult
from prefixcache_vllm import worker as module
from prefixcache_vllm.orders import LoadOrder, PageRun, SaveOrder, StepOrders
from prefixcache_vllm.ranks import Rank
from prefixcache_vllm.worker import WorkerSide
from tests.e2e.processes import wait_until
from tests.unit.vllm_adapter.fakes import IDENTITY, engine, ticket

PAGES = (PageRun(0, (1, 2, 3, 4)),)
NAMESPACES = {IDENTITY.fingerprint(): IDENTITY}


class FailingClient:
    """Loads are lost; what is stored, and which tickets are given up, is kept."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.given_up: list[bytes] = []

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def copy_by_ticket(self, *_: Any) -> CopyResult:
        return CopyResult(ok=False, tokens=0, size_bytes=0, reason="lease_lost")

    def store(self, _namespace: Any, _keys: Any, _span: Any, from_token: int) -> StoreResult:
        self.stored.append(from_token)
        return StoreResult(1, 0, 0, {})

    def give_up(self, _namespace: Any, ticket: bytes) -> None:
        self.given_up.append(ticket)


def side_of(client: FailingClient, rank: Rank) -> WorkerSide:
    side = WorkerSide(cast(Client, client), engine(), rank, 8, tells_requests=True)
    heads = len(rank.holds(2))
    side.register(
        {f"model.layers.{i}.self_attn.attn": torch.zeros(2, 8, 32, heads, 32, dtype=torch.bfloat16) for i in (0, 1)},
        "plain",
    )
    assert side.reason_off == ""
    return side


def save(name: str, block: int) -> SaveOrder:
    return SaveOrder(
        name, IDENTITY.fingerprint(), bytes(32) * (block + 1), block, block + 1, PAGES, 0, bytes([block]) * 16
    )


def run(side: WorkerSide, *saves: SaveOrder, load: bool = False) -> set[int]:
    """A step; the pages that it says are bad."""
    loads = [LoadOrder("a", IDENTITY.fingerprint(), ticket(1), 0, 64, PAGES)] if load else []
    orders = StepOrders(loads=loads, saves=list(saves), namespaces=dict(NAMESPACES))
    side.load(orders, now=True)
    side.save(orders)
    return side.ended().bad_pages


def test_nothing_computed_behind_a_load_that_failed_in_its_step_is_stored() -> None:
    client = FailingClient()
    side = side_of(client, Rank(0, 1))
    assert run(side, save("before", 0)) == set()
    assert run(side, save("a", 1), save("b", 2), load=True) == {1, 2, 3, 4}
    run(side, save("a", 3))  # scheduled while the load was on its way
    run(side, save("a", 4))
    assert wait_until(lambda: not side.transfers.busy)
    assert client.stored == [0, 4 * 64]
    assert side.numbers()["not_saved.load_failed"] == 3
    side.close()


def test_the_other_ranks_are_told() -> None:
    client = FailingClient()
    side = side_of(client, Rank(1, 2))
    run(side, save("a", 1), load=True)
    assert client.given_up == [bytes([1]) * 16]
    side.close()


def test_namespaces_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_NAMESPACES", 4)
    side = side_of(FailingClient(), Rank(0, 1))
    for number in range(10):
        side.save(StepOrders(saves=[save("a", 0)._replace(fingerprint=bytes([number]))], namespaces={
            bytes([number]): IDENTITY
        }))  # fmt: skip
    assert len(side._namespaces) <= 4
    side.close()
