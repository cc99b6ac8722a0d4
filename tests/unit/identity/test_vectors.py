"""The test vectors, computed again with hashlib, hmac and struct only: what another language would have to write.

Nothing of prefixcache takes part, but for the last test, which compares the files with what the code gives today.
"""

import hashlib
import hmac
import importlib.util
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "vectors"
BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "uint8": 8, "int4": 4}


def load(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


def untag(value: Any) -> Any:
    """What a tagged JSON value stands for; maps become dicts."""
    if isinstance(value, list):
        return [untag(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "hex":
        return bytes.fromhex(content)
    if tag == "map":
        return {key: untag(item) for key, item in content}
    return int(content) if tag == "int" else float(content)


def plain_integer(value: int) -> bytes:
    """An integer in msgpack's shortest form."""
    if 0 <= value < 128:
        return bytes([value])
    if -32 <= value < 0:
        return struct.pack("b", value)
    codes = [(0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q")]
    if value < 0:
        codes = [(0xD0, ">b"), (0xD1, ">h"), (0xD2, ">i"), (0xD3, ">q")]
    for code, form in codes:
        try:
            return bytes([code]) + struct.pack(form, value)
        except struct.error:
            continue
    raise AssertionError("outside of msgpack's integers")


def plain_length(length: int, small: int, limit: int, codes: tuple[int, ...]) -> bytes:
    """The head of a string, array or map: `small` + length below `limit`, else a code and 1, 2 or 4 bytes."""
    if length < limit:
        return bytes([small + length])
    forms = ((">B", 256), (">H", 65536), (">I", 2**32))[-len(codes) :]
    for code, (form, top) in zip(codes, forms, strict=True):
        if length < top:
            return bytes([code]) + struct.pack(form, length)
    raise AssertionError("too long for msgpack")


def plain_pack(value: Any) -> bytes:
    """Canonical msgpack, written from README.md."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return plain_integer(value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", 0.0 if value == 0 else value)
    if isinstance(value, str):
        data = value.encode()
        return plain_length(len(data), 0xA0, 32, (0xD9, 0xDA, 0xDB)) + data
    if isinstance(value, bytes):
        return plain_length(len(value), 0, 0, (0xC4, 0xC5, 0xC6)) + value
    if isinstance(value, list):
        return plain_length(len(value), 0x90, 16, (0xDC, 0xDD)) + b"".join(map(plain_pack, value))
    items = sorted(value.items(), key=lambda item: item[0].encode())
    head = plain_length(len(items), 0x80, 16, (0xDE, 0xDF))
    return head + b"".join(plain_pack(key) + plain_pack(item) for key, item in items)


def test_canonical_values() -> None:
    vectors = load("canonical.json")["values"]
    assert len(vectors) > 40
    for vector in vectors:
        assert plain_pack(untag(vector["value"])).hex() == vector["packed"]


def test_what_is_refused_is_not_what_a_canonical_packer_writes() -> None:
    packed = {vector["packed"] for vector in load("canonical.json")["values"]}
    assert not packed & {vector["packed"] for vector in load("canonical.json")["refused"]}


def test_root_keys() -> None:
    vectors = load("keys.json")
    assert len(vectors["roots"]) == 6
    for vector in vectors["roots"]:
        secret = bytes.fromhex(vector["tenant_key"] or vectors["public_key"])
        message = bytes.fromhex(vector["fingerprint"]) + bytes.fromhex(vector["cache_salt"])
        assert hmac.new(secret, message, hashlib.sha256).hexdigest() == vector["root"]
    assert vectors["public_key"] == hashlib.sha256(b"prefixcache/v1 public tenant key").hexdigest()


def test_block_keys() -> None:
    vectors = load("keys.json")
    for vector in vectors["chains"]:
        size = vector["block_tokens"]
        tokens = vector.get("tokens")
        if tokens is None:
            tokens = [(i * 2654435761 + 12345) % 2**32 for i in range(vector["tokens_formula"]["count"])]
        key, keys = bytes.fromhex(vectors["root"]), b""
        for block in range(len(tokens) // size):
            inside = [e for e in vector["extras"] if block * size <= e[2] < (block + 1) * size]
            items = sorted([kind, bytes.fromhex(identity), offset - block * size] for kind, identity, offset in inside)
            extra = plain_pack(items) if items else b""
            body = struct.pack(f"<{size}I", *tokens[block * size : (block + 1) * size])
            key = hashlib.sha256(key + struct.pack("<I", len(extra)) + extra + body).digest()
            keys += key
        assert keys.hex() == vector["keys"]


def test_foreign_keys() -> None:
    vectors = load("keys.json")
    for vector in vectors["foreign"]:
        key = bytes.fromhex(vector["engine_key"])
        data = bytes.fromhex(vectors["root"]) + struct.pack("<I", len(key)) + key
        assert hashlib.sha256(data).hexdigest() == vector["key"]


def test_part_sizes() -> None:
    vectors = load("layouts.json")["sizes"]
    assert len(vectors) == 16
    for vector in vectors:
        expected = []
        for number, group in enumerate(vector["layout"]["groups"]):
            rows = 1 if group["kind"] == "state" else vector["block_tokens"]
            layer = rows * (group["k_dim"] + group["v_dim"]) * BITS[group["dtype"]] // 8 + group["scale_bytes"]
            first = 0
            for cut in [*vector["layout"]["stages"], math.inf]:
                count = sum(layer_number < cut for layer_number in group["layers"]) - first
                if count:
                    size = group["kv_heads"] * count * layer
                    part = {"group": number, "first_layer": first, "layer_count": count, "bytes": size}
                    expected.append({**part, "kv_heads": group["kv_heads"]})
                first += count
        assert vector["parts"] == expected


@pytest.mark.parametrize("index", [0, 1])
def test_the_bytes_of_a_tiny_part(index: int) -> None:
    vector = load("layouts.json")["tiny_parts"][index]
    form = {"uint8": "<B", "float32": "<f"}[vector["dtype"]]
    k, v = vector["k"], vector["v"]
    part = b""
    for head in range(len(k[0][0])):
        for layer in range(len(k)):
            for values in (k, v):
                for token in range(len(k[0])):
                    for number in values[layer][token][head]:
                        part += struct.pack(form, int(number) if form == "<B" else number)
            part += bytes.fromhex(vector["scales"][layer][head])
    assert part.hex() == vector["part"]


def test_fingerprints() -> None:
    vectors = load("fingerprints.json")["namespaces"]
    assert len(vectors) == 6
    for vector in vectors:
        packed = plain_pack(untag(vector["map"]))
        assert packed.hex() == vector["packed"]
        assert hashlib.sha256(packed).hexdigest() == vector["fingerprint"]


def test_weights_digests() -> None:
    for vector in load("fingerprints.json")["weights"]:
        entries = {}
        for tensor in vector["tensors"]:
            size = tensor["bytes_formula"]
            data = bytes((i * 31 + tensor["seed"]) % 251 for i in range(size))
            if size > 12288:
                middle = (size - 4096) // 2 // 64 * 64
                data = data[:4096] + data[middle : middle + 4096] + data[-4096:]
            dtype, shape = tensor["dtype"].encode(), tensor["shape"]
            dims = struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", dim) for dim in shape)
            entries[tensor["name"]] = struct.pack("<I", len(dtype)) + dtype + dims + struct.pack("<Q", size) + data
        if entries.get("lm_head.weight") == entries["model.embed_tokens.weight"]:
            del entries["lm_head.weight"]
        named = b"".join(
            struct.pack("<I", len(name.encode())) + name.encode() + entries[name] for name in sorted(entries)
        )
        assert hashlib.sha256(named).hexdigest() == vector["digest"], vector["name"]


def test_the_code_gives_the_vectors() -> None:
    spec = importlib.util.spec_from_file_location("generate_vectors", FOLDER / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for path, text in generate.files().items():
        assert path.read_text() == text, f"{path.name}: a key, fingerprint or size changed"
