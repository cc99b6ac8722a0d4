"""What memory is left, read from made-up /proc and /sys trees."""

from pathlib import Path

import pytest

from prefixcache_offload.limits import available_bytes

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   8388608 kB\n"}


def test_without_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_bytes(write(tmp_path, MEMINFO)) == 8 * GIB


def test_the_tightest_group_above_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "5\n",
        "sys/fs/cgroup/a/b/memory.stat": "inactive_file 0\n",
        "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
    }
    assert available_bytes(write(tmp_path, files)) == GIB + GIB // 2


def test_version_one_groups_and_containers_that_show_the_hosts_path(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "5:cpu,memory:/docker/1234\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 4096\n",
    }
    assert available_bytes(write(tmp_path, files)) == GIB + 4096
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712")
    assert available_bytes(tmp_path) == 8 * GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "1000",
        "sys/fs/cgroup/memory.current": "2000",
        "sys/fs/cgroup/memory.stat": "",
    }
    assert available_bytes(write(tmp_path, files)) == 0


def test_this_machine_has_some_and_a_kernel_without_the_figure_is_an_error(tmp_path: Path) -> None:
    assert available_bytes() > 0
    with pytest.raises(OSError, match="MemAvailable"):
        available_bytes(write(tmp_path, {"proc/meminfo": "MemFree: 1 kB\n"}))
