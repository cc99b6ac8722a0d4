"""Blocks as streams: bounded pieces, strict order, and nothing believed that did not come."""

import numpy as np
import pytest

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import Client, Namespace
from prefixcache_client import streams as streams_module
from tests.unit.client.conftest import BLOCKS, DIGEST, TOKENS, MakeClient, block_data, stored
from tests.unit.client.fake_daemon import FakeDaemon


@pytest.fixture
def remote(make_client: MakeClient) -> Client:
    return make_client(local_channel=False)


@pytest.mark.parametrize("staging", [1, 9000, 64 << 20])
def test_any_bound_of_the_staging_gives_the_same_bytes(
    remote: Client, ns: Namespace, staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module, "STAGING_BYTES", staging)
    monkeypatch.setattr(streams_module, "PIECE_BYTES", 1000)
    data = stored(remote, ns)
    target = np.zeros_like(data)
    with remote.acquire(ns, TOKENS) as lease:
        assert lease.copy_to(target).ok
        with lease.view(3) as array:
            assert np.array_equal(array, data[3])
    assert np.array_equal(target, data)


def test_blocks_with_gaps_are_granted_and_sent(remote: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    data = stored(remote, ns)
    for key in [key for key, _ in zip(list(daemon.blocks), (0, 1, 2, 3), strict=False)][1:4:2]:
        del daemon.blocks[key]
    assert remote.store(ns, TOKENS, data).stored_blocks == 2
    target = np.zeros_like(data)
    with remote.acquire(ns, TOKENS) as lease:
        assert lease.copy_to(target).ok
    assert np.array_equal(target, data)


@pytest.mark.parametrize("fault", ["truncate", "swap_pieces"])
def test_a_stream_that_is_cut_or_out_of_order_is_a_miss(
    remote: Client, ns: Namespace, daemon: FakeDaemon, fault: str
) -> None:
    data = stored(remote, ns)
    setattr(daemon.faults, fault, True)
    with remote.acquire(ns, TOKENS) as lease:
        result = lease.copy_to(np.zeros_like(data))
        assert (result.ok, result.reason) == (False, "stream_truncated")
    with remote.acquire(ns, TOKENS) as lease:
        assert lease.copy_to(np.zeros_like(data)).ok


def test_a_write_that_was_not_taken_whole_is_not_committed(remote: Client, ns: Namespace, daemon: FakeDaemon) -> None:
    daemon.faults.short_write = 1
    result = remote.store(ns, TOKENS, block_data(ns))
    assert (result.stored_blocks, result.reason) == (0, "stream_truncated")
    assert daemon.blocks == {}


def test_parts_of_several_groups(make_client: MakeClient, daemon: FakeDaemon) -> None:
    layout = Layout.of(
        LayerGroup(GroupKind.FULL, (0, 2), 2, 8, 8, "float32"), LayerGroup(GroupKind.FULL, (1,), 1, 4, 4, "float32")
    )
    for local in (False, True):
        client = make_client(local_channel=local)
        ns = client.namespace(layout, DIGEST, block_tokens=16, weights_epoch=int(local))
        rng = np.random.default_rng(1)
        shapes = [(1, 2, 100, 8), (1, 1, 100, 4), (1, 2, 100, 8)]
        layers = [(rng.random(shape, "f4"), rng.random(shape, "f4")) for shape in shapes]
        assert client.store(ns, TOKENS, layers).stored_blocks == BLOCKS
        empty = [(np.zeros_like(k), np.zeros_like(v)) for k, v in layers]
        with client.acquire(ns, TOKENS) as lease:
            assert lease.copy_to(empty).tokens == 96
        for (k, v), (k0, v0) in zip(empty, layers, strict=True):
            assert np.array_equal(k[:, :, :96], k0[:, :, :96])
            assert np.array_equal(v[:, :, :96], v0[:, :, :96])


def test_memory_that_cannot_be_mapped_goes_by_stream(
    make_client: MakeClient, ns: Namespace, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.faults.unsealed = True
    client = make_client()
    data = stored(client, ns)
    target = np.zeros_like(data)
    with client.acquire(ns, TOKENS) as lease:
        assert lease.copy_to(target).ok
    assert np.array_equal(target, data)
    assert client.stats().transport == "local", "calls still go the short way"
    assert "cannot be mapped" in caplog.text


def test_a_pool_only_the_daemon_writes_is_read_by_mapping(tmp_path: object, ns: Namespace) -> None:
    with FakeDaemon(f"{tmp_path}/ro.sock", writable=False) as daemon, Client(f"unix://{daemon.path}") as client:
        data = stored(client, ns)
        target = np.zeros_like(data)
        with client.acquire(ns, TOKENS) as lease:
            assert lease.copy_to(target).ok
        assert np.array_equal(target, data)


def test_no_local_channel_means_grpc(tmp_path: object, ns: Namespace) -> None:
    daemon = FakeDaemon(f"{tmp_path}/only.sock", offer_local=False)
    with daemon, Client(f"unix://{daemon.path}") as client, Client(f"127.0.0.1:{daemon.port}") as far:
        stored(client, ns)
        assert far.lookup(ns, TOKENS).tokens == 96
        assert (client.stats().transport, far.stats().transport) == ("grpc", "grpc")
