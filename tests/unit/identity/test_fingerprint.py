"""Fingerprints: each thing that changes KV bytes changes them, and what cannot be shared is refused."""

import hashlib
import os
import subprocess
import sys
from typing import Any

import pytest

from prefixcache.identity import GroupKind, LayerGroup, Layout, LayoutError
from prefixcache.identity.canonical import CanonicalError, pack
from prefixcache.identity.fingerprint import IdentityError, NamespaceIdentity, fingerprint_of, short_name

WEIGHTS = bytes(range(32))
GROUP = LayerGroup(GroupKind.FULL, (0, 1), 2, 64, 64, "bfloat16")
LAYOUT = Layout.of(GROUP)


def identity(**changes: Any) -> NamespaceIdentity:
    return NamespaceIdentity(**{"weights": WEIGHTS, "layout": LAYOUT, **changes})


CHANGES: list[dict[str, Any]] = [
    {"weights": bytes(range(1, 33))},
    {"layout": Layout.of(LayerGroup(GroupKind.FULL, (0, 1), 2, 64, 64, "float16"))},
    {"layout": Layout.of(LayerGroup(GroupKind.SLIDING, (0, 1), 2, 64, 64, "bfloat16", window_tokens=64))},
    {"layout": Layout.of(GROUP, packing="native:vllm:amx")},
    {"layout": Layout.of(GROUP, stages=(1,))},
    {"block_tokens": 16},
    {"weights_epoch": 1},
    {"quantisation": "awq-int4"},
    {"compute_dtype": "float32"},
    {"k_scales": (1.0,)},
    {"v_scales": (1.0,)},
    {"codec": "int8"},
    {"codec": "int4"},
    {"rope": {"all": {"theta": 1e4}}},
    {"config": {"norm_eps": 1e-5}},
    {"overrides": {"attention": "x"}},
    {"lora": bytes(range(32))},
    {"tenant": "acme"},
    {"engine": "vllm"},
]


def test_every_field_takes_part() -> None:
    fields = {name for change in CHANGES for name in change}
    assert fields == set(NamespaceIdentity.__dataclass_fields__)
    assert len({identity(**change).fingerprint() for change in [{}, *CHANGES]}) == len(CHANGES) + 1


def test_a_fingerprint_is_the_hash_of_the_canonical_map() -> None:
    one = identity()
    assert one.fingerprint() == hashlib.sha256(pack(one.to_map())).digest() == fingerprint_of(one.to_map())
    assert short_name(one.fingerprint()) == one.fingerprint().hex()[:12]
    with pytest.raises(IdentityError):
        short_name(b"short")


def test_the_compute_dtype_is_the_kv_dtype_unless_told() -> None:
    assert identity(compute_dtype="bfloat16").fingerprint() == identity().fingerprint()


def test_dynamic_scales_are_refused_with_their_reason() -> None:
    for scales in ({"k_scales": "dynamic"}, {"v_scales": "dynamic"}):
        with pytest.raises(IdentityError, match="run time") as caught:
            identity(**scales)
        assert caught.value.reason == "dynamic_scales"


@pytest.mark.parametrize(
    "change",
    [
        {"weights": b""}, {"weights": bytes(32)}, {"weights": b"x" * 31}, {"lora": b"x"}, {"weights_epoch": -1},
        {"weights_epoch": 1 << 63}, {"block_tokens": 0}, {"block_tokens": 1 << 20}, {"compute_dtype": "bf16"},
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(IdentityError):
        identity(**change)


def test_sizes_that_overflow_are_refused() -> None:
    huge = Layout.of(LayerGroup(GroupKind.FULL, tuple(range(4096)), 65536, 1 << 20, 0, "float64"))
    with pytest.raises(LayoutError, match="more than"):
        identity(layout=huge)


def test_nan_has_no_fingerprint() -> None:
    with pytest.raises(CanonicalError):
        identity(k_scales=(float("nan"),)).fingerprint()


def test_fingerprints_do_not_depend_on_the_process() -> None:
    script = (
        "from prefixcache.identity import *;from prefixcache.identity.fingerprint import NamespaceIdentity;"
        "group=LayerGroup(GroupKind.FULL,(0,1),2,64,64,'bfloat16');"
        "settings={name: 1 for name in {'one','two','three','four'}};"
        "print(NamespaceIdentity(weights=bytes(range(32)),layout=Layout.of(group),config=settings).fingerprint().hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "1", "31337")
    }
    assert outputs == {identity(config={"one": 1, "two": 1, "three": 1, "four": 1}).fingerprint().hex()}
