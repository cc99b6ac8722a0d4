"""Interleaving over memory nodes: asked for where there are several, never in the way where there are not."""

import platform
from pathlib import Path

import pytest

from prefixcache_offload import numa
from prefixcache_offload.pool import HostPool

MIB = 1 << 20


def policy_of(address: int) -> str:
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        start, policy = line.split()[:2]
        if int(start, 16) == address:
            return policy
    return "none"


@pytest.mark.parametrize(("text", "nodes"), [("0", [0]), ("0-3", [0, 1, 2, 3]), ("0,2-3,70", [0, 2, 3, 70]), ("", [])])
def test_nodes_are_read_from_the_process_status(tmp_path: Path, text: str, nodes: list[int]) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"Name: x\nMems_allowed_list:\t{text}\nother: 1\n")
    assert numa.allowed_nodes(tmp_path) == nodes
    assert numa.allowed_nodes(tmp_path / "nowhere") == []


def test_the_kernel_takes_the_policy_or_says_why_not() -> None:
    pool = HostPool.create(1, MIB, MIB)
    reason = numa.interleave(pool.mapping, [0])
    if reason:
        assert "refused" in reason or "not known" in reason
    elif Path("/proc/self/numa_maps").exists():
        assert policy_of(pool.mapping.address).startswith("interleave")
    assert "refused" in numa.interleave(pool.mapping, [900])
    pool.data[:] = 1
    assert int(pool.data.sum()) == MIB
    pool.close()


def test_one_node_or_an_unknown_machine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool.create(1, MIB, MIB)
    monkeypatch.setattr(numa, "allowed_nodes", lambda: [0])
    assert "one memory node" in numa.interleave(pool.mapping)
    monkeypatch.setattr(numa, "allowed_nodes", lambda: [0, 1])
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    assert "vax" in numa.interleave(pool.mapping)
    pool.close()
