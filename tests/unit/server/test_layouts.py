"""Layouts from the wire: good ones become the core's spec, every bad one a refusal that names the field."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.core.ids import GroupKind
from prefixcache.server import layouts
from prefixcache.server.errors import CallError
from prefixcache.v1 import common_pb2 as pb


def spec() -> pb.NamespaceSpec:
    """A full group cut into two parts, a sliding one, a state."""
    groups = [
        pb.LayerGroup(kind=pb.GROUP_KIND_FULL, layers=5, kv_heads=2, k_bytes=128, v_bytes=64, scale_bytes=4),
        pb.LayerGroup(kind=pb.GROUP_KIND_SLIDING, window_tokens=512, layers=3, kv_heads=1, k_bytes=32, v_bytes=32),
        pb.LayerGroup(kind=pb.GROUP_KIND_STATE, layers=2, kv_heads=4, k_bytes=100, v_bytes=200),
    ]
    parts = [
        pb.Part(group=0, first_layer=0, layers=2, size_bytes=2 * 2 * (16 * 192 + 4)),
        pb.Part(group=0, first_layer=2, layers=3, size_bytes=2 * 3 * (16 * 192 + 4)),
        pb.Part(group=1, first_layer=0, layers=3, size_bytes=3 * 16 * 64),
        pb.Part(group=2, first_layer=0, layers=2, size_bytes=4 * 2 * 300),
    ]
    return pb.NamespaceSpec(fingerprint=bytes(32), block_tokens=16, groups=groups, parts=parts)


def test_a_good_layout_is_taken_as_it_is() -> None:
    checked = layouts.check(spec())
    assert [group.kind for group in checked.groups] == [GroupKind.FULL, GroupKind.SLIDING, GroupKind.STATE]
    assert [part.size_bytes for part in checked.parts] == [part.size_bytes for part in spec().parts]
    assert layouts.head_bytes(checked)[0] == spec().parts[0].size_bytes // 2


def change(path: str, value: Any) -> Callable[[pb.NamespaceSpec], None]:
    """Set `a.1.b`."""

    def apply(message: pb.NamespaceSpec) -> None:
        *way, last = path.split(".")
        target: Any = message
        for step in way:
            target = target[int(step)] if step.isdigit() else getattr(target, step)
        setattr(target, last, value)

    return apply


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("fingerprint", b"short", "fingerprint"),
        ("root_key", b"short", "root_key"),
        ("label", "x" * 201, "label"),
        ("kind", 9, "kind"),
        ("block_tokens", 0, "parts[0]"),
        ("groups.0.kind", 0, "groups[0].kind"),
        ("groups.0.kind", 77, "groups[0].kind"),
        ("groups.0.layers", 0, "groups[0].layers"),
        ("groups.0.kv_heads", 0, "groups[0].kv_heads"),
        ("groups.0.k_bytes", 0, "groups[0].k_bytes"),
        ("groups.0.window_tokens", 5, "window"),
        ("groups.1.window_tokens", 0, "window"),
        ("parts.0.group", 3, "parts[0].group"),
        ("parts.0.size_bytes", 1, "parts[0].size_bytes"),
        ("parts.1.first_layer", 1, "groups[0]"),
        ("parts.1.first_layer", 3, "groups[0]"),
        ("groups.0.layers", 6, "groups[0]"),
        ("groups.0.layers", 4, "groups[0]"),
    ],
)
def test_a_bad_field_is_named(path: str, value: Any, word: str) -> None:
    message = spec()
    change(path, value)(message)
    with pytest.raises(CallError) as refused:
        layouts.check(message)
    assert refused.value.reason == pb.REASON_BAD_LAYOUT
    assert word in refused.value.message


def test_groups_without_parts_and_too_many_of_anything() -> None:
    without = spec()
    del without.parts[3]
    many_groups, many_parts = spec(), spec()
    many_groups.groups.extend([spec().groups[0]] * 20)
    many_parts.parts.extend([spec().parts[0]] * 70)
    foreign = spec()
    foreign.kind = pb.NAMESPACE_KIND_FOREIGN
    for message in (without, many_groups, many_parts, pb.NamespaceSpec(fingerprint=bytes(32)), foreign):
        with pytest.raises(CallError) as refused:
            layouts.check(message)
        assert refused.value.reason == pb.REASON_BAD_LAYOUT


u32 = st.one_of(st.integers(0, 5), st.sampled_from([16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]))


@given(st.lists(u32, min_size=8, max_size=8), st.integers(0, (1 << 64) - 1))
def test_no_numbers_make_it_overflow(numbers: list[int], size: int) -> None:
    tokens, kind, window, layers, heads, k, v, scale = numbers
    group = pb.LayerGroup(window_tokens=window, layers=layers, kv_heads=heads, k_bytes=k, v_bytes=v, scale_bytes=scale)
    group.kind = pb.GroupKind.ValueType(kind % 5)
    exact = heads * layers * ((1 if group.kind == pb.GROUP_KIND_STATE else tokens) * (k + v) + scale)
    for told in (size, exact % (1 << 64)):
        part = pb.Part(group=0, layers=layers, size_bytes=told)
        message = pb.NamespaceSpec(fingerprint=bytes(32), block_tokens=tokens, groups=[group], parts=[part])
        size_of_part = outcome(message)
        assert size_of_part is None or size_of_part == exact == told <= 1 << 36


def outcome(message: pb.NamespaceSpec) -> int | None:
    """The size of the first part, None when the layout was refused (and only ever as one)."""
    try:
        return layouts.check(message).parts[0].size_bytes
    except CallError as refused:
        return None if refused.reason == pb.REASON_BAD_LAYOUT else -1
