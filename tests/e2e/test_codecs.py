"""Coded namespaces through a real daemon, on every transport: half the bytes, the numbers that decoding gives, and
nothing shared with raw ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from prefixcache.identity import GroupKind, IdentityError, LayerGroup, Layout
from prefixcache.server.app import Daemon
from prefixcache_client import Blocks, Client, ClientOptions, Layers, Namespace, Pages
from prefixcache_offload.codecs import arrays
from prefixcache_offload.codecs.formats import FORMATS, CodecError
from tests.contract.conftest import start_daemon

HEADS, DIM, SIZE, BLOCKS = 2, 16, 16, 5
TOKENS = SIZE * BLOCKS
WEIGHTS = bytes(range(1, 33))
LAYOUT = Layout.of(LayerGroup(GroupKind.FULL, (0, 1), HEADS, DIM, DIM, "bfloat16"))
HYBRID = Layout.of(
    LayerGroup(GroupKind.FULL, (0,), HEADS, DIM, DIM, "bfloat16"),
    LayerGroup(GroupKind.SLIDING, (1,), HEADS, DIM, DIM, "bfloat16", 40),
)

Kv = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    running = start_daemon(tmp_path_factory.mktemp("codecs"))
    yield running
    running.stop()


@pytest.fixture(params=["local", "stream"])
def client(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Client]:
    options = ClientOptions(timeout_s=20, store_timeout_s=20, local_channel=request.param == "local")
    with Client(f"unix://{daemon.config.socket}", options) as made:
        yield made
        assert made.stats().failures == {}


def namespace(client: Client, codec: str, request: pytest.FixtureRequest, layout: Layout = LAYOUT) -> Namespace:
    salt = request.node.name.encode()
    return client.namespace(layout, WEIGHTS, block_tokens=SIZE, codec=codec, cache_salt=salt)


def kv(seed: int = 0, layers: int = 2) -> Kv:
    chance = torch.Generator().manual_seed(seed)
    shape = (1, HEADS, TOKENS, DIM)
    made = [torch.randn(shape, generator=chance).to(torch.bfloat16) for _ in range(2 * layers)]
    return list(zip(made[::2], made[1::2], strict=True))


def zeros(like: Kv) -> Kv:
    return [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in like]


def canonical(states: Kv) -> torch.Tensor:
    """u8[blocks, part bytes] of a full group's states."""
    both = torch.stack([torch.stack(pair) for pair in states])  # layer, c, 1, head, token, dim
    blocks = both.squeeze(2).unflatten(3, (BLOCKS, SIZE)).permute(3, 2, 0, 1, 4, 5)
    return blocks.contiguous().view(BLOCKS, -1).view(torch.uint8)


def as_decoded(states: Kv, ns: Namespace) -> torch.Tensor:
    """What a reader must get."""
    assert ns.form.coder is not None
    raw = canonical(states)
    coded = np.zeros((BLOCKS, ns.form.parts[0].bytes), np.uint8)
    arrays.encode(ns.form.coder, ns.form.shapes[0], "bfloat16", raw.numpy(), coded)
    back = np.zeros(raw.shape, np.uint8)
    arrays.decode(ns.form.coder, ns.form.shapes[0], "bfloat16", coded, back)
    return torch.from_numpy(back)


@pytest.mark.parametrize("codec", list(FORMATS))
def test_tensors_of_every_order_read_what_decoding_gives(
    client: Client, codec: str, request: pytest.FixtureRequest
) -> None:
    ns = namespace(client, codec, request)
    raw = namespace(client, "raw", request)
    states, prompt = kv(), list(range(TOKENS))
    assert client.store(ns, prompt, Layers(states)).stored_blocks == BLOCKS
    want = as_decoded(states, ns)
    found = zeros(states)
    with client.acquire(ns, prompt) as lease:
        assert lease.copy_to(Layers(found)).ok
        assert torch.equal(canonical(found), want)
        whole = torch.zeros_like(want)
        assert lease.copy_to(Blocks(whole)).ok
        assert torch.equal(whole, want)
        pages = [torch.zeros(2, 2 * BLOCKS, SIZE // 2, HEADS, DIM, dtype=torch.bfloat16) for _ in states]
        order = [7, 0, 3, 2, 9, 1, 4, 8, 6, 5]
        assert lease.copy_to(Pages(pages, order)).ok
        for layer, (k, v) in zip(pages, found, strict=True):
            for component, state in zip(layer, (k, v), strict=True):
                assert torch.equal(component[order].reshape(TOKENS, HEADS, DIM), state[0].transpose(0, 1))
        with lease.view(0) as stored:
            assert stored.size == ns.form.parts[0].bytes
    assert not client.acquire(raw, prompt), "raw and coded blocks are strangers"
    assert client.lookup(raw, prompt).tokens == 0
    assert ns.block_bytes < (0.75 if codec == "int8" else 0.5) * raw.block_bytes
    assert (want.view(torch.bfloat16).float() - canonical(states).view(torch.bfloat16).float()).abs().max() < 0.5


def test_windows_are_coded_like_the_rest(client: Client, request: pytest.FixtureRequest) -> None:
    ns = namespace(client, "int8", request, HYBRID)
    states, prompt = kv(3), list(range(1, TOKENS + 1))
    assert client.store(ns, prompt, Layers(states)).stored_blocks == BLOCKS
    found = zeros(states)
    with client.acquire(ns, prompt) as lease:
        assert lease.copy_to(Layers(found)).ok
    for (k, v), (found_k, found_v), first in zip(states, found, (0, TOKENS - 48), strict=True):
        for was, now in ((k, found_k), (v, found_v)):
            assert (was[:, :, first:].float() - now[:, :, first:].float()).abs().max() < 0.05
            assert not now[:, :, :first].any()


def test_raw_stays_raw_unless_asked(client: Client, request: pytest.FixtureRequest) -> None:
    plain = client.namespace(LAYOUT, WEIGHTS, block_tokens=SIZE)
    assert plain.form.coder is None
    assert (
        plain.epoch.fingerprint == client.namespace(LAYOUT, WEIGHTS, block_tokens=SIZE, codec="raw").epoch.fingerprint
    )
    fingerprints = {namespace(client, codec, request).epoch.fingerprint for codec in ("raw", "int8", "int4")}
    assert len(fingerprints) == 3


STATE = Layout.of(LayerGroup(GroupKind.STATE, (0,), HEADS, DIM, DIM, "bfloat16"))
NATIVE = Layout.of(LayerGroup(GroupKind.FULL, (0,), HEADS, DIM, DIM, "bfloat16"), packing="native:vllm:amx")
FP8 = Layout.of(LayerGroup(GroupKind.FULL, (0,), HEADS, DIM, DIM, "float8_e4m3fn"))


def test_what_cannot_be_coded_is_refused_when_the_namespace_is_made() -> None:
    client = Client("unix:///nowhere")
    for layout, text in ((STATE, "states"), (NATIVE, "packing")):
        with pytest.raises(IdentityError, match=f"{text}.*codec='raw'") as refused:
            client.namespace(layout, WEIGHTS, codec="int8")
        assert refused.value.reason == "codec_unsupported"
    with pytest.raises(IdentityError, match="foreign"):
        client.namespace(LAYOUT, WEIGHTS, codec="int8", engine="vllm")
    with pytest.raises(IdentityError, match="known are raw, int8 and int4") as unknown:
        client.namespace(LAYOUT, WEIGHTS, codec="int7")
    assert unknown.value.reason == "codec_unknown"
    with pytest.raises(CodecError, match="float8_e4m3fn cannot be coded"):
        client.namespace(FP8, WEIGHTS, codec="int8")
    odd = Layout.of(LayerGroup(GroupKind.FULL, (0,), HEADS, 15, 15, "bfloat16"))
    with pytest.raises(CodecError, match="fill bytes"):
        client.namespace(odd, WEIGHTS, codec="int4")
