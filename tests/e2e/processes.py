"""A daemon in a process of its own, started as users start it, and what the kernel tells about it."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from prefixcache.server.config import load
from prefixcache.server.memory import warm_place

DEADLINE_S = 30.0


class DaemonProcess:
    """`python -m prefixcache.server` with a socket in `folder`; ready when the constructor returns."""

    def __init__(
        self, folder: Path, *flags: str, host_bytes: str = "16MiB", module: str = "prefixcache.server"
    ) -> None:
        self.socket = folder / "d.sock"
        self.local = folder / "d.sock.local"
        self.log = folder.parent / f"{folder.name}.log"
        ours, theirs = os.pipe()
        started = time.monotonic()
        command = [sys.executable, "-m", module, f"--socket={self.socket}", f"--host-bytes={host_bytes}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--http=127.0.0.1:0", f"--ready-fd={theirs}", *flags],
                pass_fds=[theirs], stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        os.close(theirs)
        ready, _, _ = select.select([ours], [], [], DEADLINE_S)
        told = os.read(ours, 1) if ready else b""
        os.close(ours)
        self.startup_s = time.monotonic() - started
        if told != b"\n":
            self.kill()
            raise RuntimeError(f"the daemon did not get ready: {self.log.read_text()}")

    @property
    def pid(self) -> int:
        return self.process.pid

    def terminate(self, timeout_s: float = DEADLINE_S) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """The exit code."""
        code = self.process.wait(timeout_s)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def resident(self) -> dict[str, int]:
        """Bytes of RssAnon, RssFile, RssShmem."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}


def warm_files(daemon: DaemonProcess) -> set[str]:
    """Names in /dev/shm that belong to this daemon's socket; others may be testing beside us."""
    place = warm_place(load({"socket": str(daemon.socket)}, environ={}).config)
    return {path for path in (place.pool_path, place.mark_path) if os.path.lexists(path)}


def wait_until(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> bool:
    """Poll a condition of another process that cannot be waited for; whether it came true in time."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
