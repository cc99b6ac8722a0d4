"""Which of two leaves goes, the one on disk or the other, by how fast the disk is."""

from __future__ import annotations

import pytest

from prefixcache.core.events import DiskChanged
from prefixcache.core.policy.tiered import TieredLeaves
from prefixcache.core.reasons import Miss
from prefixcache.core.spec import DiskSpec
from prefixcache.core.table import HIGH, LOW, NORMAL
from tests.unit.core.disk_harness import DiskHarness
from tests.unit.core.harness import GRANULE, TOKENS

BLOCK_S = 1.0  # what the disk takes for one


def one_cold(computes_s: float, *, reads: bool = True) -> DiskHarness:
    """A worker that computes a block in `computes_s` has asked for one that is on disk only."""
    spec = DiskSpec(1 << 20, read_bytes_per_s=GRANULE / BLOCK_S, read_latency_s=0.0, reserve_share=0.0)
    harness = DiskHarness(8, disk=spec)
    harness.store("a")
    harness.flush()
    harness.store("zyxwvuts")
    harness.clear("z")
    harness.send(DiskChanged(reads, True, "" if reads else "io_error"))
    acquired = harness.acquire("a", deadline_s=0.5, recompute_s_per_token=computes_s / TOKENS)
    assert acquired.stop is (Miss.DEADLINE if reads else Miss.TIER_OFF)
    return harness


def what_left(harness: DiskHarness, priorities: tuple[int, int] = (NORMAL, NORMAL)) -> str:
    """Two blocks must go: of a prompt in memory only, or of one that was used after it and is on disk as well."""
    harness.store("ef", priority=priorities[0])
    harness.flush()
    harness.store("mn", priority=priorities[1])
    harness.store("opqr")
    assert harness.acquire("opqr").ready_blocks == 4, "leased, so that they stay"
    assert harness.hit("ef") == 2
    harness.store("gh")
    gone = [letters for letters in ("ef", "mn") if harness.acquire(letters).ready_blocks < 2]
    assert len(gone) == 1
    return gone[0]


def test_what_is_on_disk_goes_first_until_something_says_that_it_is_slow() -> None:
    assert what_left(DiskHarness(8)) == "ef"


@pytest.mark.parametrize(("computes_s", "leaves"), [(2.0, "ef"), (1.06, "ef"), (1.04, "mn"), (0.5, "mn"), (0.0, "ef")])
def test_what_is_on_disk_goes_first_where_it_comes_back_faster_than_it_is_computed(
    computes_s: float, leaves: str
) -> None:
    assert what_left(one_cold(computes_s)) == leaves


def test_what_is_on_disk_does_not_go_first_while_it_cannot_be_read() -> None:
    assert what_left(one_cold(2.0, reads=False)) == "mn"


@pytest.mark.parametrize(("clean", "dirty", "leaves"), [(1.0, 2.0, "ef"), (2.0, 1.0, "mn"), (1.0, 1.0, "mn")])
def test_of_two_victims_the_one_worth_less_goes_where_the_disk_is_slow(
    monkeypatch: pytest.MonkeyPatch, clean: float, dirty: float, leaves: str
) -> None:
    harness = one_cold(0.5)
    policy = harness.planner.state.namespaces[1].policy
    assert isinstance(policy, TieredLeaves)
    monkeypatch.setattr(policy.clean, "victim_worth", lambda: clean)
    monkeypatch.setattr(policy.dirty, "victim_worth", lambda: dirty)
    assert what_left(harness) == leaves


@pytest.mark.parametrize(("clean", "dirty", "leaves"), [(LOW, NORMAL, "ef"), (NORMAL, HIGH, "ef"), (HIGH, LOW, "mn")])
def test_of_two_victims_the_one_of_lower_priority_goes_where_the_disk_is_slow(
    clean: int, dirty: int, leaves: str
) -> None:
    assert what_left(one_cold(0.5), (clean, dirty)) == leaves
    assert what_left(DiskHarness(8), (clean, dirty)) == "ef"
