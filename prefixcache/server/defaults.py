"""What this host offers when nobody says otherwise: where the socket lies, how much memory is free.

Reads the environment and /proc, once, at start. It must not know the other options.
"""

import os
import tempfile
from pathlib import Path
from typing import Final

_SOCKET_NAME: Final = "daemon.sock"
_GRANULE: Final = 2 << 20  # whole huge pages: a pool should not end in the middle of one
_MOST_BYTES: Final = 4 << 30
_SHARE: Final = 4  # a quarter of what is free: engines on the same host need the rest
_UNLIMITED: Final = 1 << 60  # cgroup v1 writes a huge number for "no limit"


def socket_path() -> Path:
    """Where the daemon of this user listens; SDK and command line compute the same."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "prefixcache" / _SOCKET_NAME
    if os.geteuid() == 0:
        return Path("/run/prefixcache") / _SOCKET_NAME
    return Path(tempfile.gettempdir()) / f"prefixcache-{os.geteuid()}" / _SOCKET_NAME


def host_bytes() -> int:
    """Bytes of the host pool: the smaller of 4 GiB and a quarter of the memory that is available to this process."""
    share = min(_MOST_BYTES, available_memory() // _SHARE)
    return max(share // _GRANULE, 1) * _GRANULE


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The smaller of MemAvailable and what the cgroup of this process still allows, in bytes."""
    free = _mem_available(proc / "meminfo")
    for folder in _cgroup_folders(proc / "self" / "cgroup", cgroup):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most = _number(folder / limit)
            if most is not None and most < _UNLIMITED:
                free = min(free, max(most - (_number(folder / usage) or 0), 0))
    return free


def _mem_available(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_folders(path: Path, root: Path) -> list[Path]:
    """The folders (v2 or v1) that may limit this process, from the root to its own."""
    folders = [root, root / "memory"]
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, name = line.split(":", 2)
        base = root if controllers == "" else root / "memory"
        if controllers in ("", "memory"):
            parts = [part for part in name.split("/") if part not in ("", "..")]
            folders.extend(base.joinpath(*parts[: depth + 1]) for depth in range(len(parts)))
    return folders


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
