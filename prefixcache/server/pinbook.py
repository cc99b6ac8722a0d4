"""Pins over a restart: what is pinned as a small file beside the data, and back again.

Rules:
1. The file is replaced as a whole, never changed: after a crash it is the one before or the one after.
2. Times are told by the wall clock, because a restart has no other; a pin whose time is over does not come back.
3. A pin of a namespace that nobody has opened yet waits for it, and is written again meanwhile.
4. Writing is for a thread of its own: a call that pins waits for it, a worker's call never does.
What may be pinned is the planner's business.
"""

import hashlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import msgspec

from prefixcache.core import commands as c
from prefixcache.core import pin_messages as m
from prefixcache.core.planner import Planner
from prefixcache.server.service import Shell

log = logging.getLogger(__name__)

FILE: Final = "pins"
_VERSION: Final = 1
_DIGEST_BYTES: Final = 16
_CLOSE_S: Final = 5.0


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One pin. `until`: seconds since the epoch, 0 for ever."""

    pin: bytes
    fingerprint: bytes
    keys: bytes
    label: str
    until: float


class PinBook:
    """`folder` answers where the file is (None while there is no such place; no `folder` without a disk)."""

    def __init__(self, shell: Shell, planner: Planner, folder: Callable[[], Path | None] | None = None) -> None:
        self._shell = shell
        self._planner = planner
        self._folder = folder
        self._queue: queue.SimpleQueue[Future[None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="prefixcache-pins", daemon=True)
        self._waiting: dict[bytes, list[Entry]] = {}  # by fingerprint
        self._is_read = False
        self.not_kept = 0
        self.not_restored = 0
        shell.namespace_opened = self._opened

    def entries(self) -> list[Entry]:
        """All pins of now, those that wait for their namespace included."""
        shell, now = self._shell, time.time()
        with shell.owner.lock:
            listed = [
                Entry(
                    pin.pin, pin.space.fingerprint, pin.keys, pin.label, _until(pin.term.deadline, shell.owner.now, now)
                )
                for pin in self._planner.state.prefix_pins.values()
            ]
            return listed + [entry for waiting in self._waiting.values() for entry in waiting]

    def faults(self) -> dict[str, int]:
        """How often pins could not be written, and how many an earlier run had that do not fit any more."""
        return {"pins_not_kept": self.not_kept, "pins_not_restored": self.not_restored}

    def keep(self) -> "Future[None]":
        """Have the pins of now written; done when they would survive a crash, or cannot."""
        done: Future[None] = Future()
        if self._thread.ident is None:
            done.set_result(None)  # not started: nothing is kept
        else:
            self._queue.put(done)
        return done

    def start(self) -> None:
        """Begin to write, if there is a place for it."""
        if self._folder is not None:
            self._thread.start()

    def read(self) -> None:
        """Pin anew what the file says; once, whoever asks first."""
        with self._shell.owner.lock:
            if self._is_read:
                return
            folder = self._folder() if self._folder is not None else None
            if folder is None:
                return
            self._is_read = True
            self.restore(_load(folder / FILE))

    def directory_opened(self) -> None:
        """There is a place for the file: it is read, unless that was done; then it gets what is pinned now."""
        with self._shell.owner.lock:
            again = self._is_read
        self.read()
        if again:
            self.keep()

    def restore(self, entries: Iterable[Entry]) -> None:
        """Pin anew what an earlier run had pinned."""
        with self._shell.owner.lock:
            for entry in entries:
                if entry.fingerprint in self._shell.by_fingerprint:
                    self._pin(entry)
                else:
                    self._waiting.setdefault(entry.fingerprint, []).append(entry)

    def close(self) -> None:
        """Finish what was to be written, as far as the disk lets us."""
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (done := self._queue.get()) is not None:
            self._save()
            done.set_result(None)

    def _opened(self, fingerprint: bytes) -> None:
        """A namespace is known from now on; call it with the owner's lock held."""
        for entry in self._waiting.pop(fingerprint, ()):
            self._pin(entry)

    def _pin(self, entry: Entry) -> None:
        ttl_s = entry.until - time.time() if entry.until else None
        if ttl_s is not None and ttl_s <= 0:
            return
        number = self._shell.by_fingerprint[entry.fingerprint].number
        reply = self._shell.owner.call(m.PinRequested(entry.pin, number, entry.keys, entry.label, ttl_s))
        if isinstance(reply, c.Refused):
            self.not_restored += 1
            log.warning("a pin could not be restored", extra={"facts": {"label": entry.label, "why": reply.message}})

    def _save(self) -> None:
        if self._shell.owner.failure:
            return  # what is pinned is not known any more; the file stays as it was
        self.read()  # what is in the file and was not read yet must not be lost
        folder = self._folder() if self._folder is not None else None
        if folder is None:
            self.not_kept += 1
            return
        try:
            _replace(folder, msgspec.msgpack.encode([_VERSION, self.entries()]))
        except OSError as error:
            self.not_kept += 1
            log.warning("pins may not survive a crash", extra={"facts": {"error": error.strerror}})


def pack(entries: list[Entry]) -> bytes:
    """Pins as part of something else that is kept."""
    return msgspec.msgpack.encode([_VERSION, entries])


def unpack(content: bytes) -> list[Entry]:
    """Pins that `pack` made; none of bytes that are something else."""
    try:
        version, entries = msgspec.msgpack.decode(content, type=tuple[int, list[Entry]])
    except msgspec.MsgspecError as error:
        log.warning("kept pins cannot be read", extra={"facts": {"error": error}})
        return []
    return entries if version == _VERSION else []


def _until(deadline: float, now: float, wall: float) -> float:
    return 0.0 if deadline == math.inf else wall + deadline - now


def _load(path: Path) -> list[Entry]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("kept pins cannot be read", extra={"facts": {"error": error.strerror}})
        return []
    digest, packed = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(packed).digest()[:_DIGEST_BYTES] != digest:
        log.warning("kept pins are damaged and not used", extra={"facts": {"file": path}})
        return []
    return unpack(packed)


def _replace(folder: Path, packed: bytes) -> None:
    """Raises OSError; the file is as before then."""
    fresh = folder / (FILE + ".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(hashlib.sha256(packed).digest()[:_DIGEST_BYTES] + packed)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, folder / FILE)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
