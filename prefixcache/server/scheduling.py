"""Asks the kernel for short turns: a thread that wakes with little to do gets a core from one that has much to do.

Rules: an ordinary thread's priority is not touched, only the length of its turns, which Linux lets anybody choose from
6.12 on (`sched_setattr` with SCHED_OTHER and a runtime); what threads get in the long run stays the same. Where that is
not offered nothing changes. Must not know: what threads do.
"""

import ctypes
import os
import platform
import struct
from typing import Final

_TURN_NS: Final = 100_000  # the shortest there is
_SCHED_OTHER: Final = 0
# struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period.
_ATTRIBUTES: Final = struct.Struct("<IIQiIQQQ")
_CALLS: Final = {"x86_64": 314, "aarch64": 274, "riscv64": 274}  # older C libraries have no name for it


def take_short_turns() -> bool:
    """For the calling thread and all it will start; whether the kernel took it."""
    number = _CALLS.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != _SCHED_OTHER:
        return False  # somebody has chosen something else for us
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, _SCHED_OTHER, 0, nice, 0, _TURN_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, wanted, 0) == 0)
