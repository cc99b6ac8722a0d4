"""Warm restart, and verification on first use."""

from __future__ import annotations

import copy
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it has no stubs
import numpy as np
import pytest

from prefixcache.core.commands import (
    Acquired,
    ComputeChecksum,
    Refused,
    SetGenerations,
    SnapshotLoaded,
    SnapshotTaken,
    VerifyParts,
)
from prefixcache.core.events import (
    AcquireRequested,
    ChecksumDone,
    SnapshotRequested,
    SnapshotRestored,
    VerifyDone,
)
from prefixcache.core.planner import Planner
from prefixcache.core.reasons import Kind, Miss, Refusal
from prefixcache.core.spec import Limits, PlannerConfig, PoolSpec
from tests.unit.core.harness import GRANULE, TOKENS, A, Harness, chain, digests, name, slots_of


def stored(*prompts: str, **config: Any) -> Harness:
    h = Harness(checksum=True, **config)
    for prompt in prompts:
        reserved = h.reserve(prompt)
        h.commit(reserved)
        for order in [command for command in h.all if isinstance(command, ComputeChecksum)]:
            found = digests(len(order.rows))
            h.send(ChecksumDone(order.namespace, order.part, order.rows, order.generations, found))
    return h


def snapshot(h: Harness) -> dict[str, Any]:
    taken = h.ask(SnapshotRequested(), SnapshotTaken).snapshot
    through: dict[str, Any] = msgpack.unpackb(msgpack.packb(taken), strict_map_key=False)
    assert through == taken
    return through


def restored(taken: dict[str, Any], **config: Any) -> Harness:
    h = Harness.__new__(Harness)
    pool = PoolSpec(64 * GRANULE, 16 * GRANULE)
    h.planner = Planner(PlannerConfig((pool,), **config))
    h.now, h.ids, h.all = 0.0, 1000, []
    h.send(SnapshotRestored(taken))
    return h


def ready(taken: dict[str, Any], **config: Any) -> Harness:
    from prefixcache.core.events import SessionOpened

    h = restored(taken, **config)
    assert isinstance(h.all[-1], SnapshotLoaded)
    h.send(SessionOpened(A, True))
    return h


def ask(h: Harness, letters: str) -> VerifyParts:
    event = AcquireRequested(A, h.new_id(), 1, chain(letters), 0, len(letters) * TOKENS, 100.0)
    commands = h.send(event)
    assert len(commands) == 1
    assert isinstance(commands[0], VerifyParts)
    return commands[0]


def test_blocks_survive_and_are_verified_before_they_are_served() -> None:
    before = stored("abc", "abx")
    slots = before.acquire("abc").runs[0].slots.tolist()
    h = ready(snapshot(before), first_generation=900)
    order = ask(h, "abc")
    assert order.parts[0].slots.tolist() == slots
    assert order.parts[0].digests.tolist() == digests(3).tolist()
    (reply,) = h.send(VerifyDone(order.check))
    assert isinstance(reply, Acquired)
    assert reply.planned_blocks == 3
    assert reply.runs[0].slots.tolist() == slots
    assert h.acquire("abc").planned_blocks == 3, "verified once is enough"
    assert h.planner.state.stats.tokens.looked_up == 6 * TOKENS


def test_generations_are_new_after_a_restart() -> None:
    before = stored("abc")
    old = before.acquire("abc").runs[0].generations
    h = restored(snapshot(before))
    orders = [command for command in h.all if isinstance(command, SetGenerations)]
    assert orders
    assert all(order.generation > old.max() for order in orders)


def test_what_fails_leaves_with_all_that_follows() -> None:
    h = ready(snapshot(stored("abcd")))
    order = ask(h, "abcd")
    bad = (0, int(order.parts[0].rows[np.argsort(order.parts[0].slots)[1]]))
    (reply,) = h.send(VerifyDone(order.check, (bad,)))
    assert isinstance(reply, Acquired)
    assert (reply.planned_blocks, reply.stop) == (1, Miss.NOT_STORED)
    assert h.used == 1
    assert h.planner.state.stats.parts_failed_verification == 1


def test_what_was_reused_meanwhile_is_not_blamed() -> None:
    from prefixcache.core.events import ClearRequested

    h = ready(snapshot(stored("ab")))
    order = ask(h, "ab")
    h.send(ClearRequested())
    fresh = h.store("ab")
    failed = tuple((0, int(row)) for row in order.parts[0].rows)
    (reply,) = h.send(VerifyDone(order.check, failed))
    assert isinstance(reply, Acquired)
    assert reply.runs[0].slots.tolist() == slots_of(fresh)


def test_a_session_that_left_while_its_blocks_were_verified() -> None:
    from prefixcache.core.events import ProcessExited

    h = ready(snapshot(stored("ab")))
    order = ask(h, "ab")
    h.send(ProcessExited(A))
    (reply,) = h.send(VerifyDone(order.check))
    assert isinstance(reply, Refused)
    assert reply.reason is Refusal.SESSION_UNKNOWN
    assert reply.subject == name(1001)
    h.refused(VerifyDone(order.check), Kind.NOT_FOUND, Refusal.CHECK_UNKNOWN)


def test_waiting_acquires_are_bounded() -> None:
    h = ready(snapshot(stored("ab")), limits=Limits(max_parked=1))
    ask(h, "ab")
    event = AcquireRequested(A, name(5), 1, chain("ab"), 0, 2 * TOKENS, 5.0)
    h.refused(event, Kind.RESOURCE_EXHAUSTED, Refusal.TOO_MANY)


def test_blocks_without_a_digest_do_not_come_back() -> None:
    h = stored("ab")
    h.commit(h.reserve("abcd"))
    after = restored(snapshot(h))
    assert after.all[-1] == SnapshotLoaded(1, 2)
    assert after.used == 2


def test_the_order_of_use_survives() -> None:
    before = stored("ab", "xy")
    before.hit("ab")
    h = ready(snapshot(before))
    for letter in "0123456789":
        h.store(letter * 6)
    h.store("zz")
    tree = h.planner.state.namespaces[1].tree
    assert tree.walk(chain("xy")).blocks < tree.walk(chain("ab")).blocks


def test_an_open_reservation_is_no_clean_stop() -> None:
    h = stored("ab")
    h.reserve("xy")
    h.refused(SnapshotRequested(), Kind.FAILED_PRECONDITION, Refusal.SNAPSHOT_NOT_CLEAN)


def test_only_before_anything_else() -> None:
    h = stored("ab")
    h.refused(SnapshotRestored(snapshot(h)), Kind.FAILED_PRECONDITION, Refusal.SNAPSHOT_NOT_CLEAN)


def broken(taken: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Snapshots that cannot be this pool's, by what is wrong with them."""
    cases: dict[str, dict[str, Any]] = {"empty": {}}

    def case(label: str) -> dict[str, Any]:
        cases[label] = copy.deepcopy(taken)
        return cases[label]

    case("version")["version"] = 99
    case("pool")["pool"]["size_bytes"] += GRANULE
    case("generation")["generation"] = "x"
    case("namespaces")["namespaces"] = 5
    case("twice")["namespaces"] *= 2
    case("fingerprint")["namespaces"][0]["fingerprint"] = b"short"
    case("kind")["namespaces"][0]["kind"] = "odd"
    case("spec")["namespaces"][0]["block_tokens"] = 0
    case("parent")["namespaces"][0]["nodes"][0][0] = 7
    case("edge")["namespaces"][0]["nodes"][0][1] = b"torn"
    case("touched")["namespaces"][0]["nodes"][0][2] = b""
    case("parts")["namespaces"][0]["nodes"][0][3] = []
    case("columns")["namespaces"][0]["nodes"][0][3][0][0] = b"1234"
    nodes = case("same slot")["namespaces"][0]["nodes"]
    nodes.append([-1, chain("zz"), nodes[0][2], nodes[0][3]])
    nodes = case("same key")["namespaces"][0]["nodes"]
    nodes.append(copy.deepcopy(nodes[0]))
    part = case("outside")["namespaces"][0]["nodes"][0][3][0]
    part[0] = np.array([1 << 20, 1], "<u4").tobytes()
    part = case("slot twice")["namespaces"][0]["nodes"][0][3][0]
    part[0] = np.array([1, 1], "<u4").tobytes()
    return cases


@pytest.mark.parametrize("label", sorted(broken({"pool": {"size_bytes": 0}, "namespaces": [
    {"nodes": [[0, b"", b"", [[b"", b"", b""]]]]}]})))  # fmt: skip
def test_a_snapshot_that_makes_no_sense_leaves_nothing_behind(label: str) -> None:
    bad = broken(snapshot(stored("ab")))[label]
    h = restored(bad)
    (refusal,) = [command for command in h.all if isinstance(command, Refused)]
    assert (refusal.kind, refusal.reason) == (Kind.DATA_LOSS, Refusal.SNAPSHOT_INVALID)
    assert not h.planner.state.namespaces
    assert h.used == 0
