"""A benchmark that was killed left its daemon, and with it its pool, until somebody noticed."""

import os
import select
import signal
import subprocess
import sys

DEADLINE_MS = 30_000
BENCH = """
import sys
from prefixcache.cli.bench.daemon import running
with running(16 << 20) as daemon:
    print(daemon.pid, flush=True)
    sys.stdin.read()
"""


def test_the_daemon_ends_with_a_killed_bench() -> None:
    command = [sys.executable, "-c", BENCH]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        daemon = int(bench.stdout.readline())
        watched = os.pidfd_open(daemon)
        bench.send_signal(signal.SIGKILL)
        bench.wait()
    poller = select.poll()
    poller.register(watched, select.POLLIN)
    ended = poller.poll(DEADLINE_MS)
    os.close(watched)
    if not ended:
        os.kill(daemon, signal.SIGKILL)
    assert ended
