"""`prefixcache clear`: drops what was named, only after a yes."""

from __future__ import annotations

import json

from prefixcache.v1 import admin_pb2
from tests.unit.cli.conftest import FINGERPRINT, OTHER_FINGERPRINT, FakeAdmin, Run, a_namespace, some_stats


def evicted(admin: FakeAdmin) -> list[bytes]:
    """Fingerprints that were asked to go."""
    return [item.fingerprint for item in admin.requests if isinstance(item, admin_pb2.EvictRequest)]


def test_clears_the_only_namespace(admin: FakeAdmin, run: Run) -> None:
    admin.evicted = admin_pb2.EvictResponse(blocks=8, kept=2)
    told = json.loads(run("clear", "--yes", "--json").stdout)
    assert (told["cleared_blocks"], told["kept_blocks"]) == (8, 2)
    assert told["namespaces"] == [{"label": "SmolLM2", "fingerprint": FINGERPRINT.hex()}]
    assert evicted(admin) == [FINGERPRINT]
    shown = run("clear", "--yes").stdout
    assert "dropped 8 blocks of namespace SmolLM2" in shown
    assert "2 stay because they are leased" in shown


def test_all_and_one_of_several(admin: FakeAdmin, run: Run) -> None:
    admin.stats = some_stats(a_namespace("a"), a_namespace("b", OTHER_FINGERPRINT))
    assert run("clear", "--all", "--yes").exit_code == 0
    assert run("clear", "--namespace", "b", "--yes").exit_code == 0
    assert evicted(admin) == [b"", OTHER_FINGERPRINT]
    assert run("clear", "--yes").exit_code == 2
    assert run("clear", "--yes", "--all", "--namespace", "b").exit_code == 2
    assert len(evicted(admin)) == 2


def test_a_script_must_say_yes(admin: FakeAdmin, run: Run) -> None:
    result = run("clear", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["hint"] == "add --yes"
    assert evicted(admin) == []


def test_an_empty_daemon_is_clear_already(admin: FakeAdmin, run: Run) -> None:
    del admin.stats.namespaces[:]
    told = json.loads(run("clear", "--all", "--yes", "--json").stdout)
    assert told == {"cleared_blocks": 0, "kept_blocks": 0, "namespaces": []}
