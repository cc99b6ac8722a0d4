"""The local channel: a unix socket on which many threads call at once.

Rules:
1. Any thread sends, one at a time. One waiting thread, the reader, receives for all; when its own answer has come it
   wakes another. An idle connection so has no thread between the socket and the caller, which would cost 30 us a call.
2. Nothing is kept between calls: an answer that nobody waits for any more (its call ran into the deadline, or was
   posted) is thrown away by its number.
3. A frame half sent ends the connection, for the peer could not find the next one.
4. One thread watches for the end of the file and does nothing else. It alone closes the descriptor, so that no number
   is used twice under a thread that is still in a system call.
5. A forked child never uses its parent's connection: it closes its copy of the descriptor and says so to nobody.

It must not know what the payloads mean.
"""

import contextlib
import itertools
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from prefixcache_client import framing
from prefixcache_client.errors import Unreachable
from prefixcache_client.framing import CANCEL, END, ERROR, BadFrame, Frame, FrameBuffer, pack_frame
from prefixcache_client.reasons import DEADLINE
from prefixcache_client.transport import ARRIVALS, refusal
from prefixcache_offload import mapping as mapping
from prefixcache_offload.export import receive_descriptors

_RECEIVE_BYTES: Final = 1 << 16
_MIN_TIMEOUT_S: Final = 0.001
# How far off, as a share, the receive timeout that the kernel has may be before it is set anew.
_TIMEOUT_SLACK: Final = 0.1
_CALL_IDS: Final = (1 << 32) - 1
_POST_S: Final = 0.05  # how long a posted call waits for another thread to have sent its own
_LATE: Final = "the server did not answer in time"

_live: "weakref.WeakSet[LocalTransport]" = weakref.WeakSet()


class _Call:
    """A thread that waits for an answer. `wake` is a lock held until there is something to look at."""

    __slots__ = ("frame", "idle", "wake")

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.idle = False  # does something else now: no reader to be woken
        self.wake = threading.Lock()
        self.wake.acquire()


class _Stream(_Call):
    """A thread that takes several answers, and does other things between them. `frame` is the oldest not taken."""

    __slots__ = ("more",)

    def __init__(self) -> None:
        super().__init__()
        self.idle = True
        self.more: deque[Frame] = deque()


class LocalTransport:
    """A connected local channel; see prefixcache_client.transport.Transport for what its methods promise."""

    def __init__(self, path: str, timeout_s: float) -> None:
        """Connect to the socket at `path`. Raises Unreachable, also when the peer's queue of connections is full."""
        self._sock = _connected(path, timeout_s)
        self._receive_timeout_s = 0.0
        self.alive = True
        self._buffer = FrameBuffer()
        self._ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._actions: list[Callable[[], None]] = []
        self._make_locks()
        _live.add(self)
        watcher = threading.Thread(target=self._watch, args=(self._sock,), name="prefixcache-watch", daemon=True)
        try:
            watcher.start()
        except RuntimeError as error:  # the process may have no more threads
            self._sock.close()
            raise Unreachable(f"no thread for the local channel: {error}", lost=True) from error

    def _make_locks(self) -> None:
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._state = threading.Lock()

    def call(self, method: int, payload: bytes, timeout_s: float) -> bytes:
        """The answer to `payload`. Raises Unreachable (reason `deadline` after `timeout_s`) or Refused."""
        call_id = next(self._ids) & _CALL_IDS
        frame = pack_frame(call_id, method, payload)
        if self._reading.acquire(False):
            # With the reader's role in hand before the frame leaves, nobody else can take the answer.
            try:
                self._send(frame, timeout_s)
                answer = self._read_own(call_id, timeout_s)
            finally:
                self._reading.release()
                if self._calls:
                    self._promote()
        else:
            answer = self._call_beside_others(call_id, frame, timeout_s)
        _, answered, flags, content = answer
        if answered != method:
            self._end()
            raise Unreachable("the server answered another method than was called", lost=True)
        if flags & ERROR:
            raise refusal(content)
        return content

    def arrivals(self, payload: bytes, timeout_s: float) -> Iterator[bytes]:
        """See Transport. Raises Unreachable (reason `deadline` after `timeout_s`) or Refused from the iterator."""
        deadline = time.monotonic() + timeout_s
        call_id = next(self._ids) & _CALL_IDS
        call = self._calls[call_id] = _Stream()
        flags = 0
        try:
            self._send(pack_frame(call_id, ARRIVALS, payload), timeout_s)
            while not flags & END:
                _, _, flags, content = self._take(call_id, call, deadline)
                if flags & ERROR:
                    raise refusal(content)
                yield content
        finally:
            self._calls.pop(call_id, None)
            if self._calls and not self._reading.locked():
                self._promote()
            if not flags & END and self.alive:
                with contextlib.suppress(Unreachable):
                    self._send(pack_frame(call_id, ARRIVALS, b"", CANCEL), _POST_S, socket.MSG_DONTWAIT)

    def _take(self, call_id: int, call: _Stream, deadline: float) -> Frame:
        """The next answer of a stream."""
        call.idle = False
        try:
            frame = self._wait(call_id, call, deadline)
        finally:
            call.idle = True
            if len(self._calls) > 1 and not self._reading.locked():
                self._promote()
        with self._state:  # against who delivers
            if frame is call.frame:
                call.frame = call.more.popleft() if call.more else None
        return frame

    def post(self, method: int, payload: bytes) -> None:
        """Send `payload` behind everything sent before; its answer is thrown away. Raises Unreachable.

        It never waits for the server: one that reads nothing any more hears it no sooner for being waited for.
        """
        self._send(pack_frame(next(self._ids) & _CALL_IDS, method, payload), _POST_S, socket.MSG_DONTWAIT)

    def call_for_descriptors(self, method: int, payload: bytes, timeout_s: float) -> tuple[bytes, list[int]]:
        """As `call`, with the descriptors that came along, which the caller closes. No other call may be under way."""
        deadline = time.monotonic() + timeout_s
        call_id = next(self._ids) & _CALL_IDS
        self._send(pack_frame(call_id, method, payload), timeout_s)
        fds: list[int] = []
        with self._reading:
            frame = self._take_with_descriptors(call_id, deadline, fds)
        _, _, flags, content = frame
        if flags & ERROR:
            for fd in fds:
                os.close(fd)
            raise refusal(content)
        return content, fds

    def on_lost(self, action: Callable[[], None]) -> None:
        """Have `action` called once when the connection ends; at once if it has."""
        with self._state:
            if self.alive:
                self._actions.append(action)
                return
        action()

    def close_session(self, session_id: bytes) -> None:
        """End the connection, which is the session."""
        self.close()

    def close(self) -> None:
        """End the connection; the watcher closes the descriptor."""
        self._end()

    # -- sending and receiving ---------------------------------------------------------------------------------------

    def _send(self, frame: bytes, timeout_s: float, flags: int = 0) -> None:
        if len(frame) > framing.MAX_PAYLOAD_BYTES:
            raise Unreachable("a request over the limit of the local channel", reason="message_too_large")
        if not self._sending.acquire(False) and not self._sending.acquire(timeout=timeout_s):
            raise Unreachable("another call could not be sent in time", reason=DEADLINE)
        sent = False
        try:
            if not self.alive:
                raise Unreachable("the connection has ended", lost=True)
            self._sock.sendall(frame, flags)
            sent = True
        except BlockingIOError as error:
            raise Unreachable("the server takes no more bytes", reason=DEADLINE) from error
        except OSError as error:
            raise Unreachable(f"sending failed: {error}", lost=True) from error
        finally:
            self._sending.release()
            if not sent:
                self._end()  # also when a signal handler raised in mid-frame

    def _call_beside_others(self, call_id: int, frame: bytes, timeout_s: float) -> Frame:
        deadline = time.monotonic() + timeout_s
        call = _Call()
        self._calls[call_id] = call
        try:
            self._send(frame, timeout_s)
            return self._wait(call_id, call, deadline)
        finally:
            self._calls.pop(call_id, None)
            if self._calls and not self._reading.locked():
                self._promote()

    def _wait(self, call_id: int, call: _Call, deadline: float) -> Frame:
        while True:
            if self._reading.acquire(False):
                try:
                    return call.frame or self._read_own(call_id, deadline - time.monotonic())
                finally:
                    self._reading.release()
            if call.frame is not None:
                return call.frame
            if not self.alive:
                raise Unreachable("the connection ended before the answer came", lost=True)
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not call.wake.acquire(timeout=remaining_s):
                raise Unreachable(_LATE, reason=DEADLINE)

    def _read_own(self, call_id: int, timeout_s: float) -> Frame:
        """Receive for everybody until the answer of `call_id` has come. The caller holds `_reading`."""
        buffer, deadline = self._buffer, 0.0
        try:
            frame = buffer.take() if buffer.pending else None
            while frame is None or frame[0] != call_id:
                if frame is not None:
                    self._deliver(frame)
                    frame = buffer.take()
                    continue
                if deadline:
                    timeout_s = deadline - time.monotonic()
                else:
                    deadline = time.monotonic() + timeout_s
                self._bound(timeout_s)
                frame = buffer.take_next(self._receive())
        except BadFrame as error:
            self._end()
            raise Unreachable(f"the server does not speak the protocol: {error}", lost=True) from error
        return frame

    def _deliver(self, frame: Frame) -> None:
        """Give an answer to the thread that waits for it, if one still does."""
        owner = self._calls.get(frame[0])
        if owner is not None:
            if type(owner) is _Stream:
                with self._state:
                    if owner.frame is not None:
                        owner.more.append(frame)
                        return
                    owner.frame = frame
            else:
                owner.frame = frame
            self._wake(owner)

    def _receive(self) -> bytes:
        try:
            pending = self._buffer.pending
            data = self._sock.recv(max(_RECEIVE_BYTES, self._buffer.missing()) if pending else _RECEIVE_BYTES)
        except BlockingIOError as error:
            raise Unreachable(_LATE, reason=DEADLINE) from error
        except OSError as error:
            self._end()
            raise Unreachable(f"receiving failed: {error}", lost=True) from error
        if not data:
            self._end()
            raise Unreachable("the server closed the connection", lost=True)
        return data

    def _take_with_descriptors(self, call_id: int, deadline: float, fds: list[int]) -> Frame:
        try:
            while True:
                frame = self._buffer.take()
                if frame is not None and frame[0] == call_id:
                    return frame
                if frame is None:
                    self._bound(deadline - time.monotonic())
                    data, received = receive_descriptors(self._sock, _RECEIVE_BYTES)
                    fds += received
                    if not data:
                        raise ConnectionResetError("end of file")
                    self._buffer.feed(data)
        except (OSError, BadFrame, Unreachable) as error:
            self._end()
            for fd in fds:
                os.close(fd)
            raise Unreachable(f"descriptors did not come: {error}", lost=True) from error

    def _bound(self, timeout_s: float) -> None:
        """Bound the next receive. settimeout() would add a poll() to every one, so the kernel keeps the bound."""
        if timeout_s <= 0:
            raise Unreachable(_LATE, reason=DEADLINE)
        if abs(timeout_s - self._receive_timeout_s) > self._receive_timeout_s * _TIMEOUT_SLACK:
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))
            except OSError as error:  # the watcher was faster: the connection has ended
                raise Unreachable(f"the connection has ended: {error}", lost=True) from error
            self._receive_timeout_s = timeout_s

    # -- who reads, and the end --------------------------------------------------------------------------------------

    def _promote(self) -> None:
        """Wake one waiting thread so that it becomes the reader."""
        for call in list(self._calls.values()):
            if call.frame is None and not call.idle:
                self._wake(call)
                return

    def _wake(self, call: _Call) -> None:
        with self._state:
            if call.wake.locked():
                call.wake.release()

    def _end(self) -> None:
        """Mark the connection as ended and make every system call on it return; run what `on_lost` was given."""
        with self._state:
            if not self.alive:
                return
            self.alive = False
            actions, self._actions = self._actions, []
        with contextlib.suppress(OSError):  # the peer was faster
            self._sock.shutdown(socket.SHUT_RDWR)
        for call in list(self._calls.values()):
            self._wake(call)
        for action in actions:
            action()

    def _watch(self, sock: socket.socket) -> None:
        """Wait for the end of the file, from either side, and close the descriptor when nobody uses it any more."""
        poller = select.poll()
        poller.register(sock, select.POLLRDHUP)
        poller.poll()
        self._end()
        with self._sending, self._reading:
            sock.close()

    def forget_in_child(self) -> None:
        """Give up the parent's connection in a forked child: no shutdown, which the parent would feel."""
        self._make_locks()
        self.alive = False
        actions, self._actions = self._actions, []
        for action in actions:
            action()
        self._sock.close()


def _connected(path: str, timeout_s: float) -> socket.socket:
    """A socket whose sending ends after `timeout_s`. Raises Unreachable."""
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
            sock.connect(path)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise Unreachable(f"no local channel at {path}: {error}", lost=True) from error
    return sock


def _timeval(seconds: float) -> bytes:
    bounded = max(seconds, _MIN_TIMEOUT_S)
    whole = int(bounded)
    return struct.pack("@ll", whole, int((bounded - whole) * 1e6))


def _after_fork_in_child() -> None:
    # Mappings see to themselves: prefixcache_offload.mapping is imported above, so that its turn comes first.
    for transport in list(_live):
        transport.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
