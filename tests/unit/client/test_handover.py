"""Tickets: another client of the host copies what the first has leased, and only while it is leased."""

import pickle
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from prefixcache_client import Blocks, Client, LeaseTicket, Namespace
from prefixcache_client.errors import Failure
from prefixcache_client.handover import NOT_MAPPED
from tests.unit.client.conftest import BLOCK_TOKENS, BLOCKS, TOKENS, MakeClient
from tests.unit.client.fake_daemon import FakeDaemon


def stored(client: Client, ns: Namespace) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    blocks = np.random.default_rng(1).integers(0, 255, (BLOCKS, ns.block_bytes), np.uint8)
    assert client.store(ns, TOKENS, Blocks(blocks)).stored_blocks == BLOCKS
    return blocks


def sent(ticket: LeaseTicket | None) -> LeaseTicket:
    """As it arrives in another process."""
    assert ticket is not None
    arrived = pickle.loads(pickle.dumps(ticket))
    assert isinstance(arrived, LeaseTicket)
    return arrived


def test_another_client_copies(make_client: MakeClient, ns: Namespace) -> None:
    owner, worker = make_client(), make_client()
    blocks = stored(owner, ns)
    with owner.acquire(ns, TOKENS, from_token=BLOCK_TOKENS) as lease:
        ticket = sent(lease.ticket())
        assert (ticket.from_block, ticket.blocks) == (1, BLOCKS)
        target = np.zeros_like(blocks)
        result = worker.copy_by_ticket(ns, ticket, Blocks(target))
        assert (result.ok, result.tokens, result.size_bytes) == (True, BLOCKS * BLOCK_TOKENS, 5 * ns.block_bytes)
        assert np.array_equal(target[1:], blocks[1:])
        assert not target[0].any()
        lease.release(result.tokens)
    assert owner.stats().hit == 5 * BLOCK_TOKENS


def test_a_miss_has_no_ticket(make_client: MakeClient, ns: Namespace) -> None:
    assert make_client().acquire(ns, TOKENS).ticket() is None


def test_a_ticket_that_ran_out_is_not_copied_from(make_client: MakeClient, ns: Namespace) -> None:
    owner = make_client()
    blocks = stored(owner, ns)
    with owner.acquire(ns, TOKENS) as lease:
        ticket = sent(lease.ticket())
        late = LeaseTicket(ticket.incarnation, ticket.lease, 0.0, ticket.from_block, ticket.blocks, ticket.runs)
        assert make_client().copy_by_ticket(ns, late, Blocks(blocks)).reason == "lease_lost"


def test_another_run_of_the_daemon_is_another_memory(make_client: MakeClient, ns: Namespace) -> None:
    owner = make_client()
    blocks = stored(owner, ns)
    with owner.acquire(ns, TOKENS) as lease:
        ticket = sent(lease.ticket())
        other = LeaseTicket(b"?" * 16, ticket.lease, ticket.ends_at, ticket.from_block, ticket.blocks, ticket.runs)
        assert make_client().copy_by_ticket(ns, other, Blocks(blocks)).reason == "lease_lost"


def test_changed_generations_are_a_miss(make_client: MakeClient, ns: Namespace) -> None:
    owner = make_client()
    blocks = stored(owner, ns)
    with owner.acquire(ns, TOKENS) as lease:
        ticket = sent(lease.ticket())
        (run,) = ticket.runs
        changed = type(run)(run.part, run.pool, run.blocks, run.slots, run.generations + np.uint64(1))
        other = LeaseTicket(
            ticket.incarnation, ticket.lease, ticket.ends_at, ticket.from_block, ticket.blocks, (changed,)
        )
        assert make_client().copy_by_ticket(ns, other, Blocks(blocks)).reason == "lease_lost"


def test_streams_cannot_copy_by_ticket(make_client: MakeClient, ns: Namespace) -> None:
    owner, worker = make_client(), make_client(local_channel=False)
    blocks = stored(owner, ns)
    with owner.acquire(ns, TOKENS) as lease:
        assert worker.copy_by_ticket(ns, sent(lease.ticket()), Blocks(blocks)).reason == NOT_MAPPED


def test_a_store_is_called_off_by_the_owner_of_the_tensors(make_client: MakeClient, ns: Namespace) -> None:
    class Held(Blocks):
        """Tensors whose memory is wanted for something else by the time slots are granted."""

        def held(self) -> AbstractContextManager[None]:
            raise Failure("called_off", "")

    client = make_client()
    blocks = np.zeros((BLOCKS, ns.block_bytes), np.uint8)
    result = client.store(ns, TOKENS, Held(blocks))
    assert (result.stored_blocks, result.reason) == (0, "called_off")
    assert client.store(ns, TOKENS, Blocks(blocks)).stored_blocks == BLOCKS, "its slots were given back"


def test_without_a_daemon(make_client: MakeClient, ns: Namespace, daemon: FakeDaemon, tmp_path: Path) -> None:
    owner = make_client()
    blocks = stored(owner, ns)
    lost = make_client(f"unix://{tmp_path}/nobody.sock")
    assert not lost.open()
    assert lost.pool_bytes == 0
    assert owner.pool_bytes > 0
    with owner.acquire(ns, TOKENS) as lease:
        assert not lost.copy_by_ticket(ns, sent(lease.ticket()), Blocks(blocks)).ok
