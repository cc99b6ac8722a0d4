"""What the disk has told of one namespace after a restart, until it is in the tree.

Rules: blocks that follow each other are one run, with arrays and lists of all; an object for every block would cost
more than everything else a restart does. A block is in a run once all parts are known without which it is nothing, and
in `partial` before. A run keeps its place in the index of keys when it is attached: then it knows its rows.
Must not know: the tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.disk_events import DiskRecovered
from prefixcache.core.ids import KEY_BYTES
from prefixcache.core.namespaces import Namespace
from prefixcache.core.table import NO_SEGMENT

Where = tuple[int, int]
"""Segment and page."""
Column = NDArray[np.uint32]
AttachedPart = Callable[[bytes, int, int, Where], None]
"""Key, row, part, place."""
_KEY = np.dtype((np.void, KEY_BYTES))


class Run:
    """Blocks that follow each other, front to back: their keys, the key in front of the first, and per part segments
    and pages (u32[n]; NO_SEGMENT where a part was not told). rows: where they are in the table (-1: nowhere) once they
    are in the tree."""

    __slots__ = ("keys", "pages", "parent", "rows", "segments")

    def __init__(self, keys: list[bytes], parent: bytes, segments: list[Column], pages: list[Column]) -> None:
        self.keys = keys
        self.parent = parent
        self.segments = segments
        self.pages = pages
        self.rows: NDArray[np.int64] | None = None

    def place_of(self, key: bytes) -> int:
        """Which of its blocks this is, mostly the last."""
        return len(self.keys) - 1 if self.keys[-1] == key else self.keys.index(key)

    def tell(self, place: int, part: int, where: Where) -> None:
        """One more part of a block, unless it was told."""
        if part < len(self.segments) and self.segments[part][place] == NO_SEGMENT:
            self.segments[part][place], self.pages[part][place] = where

    @classmethod
    def joined(cls, chain: list[Run]) -> Run:
        """Runs that follow each other, as one."""
        segments = [np.concatenate(each) for each in zip(*(run.segments for run in chain), strict=True)]
        pages = [np.concatenate(each) for each in zip(*(run.pages for run in chain), strict=True)]
        return cls([key for run in chain for key in run.keys], chain[0].parent, segments, pages)

    def cut(self, first: int, end: int, parent: bytes) -> Run:
        """Some of its blocks, with the key in front of them."""
        which = slice(first, end)
        segments, pages = ([each[which] for each in columns] for columns in (self.segments, self.pages))
        return Run(self.keys[which], parent, segments, pages)


class _Blocks:
    """An event's records as blocks, in the order of their first record: keys, and per part where it lies. of_record:
    i64[records], which block each is of; whole: bool[n], which have all parts without which they are nothing."""

    def __init__(self, space: Namespace, event: DiskRecovered) -> None:
        keys = np.frombuffer(event.keys, np.uint8).reshape(-1, KEY_BYTES)
        parents = np.frombuffer(event.parents, np.uint8).reshape(-1, KEY_BYTES)
        count = len(space.strides)
        if count == 1:
            first = self.of_record = np.arange(len(keys))
        else:  # parts of a block are written one after the other
            begins = np.ones(len(keys), np.bool_)
            np.any(keys[1:] != keys[:-1], axis=1, out=begins[1:])
            first = np.flatnonzero(begins)
            self.of_record = np.cumsum(begins) - 1
        self._keys, self._parents = keys[first], parents[first]
        listed: Any = np.ascontiguousarray(self._keys).view(_KEY).ravel().tolist()
        self.keys: list[bytes] = listed
        self._segments = [np.zeros(len(first), np.uint32) for _ in range(count)]
        self._pages = [np.zeros(len(first), np.uint32) for _ in range(count)]
        told = np.zeros((count, len(first)), np.bool_)
        for part in range(count):
            mine = np.flatnonzero(event.parts == part)
            at = self.of_record[mine]
            self._segments[part][at], self._pages[part][at] = event.segments[mine], event.pages[mine]
            told[part][at] = True
        whole: Any = told[list(space.full_parts)].all(axis=0) if space.has_full else told.any(axis=0)
        self.whole: NDArray[np.bool_] = whole

    def parent(self, block: int) -> bytes:
        """The key in front of a block."""
        packed: bytes = self._parents[block].tobytes()
        return packed

    def runs(self, which: NDArray[np.bool_], *, linked: bool) -> Iterator[Run]:
        """Some of the blocks as runs. They come newest first, so what follows a block stands before it."""
        at = np.flatnonzero(which)[::-1]
        if not len(at):
            return
        cuts = np.arange(1, len(at))
        if linked:
            follows = (self._parents[at[1:]] == self._keys[at[:-1]]).all(axis=1)
            cuts = np.flatnonzero(~follows) + 1
        keys = self.keys if len(at) == len(self.keys) else [self.keys[block] for block in np.sort(at).tolist()]
        keys = keys[::-1]
        segments, pages = [each[at] for each in self._segments], [each[at] for each in self._pages]
        begin = 0
        for end in [*cuts.tolist(), len(at)]:
            piece = slice(begin, end)
            parent = self.parent(int(at[begin]))
            yield Run(keys[piece], parent, [each[piece] for each in segments], [each[piece] for each in pages])
            begin = end


class _Partial:
    """A block that is not whole: its parent, and where what was told of it lies; `left` parts are missing."""

    __slots__ = ("left", "parent", "places")

    def __init__(self, parent: bytes, space: Namespace) -> None:
        self.parent = parent
        self.places: list[Where | None] = [None] * len(space.strides)
        self.left = len(space.full_parts) or 1

    def tell(self, space: Namespace, part: int, where: Where) -> bool:
        """One part; whether that makes it whole."""
        if part >= len(self.places) or self.places[part] is not None:
            return False
        self.places[part] = where
        self.left -= part in space.full_parts or not space.has_full
        return not self.left


class Told:
    """All of one namespace. run_of: by key, attached or not; waiting: runs by the key in front of them, which is not
    in the tree."""

    def __init__(self, space: Namespace, attached_part: AttachedPart) -> None:
        """attached_part: is told of one more part of a block that is in the tree."""
        self.space = space
        self._attached_part = attached_part
        self.run_of: dict[bytes, Run] = {}
        self.partial: dict[bytes, _Partial] = {}
        self.waiting: dict[bytes, list[Run]] = {}
        self._fresh: set[bytes] = set()
        self.cleared: set[bytes] = set()
        self.all_cleared = False

    def left_over(self) -> list[bytes]:
        """Keys of what never got into the tree."""
        return [*self.partial, *(key for runs in self.waiting.values() for run in runs for key in run.keys)]

    def clear_all(self) -> None:
        """Nothing of it comes back."""
        self.all_cleared = True
        for known in (self.run_of, self.partial, self.waiting):
            known.clear()

    def clear(self, keys: set[bytes]) -> None:
        """These blocks do not come back; what follows them waits for ever."""
        self.cleared |= keys
        for key in keys:
            self.partial.pop(key, None)
            run = self.run_of.get(key)
            if run is not None and run.rows is None:
                self._take_out(run, run.place_of(key))

    def _take_out(self, run: Run, place: int) -> None:
        siblings = self.waiting[run.parent]
        siblings.remove(run)
        if not siblings:
            del self.waiting[run.parent]
        key = run.keys[place]
        del self.run_of[key]
        if place:
            self.wait(run.cut(0, place, run.parent))
        if place + 1 < len(run.keys):
            self.wait(run.cut(place + 1, len(run.keys), key))

    def wait(self, run: Run) -> None:
        """It is known from now on, and waits for what is in front of it."""
        self.run_of.update(dict.fromkeys(run.keys, run))
        self.waiting.setdefault(run.parent, []).append(run)
        self._fresh.add(run.parent)

    def keys_down_to(self, key: bytes) -> bytes:
        """Of a block that was attached: all keys from the first on."""
        pieces: list[bytes] = []
        run = self.run_of.get(key)
        while run is not None:
            pieces.append(b"".join(run.keys[: run.place_of(key) + 1]))
            key = run.parent
            run = self.run_of.get(key)
        return b"".join(reversed(pieces))

    def fresh(self) -> set[bytes]:
        """What somebody waits for since this was asked last."""
        fresh, self._fresh = self._fresh, set()
        return fresh

    def forget(self, run: Run) -> None:
        """It never gets into the tree."""
        for key in run.keys:
            del self.run_of[key]

    def take(self, event: DiskRecovered) -> None:
        """Everything an event tells; what it makes whole waits from now on."""
        blocks = _Blocks(self.space, event)
        fast = blocks.whole & self._are_new(blocks)
        if not fast.all():
            self._take_one_by_one(event, blocks, fast)
        for run in blocks.runs(fast, linked=self.space.foreign is None):
            self.wait(run)

    def _are_new(self, blocks: _Blocks) -> NDArray[np.bool_]:
        """bool[n]: blocks nothing was told of, each once in this event."""
        keys = blocks.keys
        unique = set(keys)
        # Of two sets or views the shorter one is walked through; of a dict all of it would be.
        every = (self.run_of.keys(), self.partial.keys(), self.cleared)
        known = [each for each in every if not each.isdisjoint(unique)]
        if not known and len(unique) == len(keys):
            return np.ones(len(keys), np.bool_)
        times = Counter(keys)
        for each in known:
            times.update(unique.intersection(each))
        return np.array([times[key] == 1 for key in keys], np.bool_)

    def _take_one_by_one(self, event: DiskRecovered, blocks: _Blocks, fast: NDArray[np.bool_]) -> None:
        """A block that is whole waits at once: another of its parts may come in the same event."""
        parts, segments, pages = event.parts.tolist(), event.segments.tolist(), event.pages.tolist()
        for record in np.flatnonzero(~fast[blocks.of_record]).tolist():
            block = int(blocks.of_record[record])
            where = segments[record], pages[record]
            run = self._note(blocks.keys[block], blocks.parent(block), parts[record], where)
            if run is not None:
                self.wait(run)

    def _note(self, key: bytes, parent: bytes, part: int, where: Where) -> Run | None:
        """One record; the block if it is whole now."""
        if key in self.cleared:
            return None
        run = self.run_of.get(key)
        if run is not None:
            place = run.place_of(key)
            if run.rows is None:
                run.tell(place, part, where)
            else:
                self._attached_part(key, int(run.rows[place]), part, where)
            return None
        block = self.partial.get(key)
        if block is None:
            block = self.partial[key] = _Partial(parent, self.space)
        if not block.tell(self.space, part, where):
            return None
        del self.partial[key]
        told = [each or (NO_SEGMENT, 0) for each in block.places]
        columns = [[np.array([each[which]], np.uint32) for each in told] for which in (0, 1)]
        return Run([key], block.parent, *columns)
