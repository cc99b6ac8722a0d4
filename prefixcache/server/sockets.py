"""The daemon's place in the file system: its folder, its lock, its two unix sockets.

A lock file beside the socket says who serves it; it is held with flock, so it means nothing once its holder is gone,
however that ended. Sockets of a dead daemon are removed, those of a live one never.
"""

import fcntl
import os
import socket
from pathlib import Path
from typing import Final

from prefixcache.server import defaults
from prefixcache.server.config import ConfigError

_BACKLOG: Final = 1024
_FOLDER_MODE: Final = 0o700
_ONLY_OWNER: Final = 0o177


class SocketPlace:
    """Owns `path`, `path + ".local"` and `path + ".lock"` until `close`."""

    def __init__(self, path: str) -> None:
        """Take the place. Raises ConfigError when it cannot be had: another daemon serves it, or no permission."""
        self.path = path
        self.local_path = path + ".local"
        self._lock_path = path + ".lock"
        folder = Path(path).parent
        try:
            if not folder.exists():
                folder.mkdir(mode=_FOLDER_MODE, parents=True)
            elif path == str(defaults.socket_path()) and folder.lstat().st_uid not in (os.geteuid(), 0):
                raise ConfigError(f"{folder} belongs to another user; choose another place with --socket PATH")
            self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot use {folder} for the socket: {error.strerror}; choose another with --socket PATH"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(self._lock, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise ConfigError(
                f"another daemon serves {path}, pid {pid}; stop it, or choose another place with --socket PATH"
            ) from None
        try:
            self._refuse_strangers()
        except ConfigError:
            os.close(self._lock)
            raise
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        self._remove()

    def listen_local(self) -> socket.socket:
        """The local channel's listening socket, only for this user."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with OnlyOwner():
            sock.bind(self.local_path)
        sock.listen(_BACKLOG)
        return sock

    def close(self) -> None:
        """Remove both sockets and let the place go."""
        self._remove()
        os.close(self._lock)

    def _remove(self) -> None:
        for path in (self.path, self.local_path):
            Path(path).unlink(missing_ok=True)

    def _refuse_strangers(self) -> None:
        """Somebody without our lock may listen there, or the path may be a file: both are not ours to remove."""
        for path in (self.path, self.local_path):
            if not os.path.lexists(path):
                continue
            if not Path(path).is_socket():
                raise ConfigError(f"{path} is no socket; remove it, or choose another place with --socket PATH")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(path)
                except OSError:
                    continue
            raise ConfigError(f"another program serves {path}; stop it, or choose another place with --socket PATH")


class OnlyOwner:
    """While entered, files made by this process are for its user only. Process-wide: for start-up."""

    def __enter__(self) -> None:
        self._before = os.umask(_ONLY_OWNER)

    def __exit__(self, *_: object) -> None:
        os.umask(self._before)
