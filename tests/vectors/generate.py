"""Writes the test vectors from the code (see README.md here). `--check` compares instead and exits 1 on a difference.

The test that reads them, tests/unit/identity/test_vectors.py, computes everything again without our code.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from prefixcache.identity import (
    Extra,
    GroupKind,
    LayerGroup,
    Layout,
    block_keys,
    foreign_key,
    root_key,
    split_extras,
)
from prefixcache.identity.canonical import Value, pack
from prefixcache.identity.fingerprint import NamespaceIdentity
from prefixcache.identity.keys import PUBLIC_KEY
from prefixcache.identity.model import namespace_from_hf
from prefixcache.identity.tensors import TensorRecord
from prefixcache.identity.weights import digest_tensors

FOLDER = Path(__file__).resolve().parent
FINGERPRINT = bytes(range(32))
TENANT_KEY = bytes(range(100, 132))

SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "rope_theta": 100000, "rope_scaling": None,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip


def tagged(value: Value) -> Any:
    """A value as JSON that loses nothing (README.md, canonical.json)."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return {"int": str(value)}
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, list | tuple):
        return [tagged(item) for item in value]
    return {"map": [[key, tagged(item)] for key, item in value.items()]}


def canonical_vectors() -> dict[str, Any]:
    """Each form of each type at its edges, and what is not canonical."""
    integers = [0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
    integers += [-1, -32, -33, -128, -129, -32768, -32769, -(2**31), -(2**31) - 1, -(2**63)]
    values: list[Value] = [None, True, False, *integers, 0.0, -0.0, 1.0, 0.1, -2.5e-300]
    values += ["", "a" * 31, "a" * 32, "a" * 255, "a" * 256, "schlüssel", "鍵"]
    values += [b"", b"\0" * 255, b"\0" * 256, [], [1] * 15, [1] * 16, ["mixed", 1, b"x", None]]
    values += [{}, {"b": 1, "a": 2, "B": 3, "aa": 4}, {"ü": 1, "z": 2, "鍵": 3, "😀": 4}, {"m": {"y": [], "x": {}}}]
    values += [{f"key{i}": i for i in range(16)}]
    refused = {
        "integer not in its shortest form": "cd0001",
        "signed form of a non-negative integer": "d001",
        "float32": "ca3f800000",
        "NaN": "cb7ff8000000000000",
        "infinity": "cb7ff0000000000000",
        "negative zero": "cb8000000000000000",
        "string not in its shortest form": "d90161",
        "map keys out of order": "82a16201a16102",
        "map key twice": "82a16101a16102",
        "map key that is no string": "8101a161",
        "extension type": "d40100",
        "bytes behind the value": "c0c0",
        "cut short": "92c0",
    }
    return {
        "values": [{"value": tagged(value), "packed": pack(value).hex()} for value in values],
        "refused": [{"why": why, "packed": packed} for why, packed in refused.items()],
    }


def formula_tokens(count: int) -> list[int]:
    """Tokens that another language can make: (i * 2654435761 + 12345) mod 2^32."""
    return [(i * 2654435761 + 12345) % 2**32 for i in range(count)]


def key_vectors() -> dict[str, Any]:
    """Roots, chains with and without extras, and foreign keys."""
    roots = []
    for tenant_key in (None, TENANT_KEY):
        for salt in (b"", b"salt", bytes(100)):
            root = root_key(FINGERPRINT, tenant_key=tenant_key, cache_salt=salt)
            tenant = tenant_key.hex() if tenant_key else None
            entry = {"fingerprint": FINGERPRINT.hex(), "tenant_key": tenant, "cache_salt": salt.hex()}
            roots.append({**entry, "root": root.hex()})
    image, sound = Extra("image", bytes(range(16)), 5), Extra("audio", b"\xff", 5)
    late = Extra("image", b"later", 9)
    chains = [
        _chain([0, 1, 2, 3, 4, 5, 6, 7], 4),
        _chain([4294967295, 0, 7], 1),
        _chain([1, 2, 3], 4),
        _chain(list(range(10)), 4, image),
        _chain(list(range(12)), 4, image, late, sound),
    ]
    long = block_keys(root_key(FINGERPRINT), formula_tokens(1000), 64)
    chains.append({"block_tokens": 64, "tokens_formula": {"count": 1000}, "extras": [], "keys": long.hex()})
    root = root_key(FINGERPRINT)
    foreign = [{"engine_key": key.hex(), "key": foreign_key(root, key).hex()} for key in (b"a", bytes(32), b"x" * 300)]
    return {"public_key": PUBLIC_KEY.hex(), "roots": roots, "root": root.hex(), "chains": chains, "foreign": foreign}


def _chain(tokens: list[int], block_tokens: int, *extras: Extra) -> dict[str, Any]:
    keys = block_keys(root_key(FINGERPRINT), tokens, block_tokens, split_extras(extras, block_tokens))
    listed = [[extra.kind, extra.id.hex(), extra.offset] for extra in extras]
    return {"block_tokens": block_tokens, "tokens": tokens, "extras": listed, "keys": keys.hex()}


def layouts() -> dict[str, Layout]:
    """One layout of each kind."""
    full, sliding, state = GroupKind.FULL, GroupKind.SLIDING, GroupKind.STATE
    attention = LayerGroup(full, (3,), 2, 64, 64, "float16")
    window = LayerGroup(sliding, (0, 1, 2, 3, 4, 6), 1, 256, 256, "bfloat16", window_tokens=512)
    return {
        "gqa": Layout.of(LayerGroup(full, tuple(range(30)), 3, 64, 64, "bfloat16")),
        "hybrid": Layout.of(LayerGroup(full, (5,), 1, 256, 256, "bfloat16"), window),
        "mla": Layout.of(LayerGroup(full, tuple(range(27)), 1, 576, 0, "bfloat16")),
        "int8 with scales": Layout.of(LayerGroup(full, (0, 1), 4, 128, 128, "int8", scale_bytes=256)),
        "int4": Layout.of(LayerGroup(full, (0, 1), 4, 128, 128, "int4", scale_bytes=32)),
        "state": Layout.of(attention, LayerGroup(state, (0, 1, 2), 8, 12, 4096, "float32")),
        "pipeline": Layout.of(LayerGroup(full, (5,), 1, 256, 256, "bfloat16"), window, stages=(3,)),
        "native": Layout.of(LayerGroup(full, (0,), 2, 64, 64, "bfloat16"), packing="native:vllm:amx"),
    }


def layout_vectors() -> dict[str, Any]:
    """Part sizes, and a part's bytes."""
    sizes = []
    for name, layout in layouts().items():
        for block_tokens in (16, 64):
            parts = [
                {
                    "group": part.group, "first_layer": part.first_layer, "layer_count": part.layer_count,
                    "kv_heads": part.kv_heads, "bytes": part.bytes,
                }
                for part in layout.parts(block_tokens)
            ]  # fmt: skip
            sizes.append({"name": name, "layout": layout.to_map(), "block_tokens": block_tokens, "parts": parts})
    return {"sizes": sizes, "tiny_parts": [_tiny_part("uint8"), _tiny_part("float32")]}


def _tiny_part(dtype: str) -> dict[str, Any]:
    """A part of 2 layers, 3 heads, 2 tokens, built by numpy's transpose."""
    layers, tokens, heads, k_dim, v_dim = 2, 2, 3, 2, 1
    k = np.arange(layers * tokens * heads * k_dim, dtype=dtype).reshape(layers, tokens, heads, k_dim)
    v = (100 + np.arange(layers * tokens * heads * v_dim)).astype(dtype).reshape(layers, tokens, heads, v_dim)
    scales = [[bytes([200 + layer, head]) for head in range(heads)] for layer in range(layers)]
    ordered_k, ordered_v = k.transpose(2, 0, 1, 3), v.transpose(2, 0, 1, 3)
    part = b"".join(
        ordered_k[head, layer].tobytes() + ordered_v[head, layer].tobytes() + scales[layer][head]
        for head in range(heads)
        for layer in range(layers)
    )
    group = LayerGroup(GroupKind.FULL, (0, 1), heads, k_dim, v_dim, dtype, scale_bytes=2)
    assert len(part) == Layout.of(group).block_bytes(tokens)
    written = [[scale.hex() for scale in row] for row in scales]
    return {"dtype": dtype, "k": k.tolist(), "v": v.tolist(), "scales": written, "part": part.hex()}


def fingerprint_vectors() -> dict[str, Any]:
    """Namespaces from settings and from configs, and weights digests."""
    weights = bytes(range(1, 33))
    identities: dict[str, NamespaceIdentity] = {
        "least": NamespaceIdentity(weights=weights, layout=layouts()["gqa"]),
        "most": NamespaceIdentity(
            weights=weights, layout=layouts()["hybrid"], block_tokens=16, weights_epoch=7, quantisation="awq-int4-g128",
            compute_dtype="float16", k_scales=(0.5, 0.25), v_scales=(1.0,), codec="none", rope={"all": {}},
            config={"norm_eps": 1e-5}, overrides={"note": b"\1"}, lora=bytes(range(2, 34)), tenant="a", engine="vllm",
        ),
        "int8": NamespaceIdentity(weights=weights, layout=layouts()["gqa"], codec="int8"),
        "int4": NamespaceIdentity(weights=weights, layout=layouts()["gqa"], codec="int4"),
        "smollm2 from a transformers 4.57 config": namespace_from_hf(SMOLLM2, weights, "bfloat16").identity,
        "gemma3 from a transformers 4.57 config": namespace_from_hf(GEMMA3, weights, "float32").identity,
    }  # fmt: skip
    namespaces = [
        {
            "name": name,
            "map": tagged(identity.to_map()),
            "packed": pack(identity.to_map()).hex(),
            "fingerprint": identity.fingerprint().hex(),
        }
        for name, identity in identities.items()
    ]
    return {
        "namespaces": namespaces,
        "weights": [_weights("small", 30), _weights("sampled", 20000), _weights("tied", 64)],
    }


def _weights(name: str, nbytes: int) -> dict[str, Any]:
    tensors = [
        ("model.embed_tokens.weight", "uint8", (nbytes,), nbytes, 1),
        ("model.layers.0.bias", "uint8", (2, 1), 2, 2),
        ("model.scale", "float32", (), 4, 3),
    ]
    if name == "tied":
        tensors.append(("lm_head.weight", "uint8", (nbytes,), nbytes, 1))
    records, written = [], []
    for tensor, dtype, shape, count, seed in tensors:
        data = bytes((i * 31 + seed) % 251 for i in range(count))
        records.append(TensorRecord(tensor, dtype, shape, count, _reader(data)))
        written.append({"name": tensor, "dtype": dtype, "shape": shape, "bytes_formula": count, "seed": seed})
    return {"name": name, "tensors": written, "digest": digest_tensors(records).hex()}


def _reader(data: bytes) -> Any:
    return lambda offset, size: data[offset : offset + size]


def files() -> dict[Path, str]:
    """The content of every vector file."""
    content = {
        "canonical.json": canonical_vectors(),
        "keys.json": key_vectors(),
        "layouts.json": layout_vectors(),
        "fingerprints.json": fingerprint_vectors(),
    }
    return {FOLDER / name: json.dumps(data, indent=1, ensure_ascii=True) + "\n" for name, data in content.items()}


def main() -> int:
    """Write, or with --check compare."""
    stale = [path.name for path, text in files().items() if not path.is_file() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        print(f"stale: {', '.join(stale)}" if stale else "test vectors are up to date")
        return bool(stale)
    for path, text in files().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
