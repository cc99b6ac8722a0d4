"""SIGTERM and SIGINT, told to a thread.

A Python signal handler runs inside whatever the main thread was doing. If that was holding a lock which the handler
takes (an Event being waited for is enough), the process hangs. So the handler does nothing, the interpreter writes the
signal's number into a socket, and a thread reads it.
"""

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

ENDING: Final = (signal.SIGTERM, signal.SIGINT)


def watch(tell: Callable[[int], None]) -> None:
    """Call `tell(1)` at the first of these signals, `tell(2)` at the second and so on. Main thread only, once."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in ENDING:
        signal.signal(number, _ignore)
    threading.Thread(target=_read, args=(reader, writer, tell), name="prefixcache-signals", daemon=True).start()


def _ignore(_: int, __: FrameType | None) -> None:
    """The wake-up descriptor has told the thread already."""


def _read(reader: socket.socket, writer: socket.socket, tell: Callable[[int], None]) -> None:
    count = 0
    assert writer.fileno() >= 0, "kept open for the interpreter"
    while data := reader.recv(64):
        for number in data:
            if number in ENDING:
                count += 1
                tell(count)
