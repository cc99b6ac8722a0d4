"""`watch` and `lookup`: what is asked, what is told, how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixcache.identity import block_keys, root_key
from prefixcache.v1 import admin_pb2 as pb
from prefixcache.v1 import cache_pb2, common_pb2
from tests.unit.cli.conftest import FINGERPRINT, OTHER_FINGERPRINT, FakeAdmin, Run, a_namespace, some_stats

TOKENS = list(range(1000, 1200))
KEYS = block_keys(root_key(FINGERPRINT), np.array(TOKENS, "<u4").tobytes(), 64)


def blocks(kind: pb.EventKind.ValueType, sequence: int, **fields: Any) -> pb.WatchEventsResponse:
    fields.setdefault("keys", KEYS)
    fields.setdefault("tier", common_pb2.TIER_HOST)
    return pb.WatchEventsResponse(kind=kind, sequence=sequence, fingerprint=FINGERPRINT, key_bytes=32, **fields)


NAME = pb.WatchEventsResponse(
    kind=pb.EVENT_KIND_NAMESPACE, fingerprint=FINGERPRINT, label="SmolLM2", block_tokens=64
)  # fmt: skip


def lines(run: Run, *line: str) -> list[dict[str, Any]]:
    result = run("watch", *line, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(each) for each in result.stdout.splitlines()]


def test_a_line_an_event_and_a_summary(admin: FakeAdmin, run: Run) -> None:
    admin.events = [
        NAME,
        blocks(pb.EVENT_KIND_STORED, 1),
        blocks(pb.EVENT_KIND_MOVED, 2, keys=KEYS[32:], first_block=1, tier=common_pb2.TIER_DISK),
        blocks(pb.EVENT_KIND_REMOVED, 3, keys=KEYS[64:], first_block=2, tier=common_pb2.TIER_DISK, parent=KEYS[32:64]),
    ]
    *told, last = lines(run, "--count", "3")
    assert [(each["kind"], each["tier"], each["blocks"], each["tokens"]) for each in told] == [
        ("stored", "host", 3, 192), ("moved", "disk", 2, 128), ("removed", "disk", 1, 64),
    ]  # fmt: skip
    assert told[2]["keys"] == [KEYS[64:].hex()]
    assert told[2]["parent"] == KEYS[32:64].hex()
    assert told[0]["namespace"] == {"label": "SmolLM2", "fingerprint": FINGERPRINT.hex()}
    summary = last["summary"]
    assert (summary["events"], summary["gaps"], summary["lost_events"]) == (3, 0, 0)
    assert {"kind": "stored", "tier": "host", "blocks": 3, "tokens": 192} in summary["news"]
    shown = run("watch", "--count", "3").stdout
    assert "stored    host       192 tokens" in shown
    assert "block 2 of SmolLM2" in shown
    assert "3 events in" in shown


def test_filters_and_a_namespace(admin: FakeAdmin, run: Run) -> None:
    admin.stats = some_stats(a_namespace(), a_namespace("other", OTHER_FINGERPRINT))
    admin.events = [
        NAME,
        blocks(pb.EVENT_KIND_STORED, 1),
        blocks(pb.EVENT_KIND_REMOVED, 2, tier=common_pb2.TIER_GPU, pool=1),
        blocks(pb.EVENT_KIND_REMOVED, 3),
    ]
    told = lines(run, "--namespace", "SmolLM2", "--kind", "removed", "--tier", "host", "--count", "1", "--snapshot")
    assert [each.get("sequence") for each in told[:-1]] == [3]
    request = admin.requests[-1]
    assert isinstance(request, pb.WatchEventsRequest)
    assert (list(request.fingerprints), request.snapshot) == ([FINGERPRINT], True)


def test_a_gap_is_shown_whatever_was_asked_for(admin: FakeAdmin, run: Run) -> None:
    admin.events = [pb.WatchEventsResponse(kind=pb.EVENT_KIND_GAP, sequence=9, lost=4), NAME, blocks(3, 10, keys=b"")]
    told = lines(run, "--kind", "cleared", "--count", "1")
    assert (told[0]["kind"], told[0]["lost_events"]) == ("gap", 4)
    assert told[-1]["summary"]["lost_events"] == 4
    assert "4 events were lost" in run("watch", "--count", "1").stdout


def test_it_ends_by_itself_after_a_time(admin: FakeAdmin, run: Run) -> None:
    (told,) = lines(run, "--for", "100ms")
    assert told["summary"]["events"] == 0
    assert "nothing happened" in run("watch", "--for", "100ms").stdout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--kind", "store"), "--kind does not know store"),
        (("--tier", "ram"), "--tier does not know ram"),
        (("--for", "soon"), "--for"),
    ],
)
def test_words_that_are_none(admin: FakeAdmin, run: Run, line: tuple[str, ...], said: str) -> None:
    result = run("watch", *line)
    assert result.exit_code == 2
    assert said in result.stderr


def test_no_daemon(run: Run, tmp_path: Path) -> None:
    result = run("watch", "--address", f"unix://{tmp_path}/none.sock", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["reason"] == "server_unavailable"


def test_a_daemon_that_does_not_know_the_call(admin: FakeAdmin, run: Run) -> None:
    admin.watch_refusal = common_pb2.Error(code=12, reason=common_pb2.REASON_UNIMPLEMENTED, message="not yet")
    result = run("watch", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout.splitlines()[-1])["error"]["reason"] == "unimplemented"


def test_lookup_tells_nodes_and_tiers(admin: FakeAdmin, run: Run, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(TOKENS))
    admin.looked_up = cache_pb2.LookupResponse(
        nodes=[
            cache_pb2.NodeMatch(tokens=192, tiers=common_pb2.TierTokens(host=128, disk=64), load_ms=25),
            cache_pb2.NodeMatch(node="other", tokens=64, tiers=common_pb2.TierTokens(host=64)),
        ],
        stop=common_pb2.REASON_PARTIAL_BLOCK,
    )
    result = run("lookup", str(prompt), "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["nodes"] == [
        {"node": "", "tokens": 192, "tiers": {"gpu": 0, "host": 128, "disk": 64, "peer": 0}, "load_s": 0.025},
        {"node": "other", "tokens": 64, "tiers": {"gpu": 0, "host": 64, "disk": 0, "peer": 0}, "load_s": 0.0},
    ]
    assert (told["prompt_tokens"], told["block_tokens"], told["stop"]) == (200, 64, "partial_block")
    request = admin.requests[-1]
    assert isinstance(request, cache_pb2.LookupRequest)
    assert (request.fingerprint, request.keys) == (FINGERPRINT, KEYS)
    shown = run("lookup", str(prompt)).stdout
    assert "96.0%" in shown
    assert "25 ms" in shown
