"""What a test of this folder must not leave behind: memory files and copy threads, told apart from those of others."""

import contextlib
import gc
import os
import threading


def memory_files() -> int:
    """How many memory files are open here, by descriptors and mappings (a mapping keeps one of its own)."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("memfd:" in link for link in links)


def memory_files_in_use() -> int:
    """The same, without those of garbage."""
    gc.collect()
    return memory_files()


def copy_threads() -> int:
    """How many pools have a thread."""
    return sum(thread.name.startswith("copies-") for thread in threading.enumerate())
