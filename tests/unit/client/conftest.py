"""A fake daemon, a client of it and a small namespace."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from prefixcache.identity.layout import GroupKind, LayerGroup, Layout
from prefixcache_client import Client, ClientOptions, Namespace
from tests.unit.client.fake_daemon import FakeDaemon

LAYOUT = Layout.of(LayerGroup(GroupKind.FULL, (0, 1), 2, 8, 8, "float32"))
DIGEST = b"w" * 32
BLOCK_TOKENS = 16
# 6 whole blocks and 4 tokens.
TOKENS = list(range(1, 101))
BLOCKS = 6
FAST = ClientOptions(timeout_s=5.0, store_timeout_s=5.0)

MakeClient = Callable[..., Client]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(str(tmp_path / "d.sock")) as running:
        yield running


@pytest.fixture
def make_client(daemon: FakeDaemon) -> Iterator[MakeClient]:
    """Clients of the daemon, over its unix socket unless told otherwise; closed at the end."""
    made: list[Client] = []

    def make(address: str | None = None, **options: object) -> Client:
        chosen = ClientOptions(**({"timeout_s": 5.0, "store_timeout_s": 5.0} | options))  # type: ignore[arg-type] # test
        made.append(Client(address or f"unix://{daemon.path}", chosen))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture(params=["local", "grpc"])
def client(request: pytest.FixtureRequest, make_client: MakeClient) -> Client:
    """A client on each transport in turn."""
    return make_client(local_channel=request.param == "local")


@pytest.fixture
def local_client(make_client: MakeClient) -> Client:
    return make_client()


@pytest.fixture
def ns(make_client: MakeClient) -> Namespace:
    return make_client().namespace(LAYOUT, DIGEST, block_tokens=BLOCK_TOKENS)


def block_data(ns: Namespace, blocks: int = BLOCKS, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Random bytes of blocks, u8[blocks, block bytes]."""
    return np.random.default_rng(seed).integers(0, 256, (blocks, ns.block_bytes), dtype=np.uint8)


def stored(client: Client, ns: Namespace, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Store TOKENS with random bytes; the bytes."""
    data = block_data(ns, seed=seed)
    assert client.store(ns, TOKENS, data).stored_blocks == BLOCKS
    return data
