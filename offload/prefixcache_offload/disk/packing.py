"""Makes records smaller while they wait to be written, on threads of the lowest priority, and says when that pays.

A record keeps its place in the writer's queue, so the order of the log and of tombstones is untouched. It waits there
for its smaller form for `pack_patience_s` at most, and not at all while a clear, a flush or a full queue presses: then
it is written as it is, and counted with the reason. A result that comes too late is thrown away.

AUTO decides by the time that a load takes: with R the disk's read rate, D the rate of decoding and c the ratio, both
per byte of blocks, reading and decoding takes 1/(R c) + 1/D, reading raw 1/R. D and c are measured at the start on a
sample and later on what is read and written; R is measured at the start with a file of a few MiB and later on what is
read. Once lossless is on, R has to be a quarter better than where it went on before it is off again.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from prefixcache_offload.codecs import lossless
from prefixcache_offload.disk.options import DiskCodec
from prefixcache_offload.disk.queued import Item
from prefixcache_offload.disk.records import MOST_CODED_PAGES, PAGE, Kind
from prefixcache_offload.disk.seam import read_fully, scratch, write_fully
from prefixcache_offload.disk.shared import Shared

_DECIDE_EVERY_S = 5.0
_LEAST_READ_BYTES = 32 << 20
_PROBE_BYTES = 8 << 20
_STAYS_ON = 1.25


class CodecReport(NamedTuple):
    """on: whether new records are made smaller. why: for people. Rates in bytes of blocks per second, 0 if unknown;
    ratio: bytes before by bytes after, of what was packed or of the sample."""

    mode: str
    on: bool
    why: str
    ratio: float
    pack_bytes_per_s: float
    unpack_bytes_per_s: float
    disk_bytes_per_s: float


class Packer:
    """See the top of the file. Methods named `*_locked` want the tier's lock held."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._mode = shared.options.codec
        self._queue: deque[Item] = deque()
        self._work = threading.Condition(shared.lock)
        self._measured = False
        self._next_decision = 0.0
        self._read_before = (0, 0.0)
        self._sample = (0.0, 0.0, 1.0)  # pack and unpack rate, ratio
        self._disk_rate = 0.0
        self.on = self._mode is DiskCodec.LOSSLESS
        self.why = "as configured" if self._mode is not DiskCodec.AUTO else "not measured yet"
        if self._mode is not DiskCodec.RAW and not lossless.available():
            self._mode, self.on, self.why = DiskCodec.RAW, False, "the package zstandard is not installed"

    def offer_locked(self, item: Item) -> None:
        """Take a record that was just queued, if its kind can be made smaller."""
        entry = item.job.entries[item.which]
        if not self.on or item.job.again or entry["kind"] != Kind.BLOCK:
            return
        if self._shared.health.writes_off is not None or item.length < 2 * PAGE:
            return
        item.waits_until = self._shared.clock() + self._shared.options.pack_patience_s
        self._queue.append(item)
        self._work.notify()

    def ready_locked(self, item: Item, *, hurry: bool) -> bool:
        """Whether a record may be written now. One that has waited long enough goes as it is."""
        if not item.waits_until:
            return True
        late = self._shared.clock() >= item.waits_until
        if not (hurry or late):
            return False
        item.waits_until = 0.0
        self._shared.counters.kept_raw["behind" if late else "hurry"] += 1
        return True

    def wait_for_work(self) -> bool:
        """Block until `step` may have something to do; False once the tier closes."""
        self._measure_once()
        with self._shared.lock:
            self._work.wait_for(lambda: self._shared.closing or bool(self._queue), _DECIDE_EVERY_S)
            return not self._shared.closing

    def step(self) -> bool:
        """Make one record smaller. False if there was none."""
        self._measure_once()
        shared = self._shared
        with shared.lock:
            self._decide_locked()
            item = next(iter(self._popped_locked()), None)
        if item is None:
            return False
        start = int(item.job.at[item.which])
        began = shared.clock()
        value_bytes = int(item.job.entries["value_bytes"][item.which])
        packed = lossless.pack(item.job.memory[start : start + item.length], value_bytes)
        with shared.lock:
            shared.counters.pack_seconds += shared.clock() - began
            if item.waits_until:  # else it is being written already
                item.waits_until = 0.0
                self._settle_locked(item, packed)
            shared.writes_wait.notify()
        return True

    def wake(self) -> None:
        """The tier closes. The lock is held."""
        self._work.notify_all()

    def report(self) -> CodecReport:
        """For `status`."""
        pack_rate, unpack_rate, ratio = self._rates()
        return CodecReport(str(self._mode), self.on, self.why, ratio, pack_rate, unpack_rate, self._disk_rate)

    def _popped_locked(self) -> "list[Item]":
        while self._queue:
            item = self._queue.popleft()
            if item.waits_until:
                return [item]
        return []

    def _settle_locked(self, item: Item, packed: lossless.Packed | None) -> None:
        counters = self._shared.counters
        if packed is None or packed.pages > MOST_CODED_PAGES:
            counters.kept_raw["does_not_shrink"] += 1
            return
        item.store(packed.memory)
        counters.packed += 1
        counters.packed_bytes += item.length
        counters.packed_to_bytes += packed.memory.nbytes

    # --- does it pay -----------------------------------------------------------------------------------------------

    def _rates(self) -> tuple[float, float, float]:
        """(pack, unpack, ratio): of what was done in earnest once there is enough of it, else of the sample."""
        counters, (pack, unpack, ratio) = self._shared.counters, self._sample
        if counters.packed_bytes > _LEAST_READ_BYTES:
            ratio = counters.packed_bytes / counters.packed_to_bytes
            pack = counters.packed_bytes / max(counters.pack_seconds, 1e-9)
        if counters.decoded_bytes > _LEAST_READ_BYTES:
            unpack = counters.decoded_bytes / max(counters.decode_seconds, 1e-9)
        return pack, unpack, ratio

    def _measure_once(self) -> None:
        """At the start of the first thread: what codec and disk can do."""
        with self._shared.lock:
            if self._measured or self._mode is not DiskCodec.AUTO:
                return
            self._measured = True
        sample = measure_codec(self._shared.clock)
        try:
            rate = self._disk_probe()
        except OSError:
            rate = 0.0  # health is told by those who write in earnest
        with self._shared.lock:
            self._sample, self._disk_rate = sample, rate
            self._judge_locked()

    def _decide_locked(self) -> None:
        """Every few seconds, by what was read since."""
        if self._mode is not DiskCodec.AUTO or self._shared.clock() < self._next_decision:
            return
        self._next_decision = self._shared.clock() + _DECIDE_EVERY_S
        counters = self._shared.counters
        size, seconds = counters.read_bytes - self._read_before[0], counters.read_seconds - self._read_before[1]
        if size >= _LEAST_READ_BYTES and seconds > 0:
            self._disk_rate = size / seconds
            self._read_before = (counters.read_bytes, counters.read_seconds)
        self._judge_locked()

    def _judge_locked(self) -> None:
        _, unpack, ratio = self._rates()
        self.on, self.why = judge(self._disk_rate, unpack, ratio, on=self.on)

    def _disk_probe(self) -> float:
        """Bytes per second of reading a file of a few MiB that was just written. Raises OSError."""
        shared = self._shared
        buffer = scratch(_PROBE_BYTES)
        np.copyto(np.frombuffer(buffer, np.uint8), np.resize(lossless.sample(), _PROBE_BYTES))
        with shared.lock:
            if shared.table.free_bytes() < _PROBE_BYTES:
                return 0.0  # the cap is hard
        with shared.directory.nameless_file() as fd, shared.calling(patience=4.0):
            write_fully(shared.disk, fd, [buffer], 0)
            shared.disk.sync(fd)
            began = shared.clock()
            got = read_fully(shared.disk, fd, [buffer], 0)
            seconds = shared.clock() - began
        return got / seconds if seconds > 0 else 0.0


def judge(disk: float, unpack: float, ratio: float, *, on: bool) -> tuple[bool, str]:
    """(whether lossless pays, why) at these rates, in bytes of blocks per second. on: what it is now."""
    if disk <= 0 or unpack <= 0 or ratio <= 1:
        return False, "the disk's speed is not known yet"
    limit = unpack * (1 - 1 / ratio)
    told = f"the disk reads {disk / 1e9:.2f} GB/s, lossless pays below {limit / 1e9:.2f}"
    return disk < limit * (_STAYS_ON if on else 1.0), told


def measure_codec(clock: Callable[[], float]) -> tuple[float, float, float]:
    """(pack rate, unpack rate, ratio) on the sample; the better of two rounds, because the first one warms up."""
    sample = lossless.sample()
    back = np.zeros(sample.size, np.uint8)
    best_pack = best_unpack = float("inf")
    ratio = 1.0
    for _ in range(2):
        began = clock()
        packed = lossless.pack(sample, lossless.SPLIT_BYTES)
        between = clock()
        if packed is None:
            return 0.0, 0.0, 1.0
        lossless.unpack(np.frombuffer(packed.memory, np.uint8), back)
        best_pack, best_unpack = min(best_pack, between - began), min(best_unpack, clock() - between)
        ratio = sample.size / packed.memory.nbytes
    return sample.size / max(best_pack, 1e-9), sample.size / max(best_unpack, 1e-9), ratio
