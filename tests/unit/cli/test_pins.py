"""`pin`, `unpin`, `pins`, `prefetch`, `prefixes`, `evict`, `drain`, `flush`: what is asked, and what is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixcache.identity import block_keys, root_key
from prefixcache.v1 import admin_pb2, common_pb2
from tests.unit.cli.conftest import FINGERPRINT, OTHER_FINGERPRINT, FakeAdmin, Run, a_namespace, some_stats

TOKENS = list(range(1000, 1200))
KEYS = block_keys(root_key(FINGERPRINT), np.array(TOKENS, "<u4").tobytes(), 64)
PIN = bytes(range(16))


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(TOKENS))
    return str(path)


def told(run: Run, *line: str) -> dict[str, Any]:
    result = run(*line, "--json")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def some_pins() -> admin_pb2.ListPinsResponse:
    first = admin_pb2.PinDescription(
        pin=PIN, fingerprint=FINGERPRINT, label="system prompt v3", tokens=64, wanted_tokens=192, host_tokens=64,
        disk_tokens=64, size_bytes=3 << 20, short_key="0011223344556677",
    )  # fmt: skip
    second = admin_pb2.PinDescription(pin=b"\xff" * 16, fingerprint=FINGERPRINT, ttl_ms=7_200_000, size_bytes=1 << 20)
    return admin_pb2.ListPinsResponse(pins=[first, second], pinned_bytes=4 << 20, budget_bytes=16 << 20)


def test_pin_sends_keys_label_and_time(admin: FakeAdmin, run: Run, prompt: str) -> None:
    admin.pinned = admin_pb2.PinResponse(pin=PIN, tokens=64, wanted_tokens=192, size_bytes=3 << 20, ttl_ms=43_200_000)
    answer = told(run, "pin", prompt, "--label", "system prompt v3", "--ttl", "12h")
    request = admin.requests[-1]
    assert isinstance(request, admin_pb2.PinRequest)
    assert (request.fingerprint, request.keys, request.label) == (FINGERPRINT, KEYS, "system prompt v3")
    assert (request.ttl_ms, request.forever) == (43_200_000, False)
    assert (answer["pin"], answer["tokens"], answer["wanted_tokens"]) == (PIN.hex(), 64, 192)
    assert (answer["ttl_s"], answer["size_bytes"], answer["prompt_tokens"]) == (43_200.0, 3 << 20, 200)
    shown = run("pin", prompt, "--label", "v[red]3", "--ttl", "12h").stdout
    assert "pinned 'v[red]3' for 12 h: 64 tokens held, 128 more as they are stored (3.0 MiB)" in shown.replace(
        "\n", " "
    )


def test_pin_of_the_first_tokens_and_for_ever(admin: FakeAdmin, run: Run, prompt: str) -> None:
    admin.pinned = admin_pb2.PinResponse(pin=PIN, tokens=128, wanted_tokens=128, size_bytes=2 << 20)
    assert told(run, "pin", prompt, "--tokens", "150", "--forever")["ttl_s"] is None
    request = admin.requests[-1]
    assert isinstance(request, admin_pb2.PinRequest)
    assert (request.keys, request.forever, request.ttl_ms) == (KEYS[:64], True, 0)


@pytest.mark.parametrize(
    "extra",
    [["--ttl", "1h", "--forever"], ["--ttl", "soon"], ["--ttl", "0s"], ["--tokens", "201"]],
)
def test_what_cannot_be_meant_is_a_mistake_of_the_command_line(
    admin: FakeAdmin, run: Run, prompt: str, extra: list[str]
) -> None:
    assert run("pin", prompt, *extra).exit_code == 2


def test_a_pin_that_does_not_fit_shows_the_daemon_s_words(admin: FakeAdmin, run: Run, prompt: str) -> None:
    admin.pinned = admin_pb2.PinResponse()

    def refuse(request: object, context: Any) -> None:
        admin.requests.append(request)
        if isinstance(request, admin_pb2.PinRequest):
            from tests.unit.cli.conftest import _refuse

            _refuse(context, common_pb2.Error(code=8, reason=common_pb2.REASON_PIN_BUDGET, message="takes too much"))

    admin._enter = refuse  # type: ignore[method-assign]  # a fault that only this test makes
    result = run("pin", prompt, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"] == {"message": "takes too much", "hint": "", "reason": "pin_budget"}


def test_pins_are_listed_with_what_they_take(admin: FakeAdmin, run: Run) -> None:
    admin.pins = some_pins()
    answer = told(run, "pins")
    assert (answer["pinned_bytes"], answer["budget_bytes"]) == (4 << 20, 16 << 20)
    assert [(pin["label"], pin["ttl_s"]) for pin in answer["pins"]] == [("system prompt v3", None), ("", 7200.0)]
    assert answer["pins"][0] | {"pin": ""} == {
        "pin": "", "label": "system prompt v3", "fingerprint": FINGERPRINT.hex(), "short_key": "0011223344556677",
        "tokens": 64, "wanted_tokens": 192, "host_tokens": 64, "disk_tokens": 64, "size_bytes": 3 << 20, "ttl_s": None,
    }  # fmt: skip
    shown = run("pins").stdout
    assert "2 pins take 4.0 MiB of 16.0 MiB (25.0%)" in shown
    assert "system prompt v3" in shown
    row = next(line for line in shown.splitlines() if "00010203" in line)
    assert row.split()[-7:] == ["00010203", "64", "128", "64", "3.0", "MiB", "never"]
    assert "never" in shown
    assert "2 h" in shown
    admin.pins = admin_pb2.ListPinsResponse(budget_bytes=1 << 20)
    assert run("pins").stdout.strip() == "0 pins take 0 B of 1.0 MiB (0.0%)"


def test_unpin_finds_a_pin_by_label_or_id(admin: FakeAdmin, run: Run) -> None:
    admin.pins = some_pins()
    for name, pin in (("system prompt v3", PIN), ("FFFF", b"\xff" * 16)):
        assert told(run, "unpin", name)["unpinned"] == pin.hex()
        request = admin.requests[-1]
        assert isinstance(request, admin_pb2.UnpinRequest)
        assert request.pin == pin
    assert json.loads(run("unpin", "nobody", "--json").stdout)["error"]["reason"] == "pin_unknown"
    admin.pins.pins[1].label = "system prompt v3"
    assert run("unpin", "system prompt v3").exit_code == 2
    assert "unpinned 'system prompt v3'" not in run("unpin", "").stdout


def test_prefetch_tells_what_is_there_and_what_comes(admin: FakeAdmin, run: Run, prompt: str) -> None:
    admin.prefetched = admin_pb2.PrefetchResponse(tokens=128, ready_tokens=64, stop=common_pb2.REASON_LIMIT)
    answer = told(run, "prefetch", prompt)
    assert (answer["ready_tokens"], answer["coming_tokens"], answer["stop"]) == (64, 128, "limit")
    request = admin.requests[-1]
    assert isinstance(request, admin_pb2.PrefetchRequest)
    assert (request.fingerprint, request.keys) == (FINGERPRINT, KEYS)
    assert "64 tokens in memory, 128 are coming; not all of it: limit" in run("prefetch", prompt).stdout


def test_prefixes_are_asked_for_by_page_and_order(admin: FakeAdmin, run: Run) -> None:
    first = admin_pb2.PrefixDescription(
        fingerprint=FINGERPRINT, short_key="0011223344556677", tokens=12_345_678, hit_tokens=123, label="SmolLM2",
        hits=3, blocks=2, size_bytes=2 << 20, tiers=common_pb2.TierTokens(host=64, disk=64), idle_s=90_000.0,
        pins=["system prompt v3"],
    )  # fmt: skip
    admin.prefixes = admin_pb2.ListPrefixesResponse(prefixes=[first], next_offset=7, truncated=True)
    admin.stats = some_stats(a_namespace("a"), a_namespace("b", OTHER_FINGERPRINT))
    answer = told(run, "prefixes", "--limit", "5", "--offset", "2", "--largest", "--namespace", "b")
    request = admin.requests[-1]
    assert isinstance(request, admin_pb2.ListPrefixesRequest)
    assert (request.limit, request.offset, request.fingerprint) == (5, 2, OTHER_FINGERPRINT)
    assert request.order == admin_pb2.PREFIX_ORDER_LARGEST
    assert (answer["next_offset"], answer["truncated"]) == (7, True)
    assert answer["prefixes"][0]["tiers"] == {"gpu": 0, "host": 64, "disk": 64, "peer": 0}
    assert answer["prefixes"][0]["pins"] == ["system prompt v3"]
    shown = run("prefixes").stdout
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    about = "00112233: 64 tokens are on disk only, pinned as 'system prompt v3'"
    for word in ("12.3M", "25 h", about, "more: --offset 7"):
        assert word in shown


def test_evict_takes_a_prompt_s_own_tail_gently_or_a_subtree_by_force(admin: FakeAdmin, run: Run, prompt: str) -> None:
    admin.evicted = admin_pb2.EvictResponse(blocks=3, kept=1)
    assert told(run, "evict", prompt) == {
        "namespace": {"label": "SmolLM2", "fingerprint": FINGERPRINT.hex()}, "evicted_blocks": 3, "kept_blocks": 1,
    }  # fmt: skip
    first = admin.requests[-1]
    assert isinstance(first, admin_pb2.EvictRequest)
    assert (first.keys, first.own_tail, first.gently) == (KEYS, True, True)
    assert "evicted 3 blocks of SmolLM2" in run("evict", prompt, "--subtree", "--from-token", "70", "--force").stdout
    second = admin.requests[-1]
    assert isinstance(second, admin_pb2.EvictRequest)
    assert (second.keys, second.own_tail, second.gently) == (KEYS[:64], False, False)
    assert run("evict", prompt, "--from-token", "70").exit_code == 2


def test_drain_and_flush(admin: FakeAdmin, run: Run) -> None:
    admin.drained = admin_pb2.DrainResponse(leases=2, reservations=1)
    assert told(run, "drain", "--timeout", "5s") == {"leases": 2, "reservations": 1, "shutdown": False}
    request = admin.requests[-1]
    assert isinstance(request, admin_pb2.DrainRequest)
    assert (request.timeout_ms, request.shutdown) == (5_000, False)
    assert "2 leases and 1 reservations still run" in run("drain").stdout
    admin.drained = admin_pb2.DrainResponse()
    assert "drained; the daemon ends now" in run("drain", "--shutdown").stdout
    assert run("drain", "--timeout", "soon").exit_code == 2
    assert told(run, "flush") == {"written_blocks": 7, "left_blocks": 3}
    assert "wrote 7 blocks; 3 are in memory only" in run("flush").stdout
