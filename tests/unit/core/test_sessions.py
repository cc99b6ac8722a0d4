"""Sessions and namespaces."""

from __future__ import annotations

import pytest

from prefixcache.core.commands import (
    Aborted,
    LeaseEnded,
    NamespaceForgotten,
    NamespaceReady,
    SessionClosed,
    SessionReady,
)
from prefixcache.core.events import (
    AbortRequested,
    LookupRequested,
    NamespaceOpened,
    ProcessExited,
    SessionEnded,
    SessionOpened,
)
from prefixcache.core.ids import GroupKind, NamespaceKind
from prefixcache.core.reasons import Kind, Miss, Refusal
from prefixcache.core.spec import GroupSpec, Limits, NamespaceSpec, PartSpec
from tests.unit.core.harness import FULL, GRANULE, ONE_PART, TOKENS, A, B, Harness, name


def test_opening_twice_is_a_retry() -> None:
    h = Harness()
    assert h.ask(SessionOpened(A, True), SessionReady).session == A
    h.refused(SessionOpened(A, False), Kind.ALREADY_EXISTS, Refusal.SESSION_EXISTS)
    h.refused(SessionOpened(b"short", True), Kind.INVALID_ARGUMENT, Refusal.ID_INVALID)


def test_an_ended_session_ends_its_leases_at_once() -> None:
    h = Harness()
    h.store("ab")
    acquired = h.acquire("ab", B)
    commands = h.send(SessionEnded(B))
    assert commands == [LeaseEnded(acquired.lease, B, Miss.SESSION_ENDED), SessionClosed(B, 0)]
    assert h.planner.state.stats.tokens.pending == 0
    h.refused(SessionEnded(B), Kind.NOT_FOUND, Refusal.SESSION_UNKNOWN)


def test_a_mapped_session_is_remembered_until_its_process_is_gone() -> None:
    h = Harness()
    h.reserve("ab", A)
    assert h.ask(SessionEnded(A), SessionClosed).quarantined_slots == 2
    h.refused(SessionEnded(A), Kind.FAILED_PRECONDITION, Refusal.SESSION_ENDED)
    h.refused(SessionOpened(A, True), Kind.ALREADY_EXISTS, Refusal.SESSION_EXISTS)
    assert h.ask(ProcessExited(A), SessionClosed).quarantined_slots == 0
    h.ask(SessionOpened(A, True), SessionReady)


def test_a_thousand_sessions_and_no_more_than_the_limit() -> None:
    h = Harness(limits=Limits(max_sessions=1002))
    for number in range(1000):
        h.planner.handle(SessionOpened(name(10_000 + number), True), 0.0)
    assert len(h.planner.state.sessions) == 1002
    h.refused(SessionOpened(name(1), True), Kind.RESOURCE_EXHAUSTED, Refusal.TOO_MANY)


def test_the_same_namespace_for_everybody() -> None:
    h = Harness()
    ready = h.ask(NamespaceOpened(7, (1).to_bytes(32, "big"), ONE_PART), NamespaceReady)
    assert (ready.namespace, ready.strides) == (1, (GRANULE,))
    other = NamespaceSpec(TOKENS * 2, (FULL,), (PartSpec(0, 4, GRANULE),))
    event = NamespaceOpened(7, (1).to_bytes(32, "big"), other)
    h.refused(event, Kind.FAILED_PRECONDITION, Refusal.NAMESPACE_MISMATCH)
    h.refused(NamespaceOpened(1, bytes(32), other), Kind.ALREADY_EXISTS, Refusal.NAMESPACE_TAKEN)


def test_namespaces_never_see_each_other() -> None:
    h = Harness()
    h.open(2, ONE_PART)
    h.store("ab")
    assert h.hit("ab") == 2
    assert h.acquire("ab", namespace=2).planned_blocks == 0


def test_a_part_that_fits_no_slab() -> None:
    h = Harness(slots=64, slab_slots=16)
    big = NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 1, 17 * GRANULE),))
    h.refused(NamespaceOpened(9, bytes(32), big), Kind.RESOURCE_EXHAUSTED, Refusal.BLOCK_TOO_LARGE)
    many = NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 1, 16 * GRANULE),) * 5)
    h.refused(NamespaceOpened(9, bytes(32), many), Kind.RESOURCE_EXHAUSTED, Refusal.BLOCK_TOO_LARGE)


def test_an_empty_namespace_makes_room_for_another() -> None:
    h = Harness(limits=Limits(max_namespaces=1))
    h.acquire("b")
    looked_up = h.planner.state.stats.tokens.looked_up
    held = h.reserve("a", ttl_s=1.0)
    h.now = 2.0
    h.refused(NamespaceOpened(9, bytes(32), ONE_PART), Kind.RESOURCE_EXHAUSTED, Refusal.TOO_MANY)
    h.ask(AbortRequested(A, held.reservation), Aborted)
    wide = NamespaceSpec(TOKENS, (FULL,), (PartSpec(0, 4, 2 * GRANULE),))
    assert h.ask(NamespaceOpened(9, bytes(32), wide), NamespaceReady).namespace == 9
    assert h.all[0] == NamespaceForgotten(1)
    assert list(h.planner.state.policies) == [(2 * GRANULE,)]
    h.refused(LookupRequested(1, b""), Kind.NOT_FOUND, Refusal.NAMESPACE_UNKNOWN)
    assert h.planner.state.stats.tokens.looked_up == looked_up > 0


def test_a_namespace_that_holds_blocks_is_not_forgotten() -> None:
    h = Harness(limits=Limits(max_namespaces=1))
    h.store("a")
    h.refused(NamespaceOpened(9, bytes(32), ONE_PART), Kind.RESOURCE_EXHAUSTED, Refusal.TOO_MANY)


SLIDING = GroupSpec(GroupKind.SLIDING, 9)
PART = PartSpec(0, 1, 1)


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (NamespaceSpec(0, (FULL,), (PART,)), "block_tokens"),
        (NamespaceSpec(1 << 20, (FULL,), (PART,)), "block_tokens"),
        (NamespaceSpec(1, (), (PART,)), "groups"),
        (NamespaceSpec(1, (FULL,), ()), "parts"),
        (NamespaceSpec(1, (FULL,), (PART,) * 65), "parts"),
        (NamespaceSpec(1, (GroupSpec(GroupKind.SLIDING),), (PART,)), "window_tokens"),
        (NamespaceSpec(1, (GroupSpec(GroupKind.FULL, 3),), (PART,)), "window_tokens"),
        (NamespaceSpec(1, (FULL,), (PartSpec(1, 1, 1),)), "group"),
        (NamespaceSpec(1, (FULL,), (PartSpec(-1, 1, 1),)), "group"),
        (NamespaceSpec(1, (FULL, FULL), (PART,)), "every group"),
        (NamespaceSpec(1, (FULL,), (PartSpec(0, 0, 1),)), "kv_heads"),
        (NamespaceSpec(1, (FULL,), (PartSpec(0, 1, 0),)), "size_bytes"),
        (NamespaceSpec(1, (FULL,), (PartSpec(0, 1, 1 << 62),)), "size_bytes"),
        (NamespaceSpec(1, (SLIDING,), (PART,), NamespaceKind.FOREIGN), "foreign"),
    ],
)
def test_specs_that_no_pool_could_serve(spec: NamespaceSpec, word: str) -> None:
    h = Harness()
    refusal = h.refused(NamespaceOpened(9, bytes(32), spec), Kind.INVALID_ARGUMENT, Refusal.SPEC_INVALID)
    assert word in refusal.message


def test_fingerprints_have_one_length() -> None:
    h = Harness()
    h.refused(NamespaceOpened(9, b"short", ONE_PART), Kind.INVALID_ARGUMENT, Refusal.ARGUMENT_INVALID)
