"""One connection of the local channel: bytes in, frames out, and the other way.

Rules:
1. Never blocks. What does not fit the socket waits in a bounded queue; while much waits, nothing more is read from
   this peer. So a slow peer costs itself time and the server a bounded amount of memory.
2. At most `_FRAMES_A_TURN` frames are answered before other connections get their turn.
3. A malformed frame ends this connection and nothing else.
It does not know what a method does: `Channel.handle` does.
"""

import os
import select
import socket
from collections import deque
from typing import Final, Protocol

from prefixcache.server.arrivals import Subscription
from prefixcache.server.frames import CANCEL, FROM_CLIENT, HEADER, HEADER_BYTES, MAX_FRAME_BYTES
from prefixcache.server.processes import Process
from prefixcache.server.sessions import Session

_RECEIVE_BYTES: Final = 1 << 16
_FRAMES_A_TURN: Final = 32
_PAUSE_BYTES: Final = 1 << 20
_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT
_ENDED: Final = select.EPOLLHUP | select.EPOLLERR


class Channel(Protocol):
    """What a connection tells its channel."""

    max_message_bytes: int

    def handle(self, connection: "Connection", call: int, method: int, payload: bytes) -> None:
        """Answer one request."""
        ...

    def cancel(self, connection: "Connection", call: int) -> None:
        """The peer wants no more answers of a call."""
        ...

    def refuse_size(self, connection: "Connection", call: int, method: int, size: int) -> None:
        """Answer a request that is over the limit and whose payload is being skipped."""
        ...

    def watch(self, connection: "Connection", *, reading: bool, writing: bool) -> None:
        """Change what the loop waits for."""
        ...

    def again(self, connection: "Connection") -> None:
        """Frames wait in the connection: call `work` again soon."""
        ...

    def lost(self, connection: "Connection") -> None:
        """The peer is gone or was thrown out; the socket is still open."""
        ...

    def buffered(self, change: int) -> bool:
        """So many bytes more (or less) are held for unfinished frames; False when that is too much for all together."""
        ...


class Connection:
    """The state of one peer."""

    __slots__ = (
        "_channel", "_inbox", "_out", "_out_bytes", "_reading", "_recv", "_send", "_skip", "_waits", "accepted_at",
        "closed", "fd", "process", "session", "sock", "subscriptions",
    )  # fmt: skip

    def __init__(self, channel: Channel, sock: socket.socket, process: Process, now: float) -> None:
        self._channel = channel
        self.sock = sock
        self.fd = sock.fileno()
        self._recv = sock.recv
        self._send = sock.send
        self.process = process
        self.session: Session | None = None
        self.accepted_at = now
        self.closed = False
        self.subscriptions: dict[int, Subscription] = {}  # calls that are answered more than once
        self._inbox = bytearray()
        self._skip = 0
        self._out: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._out_bytes = 0
        self._reading = True
        self._waits = False

    def ready(self, mask: int) -> None:
        """The loop saw the socket become readable, writable, or end."""
        if mask == _IN:
            self._readable()
            return
        if mask & _OUT:
            self._writable()
        if mask & _IN:
            self._readable()
        elif mask & _ENDED:
            self._channel.lost(self)

    def _readable(self) -> None:
        """The socket has bytes, or its end."""
        if self.closed or self._waits:
            return  # what came before is not answered yet; the kernel keeps the rest
        try:
            data = self._recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._channel.lost(self)
            return
        if not self._inbox and not self._skip and len(data) >= HEADER_BYTES:
            length, call, method, flags = HEADER.unpack_from(data)
            if len(data) == HEADER_BYTES + length and flags == 1:
                # The usual case by far: exactly one whole request. Its limit is above what one receive can bring.
                self._channel.handle(self, call, method, data[HEADER_BYTES:])
                return
        self._take(data)

    def work(self) -> None:
        """Answer the whole frames that wait, at most a turn's worth of them."""
        self._waits = False
        for _ in range(_FRAMES_A_TURN):
            if self.closed or not self._reading or not self._one_frame():
                return
        self._waits = True
        self._channel.again(self)

    def send(self, call: int, method: int, flags: int, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send a frame, with duplicates of `fds` in its first byte."""
        if self.closed:
            return
        data = HEADER.pack(len(payload), call, method, flags) + payload
        if not self._out:
            try:
                sent = self._send(data) if not fds else socket.send_fds(self.sock, [data], list(fds))
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                sent = -1
            if sent == len(data):
                return
            if sent < 0:
                self._channel.lost(self)
                return
            data, fds = data[sent:], () if sent else fds
        self._out.append((memoryview(data), tuple(os.dup(fd) for fd in fds)))
        self._out_bytes += len(data)
        self._reading = self._out_bytes <= _PAUSE_BYTES
        self._channel.watch(self, reading=self._reading, writing=True)

    def _writable(self) -> None:
        """The socket takes bytes again."""
        while self._out:
            data, fds = self._out[0]
            sent = self._send_now(data, fds)
            if sent < 0:
                self._channel.lost(self)
                return
            self._out_bytes -= sent
            if sent:
                _close_all(fds)
            if sent < len(data):
                self._out[0] = (data[sent:], () if sent else fds)
                return
            self._out.popleft()
        self._reading = True
        self._channel.watch(self, reading=True, writing=False)
        self.work()

    def close(self) -> None:
        """Drop what waits; the channel closes the socket."""
        self.closed = True
        for _, fds in self._out:
            _close_all(fds)
        self._out.clear()
        self._channel.buffered(-len(self._inbox))
        self._inbox = bytearray()

    def _take(self, data: bytes) -> None:
        """Bytes that are not exactly one frame."""
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
        self._inbox += data
        if not self._channel.buffered(len(data)):
            self._channel.lost(self)
            return
        self.work()

    def _one_frame(self) -> bool:
        """Answer the first frame of the inbox; False if it is not whole yet."""
        inbox = self._inbox
        if len(inbox) < HEADER_BYTES:
            return False
        length, call, method, flags = HEADER.unpack_from(inbox)
        if length > MAX_FRAME_BYTES or flags not in FROM_CLIENT:
            self._channel.lost(self)
            return False
        if length > self._channel.max_message_bytes:
            here = min(length, len(inbox) - HEADER_BYTES)
            self._drop(HEADER_BYTES + here)
            self._skip = length - here
            self._channel.refuse_size(self, call, method, length)
            return True
        end = HEADER_BYTES + length
        if len(inbox) < end:
            return False
        payload = bytes(memoryview(inbox)[HEADER_BYTES:end])
        self._drop(end)
        if flags & 1:
            self._channel.handle(self, call, method, payload)
        elif flags & CANCEL:
            self._channel.cancel(self, call)
        return True

    def _drop(self, size: int) -> None:
        del self._inbox[:size]
        self._channel.buffered(-size)

    def _send_now(self, data: bytes | memoryview, fds: tuple[int, ...]) -> int:
        """Bytes the socket took; 0 when it is full, -1 when the peer is gone."""
        try:
            return socket.send_fds(self.sock, [data], list(fds)) if fds else self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return -1


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
