"""How fast the disk reads, measured on what is read: bytes per second while anything is under way, and what is queued.

Rules: time is told, never asked. Must not know: what is read.
"""

from __future__ import annotations

_MEMORY_BYTES = 64 << 20  # so much of what was read last decides,
_MEMORY_PIECES = 16  # or so many pieces, whichever is less
_LONG_BYTES = 1 << 20  # a shorter piece says more of the way there than of the speed
_DOUBT_S = 10.0
_MUCH_SLOWER = 2.0
_MEMORY_WAITS = 8


class FillMeter:
    """How much is filled in a second, from a total that only grows: the most of this second and the last."""

    def __init__(self) -> None:
        self._began = 0.0
        self._at_begin = 0
        self._last = 0

    def per_s(self, total: int, now: float) -> int:
        if now - self._began >= 1.0:
            self._last = int((total - self._at_begin) / (now - self._began))
            self._began, self._at_begin = now, total
        return max(self._last, total - self._at_begin)


class ReadMeter:
    """`bytes_per_s` is never 0; `pending_bytes` is what was begun and has not ended."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.pending_bytes = 0
        self._since = 0.0  # of the last end, or of the first begin after nothing was under way
        self._seen = 0.0  # when something was read last
        self._first = False
        self._anew = False  # what comes next says more than what is known
        self._measured = False

    def believe(self, bytes_per_s: float) -> None:
        """What a short look said, until something is read in earnest, which says more."""
        if bytes_per_s > 0:
            self.bytes_per_s, self._measured = bytes_per_s, False

    def wait_s(self) -> float:
        """Until something that is begun now begins to come."""
        return self.latency_s + self.pending_bytes / self.bytes_per_s

    def in_doubt(self, now: float) -> bool:
        """Whether nothing is under way and what is known is so old that one read is worth learning anew."""
        return not self.pending_bytes and now - self._seen > _DOUBT_S

    def begin(self, size_bytes: int, now: float) -> None:
        if not self.pending_bytes:
            self._anew |= self.in_doubt(now)
            self._since = now
            self._first = True
        self.pending_bytes += size_bytes

    def end(self, size_bytes: int, now: float, *, fine: bool) -> None:
        """So many bytes ended; only those that came well say how fast the disk is."""
        self.pending_bytes -= size_bytes
        took_s = max(now - self._since, 1e-9)
        self._since = now
        if not fine or not size_bytes:
            return
        self._seen = now
        if self._first:
            # The first piece pays for the way there as well; a short one says little else, a long one nothing of it.
            self._first = False
            if size_bytes < _LONG_BYTES:
                beyond_s = max(took_s - size_bytes / self.bytes_per_s, 0.0)
                self.latency_s += (beyond_s - self.latency_s) * (0.5 if self._anew else 1 / _MEMORY_WAITS)
                if not self._anew:
                    return
            took_s -= min(self.latency_s, took_s / 2)
        weight = min(max(size_bytes / _MEMORY_BYTES, 1 / _MEMORY_PIECES), 0.5)
        if not self._measured:
            weight = 1.0  # anything that was seen says more than a guess
        elif self._anew or took_s > _MUCH_SLOWER * size_bytes / self.bytes_per_s:
            weight = 0.5  # the next promise must not be as wrong as this one was
        self._anew, self._measured = False, True
        self.bytes_per_s = 1 / ((1 - weight) / self.bytes_per_s + weight * took_s / size_bytes)
