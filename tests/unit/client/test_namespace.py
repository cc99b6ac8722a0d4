"""Namespaces: keys are identity's, epochs separate, wrong chains are refused."""

import numpy as np
import pytest

from prefixcache.identity.fingerprint import IdentityError, NamespaceIdentity
from prefixcache.identity.keys import block_keys, root_key
from prefixcache.identity.layout import GroupKind, LayerGroup, Layout, LayoutError
from prefixcache.v1 import common_pb2
from prefixcache_client import Client, Namespace, PromptKeys
from tests.unit.client.conftest import BLOCK_TOKENS, DIGEST, LAYOUT, TOKENS


def make(**options: object) -> Namespace:
    return Client("unix:///nowhere").namespace(LAYOUT, DIGEST, block_tokens=BLOCK_TOKENS, **options)  # type: ignore[arg-type] # test


def test_keys_are_those_of_identity() -> None:
    identity = NamespaceIdentity(weights=DIGEST, layout=LAYOUT, block_tokens=BLOCK_TOKENS)
    root = root_key(identity.fingerprint(), tenant_key=b"k" * 32, cache_salt=b"salt")
    ns = make(tenant_key=b"k" * 32, cache_salt=b"salt")
    assert ns.epoch.root == root
    assert ns.hash(TOKENS) == PromptKeys(block_keys(root, TOKENS, BLOCK_TOKENS), len(TOKENS))


@pytest.mark.parametrize("form", [list, tuple, np.array, lambda t: np.array(t, "<u4").tobytes()])
def test_tokens_in_any_form(form: object) -> None:
    assert make().hash(form(TOKENS)) == make().hash(TOKENS)  # type: ignore[operator] # test


def test_a_chain_grows_to_the_same_keys() -> None:
    ns = make()
    chain = ns.chain()
    for start in range(0, len(TOKENS), 7):
        chain.append(TOKENS[start : start + 7])
    assert ns.hash(chain) == ns.hash(TOKENS)


def test_chains_of_elsewhere_are_refused() -> None:
    ns = make()
    with pytest.raises(ValueError, match="another namespace"):
        ns.hash(make(cache_salt=b"x").chain())
    chain = ns.chain()
    ns.invalidate()
    with pytest.raises(ValueError, match="epoch"):
        ns.hash(chain)


def test_an_imported_chain_without_its_start_is_refused() -> None:
    ns = make()
    chain = ns.chain()
    chain.append(TOKENS)
    with pytest.raises(ValueError, match="imported"):
        ns.hash(type(chain).__mro__[1].import_state(chain.export_state()))  # type: ignore[attr-defined] # KeyChain


def test_invalidate_is_a_new_fingerprint_and_other_keys() -> None:
    first, second = make(), make()
    before = first.epoch
    assert first.invalidate() == first.epoch.number > 0
    assert first.epoch.fingerprint != before.fingerprint
    assert first.hash(TOKENS).keys != second.hash(TOKENS).keys


def test_workers_with_the_same_change_may_agree_on_its_number() -> None:
    first, second = make(), make()
    assert first.invalidate(7) == second.invalidate(7) == 7
    assert first.epoch == second.epoch
    with pytest.raises(ValueError, match="in force"):
        first.invalidate(7)
    for bad in (-1, 1 << 63):
        with pytest.raises(ValueError, match="weights_epoch"):
            first.invalidate(bad)
    assert first.epoch == second.epoch


@pytest.mark.parametrize("bad", [PromptKeys(b"x" * 31, 64), PromptKeys(b"x" * 64, 31)])
def test_bad_keys(bad: PromptKeys) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        make().hash(bad)


@pytest.mark.parametrize("bad", [b"abc", [-1], [1 << 32], np.zeros((2, 2), "u4")])
def test_bad_tokens(bad: object) -> None:
    with pytest.raises(ValueError):
        make().hash(bad)  # type: ignore[arg-type] # test


def test_mistakes_raise() -> None:
    with pytest.raises(IdentityError):
        Client("unix:///nowhere").namespace(LAYOUT, b"short")
    huge = Layout.of(LayerGroup(GroupKind.FULL, tuple(range(64)), 64, 1 << 16, 1 << 16, "float32"))
    with pytest.raises(LayoutError):
        Client("unix:///nowhere").namespace(huge, DIGEST)
    with pytest.raises(ValueError, match="zero"):
        make(tenant_key=bytes(32))


def test_dynamic_scales_are_a_namespace_that_never_hits() -> None:
    ns = make(k_scales="dynamic")
    client = Client("unix:///nowhere")
    with client.acquire(ns, TOKENS) as lease:
        assert (lease.tokens, lease.reason) == (0, "dynamic_scales")
    assert client.store(ns, TOKENS, np.zeros((6, ns.block_bytes), np.uint8)).refused == {"dynamic_scales": 6}
    assert client.lookup(ns, TOKENS).reason == "dynamic_scales"
    assert client.stats().failures == {}, "nobody was asked"


def test_from_a_hugging_face_config() -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
        "hidden_size": 128, "head_dim": 16, "rope_theta": 10000.0, "max_position_embeddings": 2048,
    }  # fmt: skip
    ns = Client("unix:///nowhere").namespace_from_hf(config, DIGEST, "bfloat16", block_tokens=32, label="m")
    assert ns.block_bytes == 4 * 2 * 32 * (16 + 16) * 2
    assert ns.label == "m"
    off = Client("unix:///nowhere").namespace_from_hf(config, DIGEST, "bfloat16", v_scales="dynamic")
    assert off.reason_off == "dynamic_scales"


def test_the_spec_tells_sizes_and_no_secret() -> None:
    layout = Layout.of(
        LayerGroup(GroupKind.FULL, (0, 2), 2, 8, 4, "bfloat16"),
        LayerGroup(GroupKind.SLIDING, (1,), 1, 8, 8, "int4", 32, 6),
    )
    ns = Client("unix:///nowhere").namespace(layout, DIGEST, block_tokens=BLOCK_TOKENS, tenant_key=b"k" * 32)
    spec = ns.form.spec(ns.epoch.fingerprint, "x" * 300)
    assert spec.root_key == b""
    assert len(spec.label) == 200
    full, sliding = spec.groups
    assert full.kind == common_pb2.GROUP_KIND_FULL
    assert (full.layers, full.kv_heads, full.k_bytes, full.v_bytes) == (2, 2, 16, 8)
    assert (sliding.window_tokens, sliding.k_bytes, sliding.scale_bytes) == (32, 4, 6)
    for part in spec.parts:
        group = spec.groups[part.group]
        assert part.size_bytes == group.kv_heads * part.layers * (
            BLOCK_TOKENS * (group.k_bytes + group.v_bytes) + group.scale_bytes
        )
