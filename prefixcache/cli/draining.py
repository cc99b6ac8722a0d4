"""`prefixcache drain` and `flush`: before a restart, or instead of one."""

from __future__ import annotations

from prefixcache.cli.daemon import connect
from prefixcache.cli.errors import bad_usage
from prefixcache.cli.output import Settings
from prefixcache.server import units


def drain(settings: Settings, timeout: str | None, *, shutdown: bool) -> None:
    """Take no new leases and reservations, wait for those running, and tell what is left."""
    try:
        timeout_s = units.parse_duration(timeout) if timeout is not None else 0.0
    except ValueError as error:
        raise bad_usage(f"--timeout: {error}") from error
    with connect(settings.address) as daemon:
        answer = daemon.drain(timeout_s, shutdown=shutdown)
    told = {"leases": answer.leases, "reservations": answer.reservations, "shutdown": shutdown}
    left = f"{answer.leases} leases and {answer.reservations} reservations still run"
    what = "drained" if not answer.leases + answer.reservations else left
    then = "; the daemon ends now" if shutdown else "; it takes no new work until it is restarted"
    settings.emit(told, lambda: [what + then])


def flush(settings: Settings) -> None:
    """Write what only memory holds to disk."""
    with connect(settings.address) as daemon:
        answer = daemon.flush()
    told = {"written_blocks": answer.blocks, "left_blocks": answer.left_blocks}
    left = f"; {answer.left_blocks:,} are in memory only, in use or not taken by the disk in time"
    settings.emit(told, lambda: [f"wrote {answer.blocks:,} blocks" + left * bool(answer.left_blocks)])
