"""How much memory may still be taken: MemAvailable, and what the control groups of this process leave (v1 and v2).

Only reads files of /proc and /sys. Touching shared memory past a group's limit is not an error but the end of some
process (the kernel kills one), so whoever faults memory in asks here first.
"""

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60
"""Group limits at or above this mean "none" (v1 writes a huge number, v2 the word max)."""


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken now without swapping or meeting a group's limit; never negative.

    `root` is where proc and sys are found. Raises OSError when /proc/meminfo cannot be read.
    """
    room = [_mem_available(root), *_group_rooms(root)]
    return max(min(room), 0)


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("the kernel does not tell MemAvailable")


def _group_rooms(root: Path) -> Iterator[int]:
    """What each group from this process's own up to the top leaves."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        bases: tuple[str, ...]
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            bases = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            bases = ("sys/fs/cgroup/memory",)
        else:
            continue
        for base in bases:
            yield from _rooms_upwards(root / base, path, names)


def _rooms_upwards(base: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    # Inside a container the path may be the host's; then only the top, which is this container's group, exists.
    relative = Path(path.lstrip("/"))
    for group in (relative, *relative.parents):
        room = _room(base / group, names)
        if room is not None:
            yield room


def _room(group: Path, names: tuple[str, str, str]) -> int | None:
    """Limit less what is used and cannot be dropped; None where the group has no limit or does not exist."""
    limit_name, usage_name, droppable_name = names
    try:
        limit_text = (group / limit_name).read_text().strip()
        if limit_text == "max" or int(limit_text) >= _UNLIMITED:
            return None
        usage = int((group / usage_name).read_text())
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(limit_text) - usage + int(fields.get(droppable_name, 0))
