"""One host pool's pages in the cache: SGLang's keys and page numbers in, a truth value for each page out.

Rules:
1. Nothing is raised: a page that could not be found, loaded or stored is one with a counted reason.
2. A key is SGLang's page hash with where in the model the bytes are from (first head, ranks), so no rank takes another
   one's page; all else is the namespace's.
3. Long lists are asked in turns, and only up to the first turn with a page missing where only a prefix counts.

It must not know what SGLang's calls look like.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from prefixcache_client import ForeignLookup
from prefixcache_client.foreign import ForeignCache
from prefixcache_client.reasons import INTERNAL, NOT_CACHED
from prefixcache_client.tensors import KvTensors
from prefixcache_sglang.counting import Counts, Transferred
from prefixcache_sglang.forms import Form
from prefixcache_sglang.pages import Places

log = logging.getLogger("prefixcache_sglang")

Truths = npt.NDArray[np.bool_]
Parents = Sequence[str | None]

ORPHANED: Final = "orphaned"
BAD_INDICES: Final = "bad_indices"
_MOST_KEYS: Final = 2048
_MOST_BYTES: Final = 256 << 20
# What an engine's own classes, or tensors that are not what they were, may raise.
ENGINE_ERRORS: Final = (
    ValueError, TypeError, LookupError, AttributeError, OSError, RuntimeError, MemoryError, AssertionError,
)  # fmt: skip


class Shelf:
    """See the rules above. Thread-safe."""

    def __init__(self, name: str, cache: ForeignCache, form: Form, suffixes: Sequence[bytes], counts: Counts) -> None:
        """`suffixes`: what is added to a page's key for each of its pieces."""
        self.name = name
        self.form = form
        self.writes = True
        """Whether this rank stores what it has; another one does it for all where not."""
        self._cache = cache
        self._suffixes = suffixes
        self._counts = counts
        self._told: set[str] = set()
        page_bytes = cache.ns.block_bytes * form.pieces
        self._turn = max(1, min(_MOST_KEYS // form.pieces, _MOST_BYTES // page_bytes))

    def present(self, keys: Sequence[str], *, prefix: bool) -> Truths:
        """Which pages are stored; with `prefix` only told up to a turn with one missing."""
        found = np.zeros(len(keys), np.bool_)
        reason = ""
        turn = max(1, _MOST_KEYS // self.form.pieces)
        for first in range(0, len(keys), turn):
            some = keys[first : first + turn]
            try:
                looked = self._cache.lookup(self._names(some))
            except ENGINE_ERRORS as error:
                looked = ForeignLookup(np.zeros(len(some) * self.form.pieces, np.bool_), self._mistake(error))
            found[first : first + len(some)] = self._whole(looked.present)
            reason = looked.reason or reason
            if prefix and reason:
                break
        count = int(np.count_nonzero(found))
        self._counts.asked(count, len(keys) - count, reason or NOT_CACHED)
        return found

    def load(self, keys: Sequence[str], indices: Places) -> Truths:
        """Copy pages to where the pool has them from `indices` (i64[n], first token) on; which ones are there now."""
        if not self._fits(keys, indices):
            self._counts.loaded(Transferred(0, 0, 0.0), len(keys), BAD_INDICES)
            return np.zeros(len(keys), np.bool_)
        loaded = np.zeros(len(keys), np.bool_)
        for turn in self._turns(len(keys)):
            some = indices[turn]

            def whole(pages: KvTensors, there: Truths, some: Places = some) -> None:
                self.form.finish(pages, some, there)

            loaded[turn] = self._load(keys[turn], partial(self.form.pages, some), whole)
            if not loaded[turn].all():
                break  # what follows a missing page is of no use
        return loaded

    def load_flat(self, keys: Sequence[str], targets: Sequence[torch.Tensor]) -> Truths:
        """Copy pages into flat tensors, as the pool makes them; which ones are there now."""
        loaded = np.zeros(len(keys), np.bool_)
        for turn in self._turns(len(keys)):
            some = targets[turn]
            try:
                joined, pages = self.form.flat(some)
            except ENGINE_ERRORS as error:
                self._counts.loaded(Transferred(0, 0, 0.0), len(some), self._mistake(error))
                break

            def whole(
                _: KvTensors, there: Truths, some: Sequence[torch.Tensor] = some, joined: torch.Tensor = joined
            ) -> None:  # fmt: skip
                for at in np.flatnonzero(there).tolist():
                    some[at].reshape(-1).copy_(joined[at].view(some[at].dtype).reshape(-1))

            loaded[turn] = self._load(keys[turn], partial(_as_it_is, pages), whole)
        return loaded

    def store(self, keys: Sequence[str], indices: Places, parents: Parents) -> Truths:
        """Store the pool's pages; which ones are stored now, by this call or before. `parents`: each page's own in
        front of it, or None."""
        if not self._fits(keys, indices):
            self._counts.stored(Transferred(0, 0, 0.0), {BAD_INDICES: len(keys)})
            return np.zeros(len(keys), np.bool_)
        stored = np.zeros(len(keys), np.bool_)
        for turn in self._turns(len(keys)):
            stored[turn] = self._store(keys[turn], partial(self.form.pages, indices[turn]), parents[turn])
        return stored

    def store_flat(self, keys: Sequence[str], values: Sequence[torch.Tensor], parents: Parents) -> Truths:
        """Store flat pages, as the pool makes them."""
        stored = np.zeros(len(keys), np.bool_)
        for turn in self._turns(len(keys)):
            stored[turn] = self._store(keys[turn], partial(self._flat, values[turn]), parents[turn])
        return stored

    def _flat(self, values: Sequence[torch.Tensor]) -> KvTensors:
        return self.form.flat(values)[1]

    def _turns(self, count: int) -> Iterator[slice]:
        for first in range(0, count, self._turn):
            yield slice(first, min(first + self._turn, count))

    def _load(
        self, keys: Sequence[str], made: Callable[[], KvTensors], whole: Callable[[KvTensors, Truths], None]
    ) -> Truths:  # fmt: skip
        """`whole`: told which pages are there, to finish them."""
        began, moved, there = time.monotonic(), 0, np.zeros(len(keys), np.bool_)
        try:
            with self._cache.acquire(self._names(keys)) as lease:
                reason = lease.reason
                if lease:
                    pages = made()
                    copied = lease.copy_to(pages)
                    reason, moved = copied.reason or reason, copied.size_bytes
                    valid = self._whole(lease.copied)
                    whole(pages, valid)
                    there = valid
        except ENGINE_ERRORS as error:
            reason = self._mistake(error)
        count = int(np.count_nonzero(there))
        done = Transferred(count, moved, time.monotonic() - began)
        self._counts.loaded(done, len(keys) - count, reason or NOT_CACHED)
        return there

    def _store(self, keys: Sequence[str], made: Callable[[], KvTensors], parents: Parents) -> Truths:
        began = time.monotonic()
        try:
            names, pages = self._names(keys), made()
            above = self._names([parent or "" for parent in parents]) if any(parents) else []
            put = self._cache.store(names, pages, parents=above)
            blocks, moved = put.stored_blocks, put.size_bytes
            if put.refused.get(ORPHANED):
                # The page in front of it is in the engine's own memory only: this one may be stored all the same.
                put = self._cache.store(names, pages)
                blocks, moved = blocks + put.stored_blocks, moved + put.size_bytes
            stored = put.stored
            if not put.reason and not stored.all():
                stored = stored | self._cache.lookup(names).present
        except ENGINE_ERRORS as error:
            self._counts.stored(Transferred(0, 0, 0.0), {self._mistake(error): len(keys)})
            return np.zeros(len(keys), np.bool_)
        pieces = self.form.pieces
        done = Transferred(blocks // pieces, moved, time.monotonic() - began)
        self._counts.stored(done, {reason: -(-count // pieces) for reason, count in put.refused.items()})
        return self._whole(stored)

    def _names(self, keys: Sequence[str]) -> list[bytes]:
        """The cache's names of pages, piece by piece; b"" for a key that is empty."""
        return [key.encode() + suffix if key else b"" for suffix in self._suffixes for key in keys]

    def _whole(self, pieces: Truths) -> Truths:
        return np.asarray(pieces.reshape(self.form.pieces, -1).all(axis=0), np.bool_)

    def _fits(self, keys: Sequence[str], indices: Places) -> bool:
        """Whether there is one page of the pool for each key, beginning where a page does."""
        return len(keys) == len(indices) and not (indices % self.form.page_tokens).any()

    def _mistake(self, error: BaseException) -> str:
        """The reason of what should not happen, told in the log once for each kind."""
        what = f"{type(error).__name__}: {error}"
        if type(error).__name__ not in self._told:
            self._told.add(type(error).__name__)
            log.warning("pages of the pool %s cannot be moved (%s, told once)", self.name, what)
        return INTERNAL


def _as_it_is(pages: KvTensors) -> KvTensors:
    return pages
