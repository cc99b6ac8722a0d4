"""`prefixcache pin`, `unpin`, `pins` and `prefetch`: what of a prompt stays in memory, or comes there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefixcache.cli.daemon import connect, reason_name
from prefixcache.cli.errors import CliError, bad_usage
from prefixcache.cli.output import Settings, count, share, size, span, table
from prefixcache.cli.prompts import Prompt
from prefixcache.server import units
from prefixcache.v1 import admin_pb2

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHORT_ID = 8


def pin(settings: Settings, prompt: Prompt, label: str, ttl: str | None, *, forever: bool) -> None:
    """Pin and tell what is held and what it takes."""
    if forever and ttl is not None:
        raise bad_usage("--ttl and --forever exclude each other", "give one of them")
    with connect(settings.address) as daemon:
        keys = prompt.keys_at(daemon)
        request = admin_pb2.PinRequest(
            fingerprint=keys.fingerprint, keys=keys.packed, label=label, ttl_ms=_milliseconds(ttl), forever=forever
        )
        answer = daemon.pin(request)
    told = {
        "pin": answer.pin.hex(),
        "namespace": keys.named(),
        "label": label,
        "tokens": answer.tokens,
        "wanted_tokens": answer.wanted_tokens,
        "prompt_tokens": keys.prompt_tokens,
        "size_bytes": answer.size_bytes,
        "ttl_s": answer.ttl_ms / 1000 if answer.ttl_ms else None,
    }
    settings.emit(told, lambda: _draw_pinned(told))


def unpin(settings: Settings, name: str) -> None:
    """End the pin that `name` means: its label, or the beginning of its id."""
    with connect(settings.address) as daemon:
        chosen = _choose(daemon.list_pins(), name)
        daemon.unpin(chosen.pin)
    told = {"unpinned": chosen.pin.hex(), "label": chosen.label, "tokens": chosen.tokens}
    settings.emit(told, lambda: [f"unpinned {_title(chosen.label, chosen.pin)} ({chosen.tokens:,} tokens)"])


def pins(settings: Settings) -> None:
    """List them."""
    with connect(settings.address) as daemon:
        answer = daemon.list_pins()
    told = {
        "pinned_bytes": answer.pinned_bytes,
        "budget_bytes": answer.budget_bytes,
        "pins": [_describe(each) for each in answer.pins],
    }
    settings.emit(told, lambda: _draw_pins(told))


def prefetch(settings: Settings, prompt: Prompt) -> None:
    """Begin to bring a prompt to memory and tell what is there and what comes."""
    with connect(settings.address) as daemon:
        keys = prompt.keys_at(daemon)
        answer = daemon.prefetch(keys.fingerprint, keys.packed)
    told = {
        "namespace": keys.named(),
        "prompt_tokens": keys.prompt_tokens,
        "ready_tokens": answer.ready_tokens,
        "coming_tokens": answer.tokens,
        "stop": reason_name(answer.stop) if answer.stop else None,
    }
    why = f"; not all of it: {told['stop']}" if told["stop"] else ""
    settings.emit(told, lambda: [f"{answer.ready_tokens:,} tokens in memory, {answer.tokens:,} are coming{why}"])


def _milliseconds(ttl: str | None) -> int:
    if ttl is None:
        return 0
    try:
        milliseconds = int(units.parse_duration(ttl) * 1000)
    except ValueError as error:
        raise bad_usage(f"--ttl: {error}") from error
    if milliseconds <= 0:
        raise bad_usage("--ttl must be above 0", "give a time such as 12h, or --forever")
    return milliseconds


def _choose(listed: admin_pb2.ListPinsResponse, name: str) -> admin_pb2.PinDescription:
    found = [each for each in listed.pins if name and (each.label == name or each.pin.hex().startswith(name.lower()))]
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(each.pin.hex()[:_SHORT_ID] for each in found)
        raise bad_usage(f"{name!r} names several pins: {ids}", "give the beginning of an id")
    raise CliError(f"no pin is called {name!r}", "`prefixcache pins` lists them", reason="pin_unknown")


def _describe(pin: admin_pb2.PinDescription) -> dict[str, Any]:
    return {
        "pin": pin.pin.hex(),
        "label": pin.label,
        "fingerprint": pin.fingerprint.hex(),
        "short_key": pin.short_key,
        "tokens": pin.tokens,
        "wanted_tokens": pin.wanted_tokens,
        "host_tokens": pin.host_tokens,
        "disk_tokens": pin.disk_tokens,
        "size_bytes": pin.size_bytes,
        "ttl_s": pin.ttl_ms / 1000 if pin.ttl_ms else None,
    }


def _draw_pinned(told: dict[str, Any]) -> list[RenderableType]:
    from rich.markup import escape

    later = told["wanted_tokens"] - told["tokens"]
    rest = f", {later:,} more as they are stored" if later else ""
    until = "for ever" if told["ttl_s"] is None else f"for {span(told['ttl_s'])}"
    title = escape(_title(told["label"], bytes.fromhex(told["pin"])))
    return [f"pinned {title} {until}: {told['tokens']:,} tokens held{rest} ({size(told['size_bytes'])})"]


def _draw_pins(told: dict[str, Any]) -> list[RenderableType]:
    from rich.markup import escape

    used, budget = told["pinned_bytes"], told["budget_bytes"]
    head = f"{len(told['pins'])} pins take {size(used)} of {size(budget)} ({share(used, budget)})"
    if not told["pins"]:
        return [head]
    drawn = table("label", "pin", "held", "to come", "on disk", "bytes", "ends in")
    for each in told["pins"]:
        ends = "never" if each["ttl_s"] is None else span(each["ttl_s"])
        held, later = each["tokens"], each["wanted_tokens"] - each["tokens"]
        counts = [count(held), count(later), count(each["disk_tokens"]), size(each["size_bytes"])]
        drawn.add_row(escape(each["label"]) or "-", each["pin"][:_SHORT_ID], *counts, ends)
    cold = sum(each["tokens"] - each["host_tokens"] for each in told["pins"])
    return [head, drawn, f"{count(cold)} tokens are on disk only yet"] if cold else [head, drawn]


def _title(label: str, pin: bytes) -> str:
    return f"{label!r}" if label else pin.hex()[:_SHORT_ID]
