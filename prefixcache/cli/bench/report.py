"""The benchmark's results as tables: every figure beside its limit and its target."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# What issue-level targets say, so that a table can be read without them at hand.
GRPC_TARGETS: Final = {2048: 1.5, 32768: 2.0}  # times the bare echo
LOCAL_TARGETS: Final = {2048: 1.4, 32768: 1.3}  # times hashing, then the bare echo
COPY_TARGET: Final = 0.85
DEMOTING_TARGET: Final = 2.0  # times the idle figure
FIRST_BYTES_TARGET_MS: Final = 2.0  # beyond what the disk takes
RESTART_TARGET_S: Final = 1.0  # per 100,000 blocks
DISK_TARGETS: Final = {"read": 0.85, "write": 0.8}  # of the limit
CODEC_TARGETS: Final = {"int8": 0.5}  # of the tokens a second of raw
KL_TARGETS: Final = {"int8": 1e-4, "int4": 1e-2}  # nats, mean of the next token
MATCH_TARGETS: Final = {2048: 5.0, 32768: 28.0, 131072: 115.0}  # us where startswith takes STARTSWITH_US
STARTSWITH_US: Final = 3.5
CHAT_PATH_TARGET_US: Final = 50.0
NO_REUSE_TARGET: Final = 0.98
CPU_SHARE_TARGET: Final = 0.02


def draw(told: dict[str, Any]) -> list[RenderableType]:
    """One table per section that ran."""
    drawers: dict[str, Callable[[Any], RenderableType]] = {
        "acquire": _acquire,
        "load": lambda result: _copy("load", result),
        "store": lambda result: _copy("store", result),
        "index": _index,
        "match": _match,
        "chat_path_us": lambda us: (
            f"chat path of 63 nodes, 32k tokens: {us:.1f} us (target {CHAT_PATH_TARGET_US:.0f})\n"
        ),
        "overhead": _overhead,
        "disk": _disk,
        "restart": _restart,
        "codec": _codec,
        "skipped": lambda reasons: "\n".join(f"skipped {name}: {reason}" for name, reason in reasons.items()),
    }
    return [drawers[name](result) for name, result in told.items() if name in drawers]


def _acquire(rows: list[dict[str, Any]]) -> Table:
    table = _table("acquire: hash + rpc + match, all hit", "tokens", "p50", "echo", "hash + echo", "ratio", "target")
    for row in rows:
        grpc = row["transport"] == "grpc"
        ratio = row["p50_us"] / row["echo_p50_us" if grpc else "hash_echo_p50_us"]
        target = (GRPC_TARGETS if grpc else LOCAL_TARGETS).get(row["tokens"])
        times = [f"{row[name]:,.0f} us" for name in ("p50_us", "echo_p50_us", "hash_echo_p50_us")]
        against = "echo" if grpc else "hash + echo"
        shown = _judged(ratio, target, f"{ratio:.2f}x {against}", lower=True)
        table.add_row(row["transport"], f"{row['tokens']:,}", *times, shown, f"{target}x" if target else "-")
    return table


def _copy(name: str, row: dict[str, Any]) -> Table:
    table = _table(f"{name}: one request through the daemon", "daemon", "numpy.copyto", "ratio", "target")
    ratio = row["gb_per_s"] / row["copy_gb_per_s"]
    table.add_row(
        "GB/s",
        f"{row['gb_per_s']:.2f}",
        f"{row['copy_gb_per_s']:.2f}",
        _judged(ratio, COPY_TARGET, f"{ratio:.2f}", lower=False),
        f"{COPY_TARGET}",
    )
    return table


def _disk(row: dict[str, Any]) -> Table:
    table = _table("disk: blocks of 2 MiB", "GB/s", row["limit"], "ratio", "target")
    for what, target in DISK_TARGETS.items():
        rate, limit = row[f"{what}_gb_per_s"], row[f"limit_{what}_gb_per_s"]
        shown = _judged(rate / limit, target, f"{rate / limit:.2f}", lower=False)
        table.add_row(what, f"{rate:.2f}", f"{limit:.2f}", shown, f"{target}")
    _add_beside(table, row)
    plain = row["plain_read_ms"]
    cases: list[tuple[str, float, float | None]] = [
        ("first bytes of a prompt on disk readable, plain read", row["first_bytes_ms"], FIRST_BYTES_TARGET_MS),
        ("its first block in the worker's tensor, plain read", row["first_block_ms"], None),
    ]
    for text, first, limit_ms in cases:
        shown = _judged(first - plain, limit_ms, f"+{first - plain:.1f} ms", lower=True)
        asked = f"+{limit_ms:.0f} ms" if limit_ms else "-"
        table.add_row(text, f"{first:.1f} ms", f"{plain:.1f} ms", shown, asked)
    return table


def _add_beside(table: Table, row: dict[str, Any]) -> None:
    """99th percentiles of a request beside other work, each with the same alone."""
    idle = row["acquire_p99_idle_us"]
    cases = [
        (f"{row['demotion_gb_per_s']:.2f} GB/s being demoted", "demotion", DEMOTING_TARGET),
        ("another process storing, no disk", "storing", None),
        (f"another process storing, {row['demoted_gb_per_s']:.2f} GB/s being demoted", "demoting", DEMOTING_TARGET),
    ]
    for text, name, target in cases:
        value = row[f"acquire_p99_{name}_us"]
        shown = _judged(value / idle, target, f"{value / idle:.2f}", lower=True)
        limit = f"{target:.0f}" if target else "-"
        table.add_row(f"acquire p99 beside {text}, idle", f"{value:,.0f} us", f"{idle:,.0f} us", shown, limit)
    alone, value = row["echo_p99_idle_us"], row["echo_p99_writing_us"]
    text = "bare echo p99 beside plain writes, idle"
    table.add_row(text, f"{value:,.0f} us", f"{alone:,.0f} us", f"{value / alone:.2f}", "-")


def _restart(row: dict[str, Any]) -> Table:
    table = _table("restart after kill -9", "blocks", "seconds", "target", "first hit")
    target = max(RESTART_TARGET_S * row["blocks"] / 100_000, RESTART_TARGET_S / 100)
    shown = _judged(row["seconds"], target, f"{row['seconds']:.2f}", lower=True)
    hit = _judged(row["first_hit_s"], row["seconds"], f"{row['first_hit_s']:.2f}", lower=True)
    table.add_row("until all is known", f"{row['blocks']:,}", shown, f"{target:.2f}", f"{hit} s")
    return table


def _codec(rows: dict[str, Any]) -> Table:
    table = _table("codec: bytes of raw blocks", "smaller", "encode GB/s", "decode GB/s", "of raw", "target", "KL")
    for name, row in rows.items():
        share = row["decode_gb_per_s"] / rows["raw"]["decode_gb_per_s"]
        target = CODEC_TARGETS.get(name)
        kl_target = KL_TARGETS.get(name)
        kl = _judged(row["kl"], kl_target, f"{row['kl']:.1e}", lower=True) if "kl" in row else "-"
        table.add_row(
            name,
            f"{row['ratio']:.2f}x",
            f"{row['encode_gb_per_s']:.2f}",
            f"{row['decode_gb_per_s']:.2f}",
            _judged(share, target, f"{share:.2f}", lower=False),
            f"{target}" if target else "-",
            kl,
        )
    return table


def _index(rows: list[dict[str, Any]]) -> Table:
    table = _table(
        "index by its blocks: one prompt of 2,048 tokens", "match", "hash + match", "insert", "evict one", "bytes each"
    )
    for row in rows:
        times = [f"{row[name]:,.1f} us" for name in ("match_us", "hash_match_us", "insert_us", "evict_us")]
        table.add_row(f"{row['blocks']:,}", *times, f"{row['bytes_per_block']:.0f}")
    return table


def _match(rows: list[dict[str, Any]]) -> Table:
    table = _table("match: keys given, 16-token blocks", "match", "insert", "startswith of 128 KiB", "target")
    for row in rows:
        target = MATCH_TARGETS.get(row["tokens"])
        scaled = target * row["startswith_us"] / STARTSWITH_US if target else None
        shown = _judged(row["us"], scaled, f"{row['us']:.1f} us", lower=True)
        limit = f"{scaled:.1f} us" if scaled else "-"
        table.add_row(
            f"{row['tokens']:,} tokens", shown, f"{row['insert_us']:.1f} us", f"{row['startswith_us']:.1f} us", limit
        )
    return table


def _overhead(row: dict[str, Any]) -> Table:
    table = _table("requests that share nothing", "figure", "target")
    low, high = row["no_reuse_ratio_interval"]
    interval = f"{row['no_reuse_ratio_median']:.3f}, 95% of {row['pairs']} pairs in {low:.3f} - {high:.3f}"
    table.add_row(
        "speed with / without", _judged(high, NO_REUSE_TARGET, interval, lower=False), f"reaches {NO_REUSE_TARGET}"
    )
    share = row["client_cpu_share"]
    shown = _judged(share, CPU_SHARE_TARGET, f"{100 * share:.2f}%", lower=True)
    table.add_row("client's CPU time of the request", shown, f"{100 * CPU_SHARE_TARGET:.0f}%")
    return table


def _judged(value: float, target: float | None, text: str, *, lower: bool) -> str:
    """`text`, green where the target is met and red where not."""
    if target is None:
        return text
    met = value <= target if lower else value >= target
    return f"[{'green' if met else 'red'}]{text}[/]"


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table
