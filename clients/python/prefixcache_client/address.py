"""Where the daemon is: the default socket, PREFIXCACHE_ADDRESS, and the two forms of an address.

The only file of the SDK that reads the environment.
"""

import dataclasses
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VARIABLE: Final = "PREFIXCACHE_ADDRESS"
LOCAL_SUFFIX: Final = ".local"
_UNIX: Final = "unix:"
_MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """A daemon's address: `socket_path` for a unix socket, else `target`, "HOST:PORT"."""

    target: str
    socket_path: str = ""
    is_default: bool = False

    @property
    def local_path(self) -> str:
        """Path of the local channel's socket; empty for a daemon reached over TCP."""
        return self.socket_path + LOCAL_SUFFIX if self.socket_path else ""

    @property
    def is_foreign(self) -> bool:
        """Whether the default socket's folder belongs to another user: anybody can make one in the temporary folder,
        and a server there could hand out any bytes. An address that somebody named is that somebody's decision."""
        if not self.is_default:
            return False
        try:
            return os.lstat(os.path.dirname(self.socket_path)).st_uid not in (os.geteuid(), 0)
        except OSError:
            return False


def default_socket() -> str:
    """In $XDG_RUNTIME_DIR/prefixcache, else in /run/prefixcache as root, else in one of the temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return str(Path(runtime) / "prefixcache" / "daemon.sock")
    if os.geteuid() == 0:
        return "/run/prefixcache/daemon.sock"
    return str(Path(tempfile.gettempdir()) / f"prefixcache-{os.geteuid()}" / "daemon.sock")


def parse_address(text: str | None = None) -> Address:
    """The address in `text`, else in PREFIXCACHE_ADDRESS, else the default socket.

    `unix:///path`, `unix:path`, `/path` or `HOST:PORT` (an IPv6 host in brackets). Raises ValueError for anything else.
    """
    text = text or os.environ.get(VARIABLE)
    if not text:
        return dataclasses.replace(_unix(default_socket()), is_default=True)
    if text.startswith("/"):
        return _unix(text)
    if text.startswith(_UNIX):
        return _unix(text.removeprefix(_UNIX).removeprefix("//"))
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) <= _MAX_PORT:
        raise ValueError(f"address {text!r} is neither unix:///path nor HOST:PORT")
    return Address(text)


def _unix(path: str) -> Address:
    if not path:
        raise ValueError("a unix address needs a path: unix:///path")
    return Address(f"{_UNIX}{path}", path)
