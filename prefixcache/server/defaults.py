"""What this host offers when nobody says otherwise: where the socket lies, how large the pool may be.

Reads the environment and /proc, once, at start. It must not know the other options.
"""

import os
import tempfile
from pathlib import Path
from typing import Final

from prefixcache_offload.limits import available_bytes

_SOCKET_NAME: Final = "daemon.sock"
_GRANULE: Final = 2 << 20  # whole huge pages: a pool should not end in the middle of one
_MOST_BYTES: Final = 4 << 30
_SHARE: Final = 4  # a quarter of what is free: engines on the same host need the rest


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
    try:
        free = available_bytes()
    except OSError:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    share = min(_MOST_BYTES, free // _SHARE)
    return max(share // _GRANULE, 1) * _GRANULE
