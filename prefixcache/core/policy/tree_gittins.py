"""TG, "tree Gittins": evict the leaf whose next use is least likely per second of waiting for it.

Rules: only leaves go. Each block has a class: how often it was seen, whether it was the last of its prompt, how well
known the prefix was that it came behind, how many new blocks came with it, and whether it came back at once. What a
class is worth at which age is learnt from what blocks of it did (`reuse`). The victim is the least of 64 leaves taken
at random. New blocks that are worth less than the victim stay out, the tail first. Blocks that went or stayed out are
ghosts, 4 for each block that fits, so that a reuse that came too late is learnt from as well, and a block that comes
back is not new.

Choices that look like bugs: the class of the prefix and "last" stay as they were when the block first came (taking the
latest prompt's instead costs 0.1 to 0.3 points); the worth is refreshed by the time of events, so a replayed trace
learns at the pace of the trace. Must not know: slots, sessions.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from prefixcache.core.ids import Rows
from prefixcache.core.policy.ages import Floats
from prefixcache.core.policy.base import Bids, Birth, Clock, equal_tail, tail_row
from prefixcache.core.policy.leaves import LeafTable
from prefixcache.core.policy.memory import GHOSTS_PER_BLOCK, Columns, Ghosts, Population, ghost_keys, tail_keys
from prefixcache.core.policy.reuse import Classes, ReuseRecord
from prefixcache.core.policy.sampling import Sampler
from prefixcache.core.radix import NOT_QUEUED, Node

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace

SAMPLED_LEAVES: Final = 64
NEW_STEPS: Final = (2, 6, 20, 60)  # new blocks of the request: below 2, below 6, ..., more
SEEN_STEPS: Final = np.array([3, 4, 7, 17])  # times seen: 2, 3, 4-6, 7-16, more
PREFIX_KINDS: Final = 3  # the block in front was never seen before, once, more often
QUICK_S: Final = 2.0  # a block that was used again sooner is one of a loop, which has a rhythm of its own
_TRAITS: Final = 2 * PREFIX_KINDS
_NEW_KINDS: Final = len(NEW_STEPS) + 1
_SEEN_KINDS: Final = len(SEEN_STEPS) + 1
_FIRST_SEEN_AGAIN: Final = _TRAITS * _NEW_KINDS
# Each class of blocks seen again comes twice, slow and quick; both are one family.
FAMILIES: Final = np.concatenate(
    (np.arange(_FIRST_SEEN_AGAIN), _FIRST_SEEN_AGAIN + np.repeat(np.arange(_SEEN_KINDS * _TRAITS), 2))
)
_MOST_SEEN: Final = 255

Ghost = tuple[int, int, int, float]
"""As in the columns: times seen, traits, class, time of last use."""


class TreeGittins:
    """See the module's rules. Columns: times seen (0: not there), traits (prefix kind x 2 + last), class, last use."""

    remembers = True

    def __init__(self, clock: Clock, seed: int) -> None:
        self._clock = clock
        self._columns = Columns([("seen", "u1"), ("traits", "u1"), ("class", "<i8"), ("time", "<f8")])
        self._leaves = LeafTable()
        self._reuse = ReuseRecord(FAMILIES)
        self._sampler = Sampler(seed, SAMPLED_LEAVES)
        self._ghosts: Ghosts[Ghost] = Ghosts()
        self._population = Population()
        self._chosen: Node | None = None
        self._chosen_at = -1
        self._chosen_worth = 0.0

    def add_leaf(self, node: Node, tick: int) -> None:
        node.tick = tick
        self._chosen = None
        self._leaves.add(node, *self._tail(node))

    def touch_leaf(self, node: Node, tick: int) -> None:
        node.tick = tick
        if node.rank != NOT_QUEUED:
            self._chosen = None
            self._leaves.change(node, *self._tail(node))

    def retick_leaf(self, node: Node, tick: int) -> None:
        self.touch_leaf(node, tick)

    def remove_leaf(self, node: Node) -> None:
        if node.rank != NOT_QUEUED:
            self._chosen = None
            self._leaves.remove(node)

    def victim(self) -> Node | None:
        """Stays the same until leaves or the time change, however often it is asked."""
        if self._chosen is None or self._chosen_at != self._clock.tick:
            self._chosen = self._choose()
            self._chosen_at = self._clock.tick
        return self._chosen

    def victim_worth(self) -> float:
        return self._chosen_worth

    def _choose(self) -> Node | None:
        count = len(self._leaves)
        if not count:
            return None
        places = np.arange(count) if count <= SAMPLED_LEAVES else self._sampler.indices(count)
        classes, times = self._leaves.at(places)
        worth = self._reuse.worth_at(classes, self._clock.now - times)
        least = int(worth.argmin())
        self._chosen_worth = float(worth[least])
        return self._leaves.node(int(places[least]))

    def run_length(self, node: Node, most: int) -> int:
        """Blocks of one use and one class are worth the same."""
        if most == 1 or node.space is None:
            return 1
        tail = self._columns.of(node.space)[node.row_array()[-most:]]
        return equal_tail((tail["class"] != tail["class"][-1]) | (tail["time"] != tail["time"][-1]))

    def leaf_count(self) -> int:
        return len(self._leaves)

    def expected(self, space: Namespace, keys: bytes, birth: Birth) -> Bids | None:
        """Room is wanted: time to look at what was learnt, and at what the new blocks would be worth."""
        self._reuse.refresh(self._clock.now)
        known = [self._ghosts.get(name) for name in ghost_keys(keys)]
        classes = self._classes(space, birth, known, at_end=True)[2]
        return Bids(self._reuse.worth_at(classes, np.zeros(len(classes))).tolist())

    def used(self, space: Namespace, rows: Rows) -> None:
        now = self._clock.now
        columns = self._columns.of(space)
        before = columns[rows]
        self._reuse.end(before["class"], before["time"], now, reused=True)
        seen = np.minimum(before["seen"].astype(np.int64) + 1, _MOST_SEEN)
        classes = class_seen_again(seen, before["traits"], now - before["time"])
        columns["seen"][rows] = seen
        self._begin(columns, rows, classes)

    def stored(self, space: Namespace, node: Node, birth: Birth) -> None:
        columns = self._columns.of(space)
        rows = node.row_array()
        seen, traits, classes = self._meet(space, node.edge, birth)
        columns["seen"][rows] = seen
        columns["traits"][rows] = traits
        self._begin(columns, rows, classes)
        self._population.add(len(rows))
        self._drop_ghosts()

    def refused(self, space: Namespace, keys: bytes, birth: Birth) -> None:
        """What got no room may be wanted again all the same."""
        now = self._clock.now
        seen, traits, classes = self._meet(space, keys, birth)
        ghosts = zip(ghost_keys(keys), seen.tolist(), traits.tolist(), classes.tolist(), strict=True)
        for name, *ghost in reversed(list(ghosts)):
            self._ghosts.add(name, (*ghost, now))
        self._reuse.begin(classes, now)
        self._drop_ghosts()

    def _meet(self, space: Namespace, keys: bytes, birth: Birth) -> tuple[Classes, Classes, Classes]:
        """(times seen, traits, class) of blocks that were not there; the wait of those that are ghosts ends."""
        known = [self._ghosts.pop(name) for name in ghost_keys(keys)]
        self._end([ghost[2:] for ghost in known if ghost is not None], reused=True)
        at_end = bool(birth.last_key) and keys.endswith(birth.last_key)
        return self._classes(space, birth, known, at_end=at_end)

    def _classes(
        self, space: Namespace, birth: Birth, known: list[Ghost | None], *, at_end: bool
    ) -> tuple[Classes, Classes, Classes]:
        """(times seen, traits, class) of blocks that come now, `known` as ghosts or not. at_end: they end a prompt."""
        now = self._clock.now
        prefix = prefix_kind(int(self._columns.of(space)["seen"][birth.hit_row])) if birth.hit_row >= 0 else 0
        seen = np.ones(len(known), np.int64)
        traits = np.full(len(known), prefix * 2)
        traits[-1] += at_end
        classes = class_of_new(birth.new_blocks, traits)
        back = [place for place, ghost in enumerate(known) if ghost is not None]
        if back:
            recalled = np.array([_recall(ghost, now) for ghost in known if ghost is not None])
            seen[back] = recalled[:, 0]
            traits[back] = prefix * 2 + recalled[:, 1].astype(np.int64)
            classes[back] = class_seen_again(seen[back], traits[back], recalled[:, 2])
        return seen, traits, classes

    def _end(self, waited: list[tuple[int, float]], *, reused: bool) -> None:
        if waited:
            pairs = np.array(waited)
            self._reuse.end(pairs[:, 0].astype(np.int64), pairs[:, 1], self._clock.now, reused=reused)

    def evicted(self, space: Namespace, node: Node, count: int) -> None:
        columns = self._columns.of(space)
        rows = node.row_array()[-count:]
        for name, entry in zip(tail_keys(node, count), reversed(columns[rows].tolist()), strict=True):
            if entry[0]:
                self._ghosts.add(name, entry)
        self._gone(columns, rows)

    def forgotten(self, space: Namespace, rows: Rows) -> None:
        columns = self._columns.of(space)
        rows = rows[columns["seen"][rows] > 0]
        if len(rows):
            cleared = columns[rows]
            self._reuse.end(cleared["class"], cleared["time"], self._clock.now, reused=False)
            self._gone(columns, rows)

    def _begin(self, columns: NDArray[Any], rows: Rows, classes: Classes) -> None:
        columns["class"][rows] = classes
        columns["time"][rows] = self._clock.now
        self._reuse.begin(classes, self._clock.now)

    def _gone(self, columns: NDArray[Any], rows: Rows) -> None:
        columns["seen"][rows] = 0
        self._population.live -= len(rows)

    def _drop_ghosts(self) -> None:
        dropped = []
        # Not at each eviction: there are many, each followed by a storing or a refusal.
        while len(self._ghosts) > GHOSTS_PER_BLOCK * self._population.peak:
            dropped.append(self._ghosts.pop_oldest()[2:])
        self._end(dropped, reused=False)

    def _tail(self, node: Node) -> tuple[int, float]:
        """(class, time of last use) of the tail."""
        assert node.space is not None
        entry = self._columns.of(node.space)[tail_row(node)]
        return int(entry["class"]), float(entry["time"])


def prefix_kind(seen: int) -> int:
    """How well known a prefix was whose deepest block has been seen so often, this time included."""
    return min(max(seen - 1, 0), PREFIX_KINDS - 1)


def class_of_new(new_blocks: int, traits: Classes) -> Classes:
    """Class of blocks seen once."""
    return traits * _NEW_KINDS + bisect_right(NEW_STEPS, new_blocks)


def class_seen_again(seen: Classes, traits: NDArray[Any], waited_s: Floats) -> Classes:
    """Class of blocks seen more than once, the last time after `waited_s`."""
    kinds: Classes = SEEN_STEPS.searchsorted(seen, side="right") * _TRAITS + traits
    return _FIRST_SEEN_AGAIN + 2 * kinds + (waited_s < QUICK_S)


def _recall(ghost: Ghost, now: float) -> tuple[int, int, float]:
    """(times seen with this one, whether last when it first came, seconds since) of a ghost that comes back."""
    return min(ghost[0] + 1, _MOST_SEEN), ghost[1] & 1, now - ghost[3]
