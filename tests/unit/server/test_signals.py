"""Signals reach a thread, also while the main thread holds what the thread needs."""

import subprocess
import sys

PROGRAM = """
import os, signal, threading
from prefixcache.server import signals
told, lock = [threading.Event(), threading.Event()], threading.Lock()
def tell(count):
    with lock:
        told[count - 1].set()
signals.watch(tell)
with lock:
    os.kill(os.getpid(), signal.SIGTERM)
told[0].wait()
os.kill(os.getpid(), signal.SIGINT)
assert told[1].wait(20)
print("told twice")
"""


def test_signals_are_counted_on_a_thread() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("told twice\n", 0), done.stderr
