"""Every policy once more, as plainly as it can be said: dicts and lists over single blocks, no tree, no heaps, no runs.

A block is a prefix, written as a string; its parent is the string without its last letter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixcache.core.policy.gdsf import ATTENTION_TOKENS


def blocks_of(prompt: str) -> list[str]:
    """Blocks of a prompt of one letter a block."""
    return [prompt[:end] for end in range(1, len(prompt) + 1)]


class Rule:
    """What a policy says: which of these leaves goes."""

    def victim(self, leaves: set[str]) -> str:
        raise AssertionError

    def expected(self, blocks: list[str]) -> None:
        pass

    def used(self, blocks: list[str]) -> None:
        pass

    def stored(self, blocks: list[str]) -> None:
        pass

    def evicted(self, block: str) -> None:
        pass


@dataclass
class NaiveCache:
    """A leaf-first cache of single blocks. `gone`: every victim in order."""

    capacity: int
    rule: Rule
    held: set[str] = field(default_factory=set)
    gone: list[str] = field(default_factory=list)

    def serve(self, prompt: str) -> int:
        blocks = blocks_of(prompt)
        hits = next((place for place, block in enumerate(blocks) if block not in self.held), len(blocks))
        path, missing = blocks[:hits], blocks[hits:]
        if path:
            self.rule.used(path)
        if missing:
            self.rule.expected(missing)
            wanted = min(len(missing), self.capacity)
            self._make_room(wanted, path)
            granted = missing[: min(wanted, self.capacity - len(self.held))]
            self.held.update(granted)
            if granted:
                self.rule.stored(granted)
        return hits

    def _make_room(self, wanted: int, path: list[str]) -> None:
        parked: set[str] = set()
        while self.capacity - len(self.held) < wanted:
            leaves = self.held - {block[:-1] for block in self.held} - parked
            if not leaves:
                return
            victim = self.rule.victim(leaves)
            if victim in path:
                parked.add(victim)
                continue
            self.rule.evicted(victim)
            self.held.discard(victim)
            self.gone.append(victim)


class NaiveLru(Rule):
    def __init__(self) -> None:
        self.now = 0
        self.last: dict[str, int] = {}

    def victim(self, leaves: set[str]) -> str:
        return min(leaves, key=self.last.__getitem__)

    def _touch(self, blocks: list[str]) -> None:
        # Root last: it was used after what follows it.
        for block in reversed(blocks):
            self.now += 1
            self.last[block] = self.now

    used = stored = _touch


class NaiveLru2(Rule):
    def __init__(self, capacity: int) -> None:
        self.now = 0
        self.uses: dict[str, list[int]] = {}
        self.ghosts: list[str] = []
        self.capacity = capacity
        self.held = self.peak = 0

    def victim(self, leaves: set[str]) -> str:
        return min(leaves, key=lambda block: ([0, *self.uses[block]][-2], self.uses[block][-1]))

    def used(self, blocks: list[str]) -> None:
        self.now += 1
        for block in blocks:
            self.uses[block].append(self.now)

    def stored(self, blocks: list[str]) -> None:
        self.now += 1
        for block in blocks:
            if block in self.ghosts:
                self.ghosts.remove(block)
            else:
                self.uses[block] = []
            self.uses[block].append(self.now)
        self.held += len(blocks)
        self.peak = max(self.peak, self.held)

    def evicted(self, block: str) -> None:
        self.held -= 1
        self.ghosts.append(block)
        # A later use follows the last one, whatever came before.
        self.uses[block] = self.uses[block][-1:]
        del self.ghosts[: max(0, len(self.ghosts) - 4 * self.peak)]


class NaiveArc(Rule):
    def __init__(self) -> None:
        self.order: list[str] = []
        self.once: set[str] = set()
        self.again: set[str] = set()
        self.once_ghosts: list[str] = []
        self.again_ghosts: list[str] = []
        self.share = 0.0
        self.peak = 0

    def victim(self, leaves: set[str]) -> str:
        from_once = [block for block in self.order if block in leaves & self.once]
        from_again = [block for block in self.order if block in leaves & self.again]
        first, other = (from_once, from_again) if len(self.once) > self.share else (from_again, from_once)
        return (first or other)[0]

    def expected(self, blocks: list[str]) -> None:
        for block in blocks:
            if block in self.once_ghosts:
                step = max(1.0, len(self.again_ghosts) / len(self.once_ghosts))
                self.share = min(self.share + step, self.peak)
            elif block in self.again_ghosts:
                step = max(1.0, len(self.once_ghosts) / len(self.again_ghosts))
                self.share = max(self.share - step, 0)

    def _touch(self, blocks: list[str]) -> None:
        self.order = [block for block in self.order if block not in blocks] + blocks[::-1]

    def used(self, blocks: list[str]) -> None:
        self._touch(blocks)
        self.once -= set(blocks)
        self.again |= set(blocks)

    def stored(self, blocks: list[str]) -> None:
        self._touch(blocks)
        for block in blocks:
            known = [ghosts for ghosts in (self.once_ghosts, self.again_ghosts) if block in ghosts]
            for ghosts in known:
                ghosts.remove(block)
            (self.again if known else self.once).add(block)
        self.peak = max(self.peak, len(self.once) + len(self.again))

    def evicted(self, block: str) -> None:
        self.order.remove(block)
        if block in self.once:
            self.once_ghosts.append(block)
        else:
            self.again_ghosts.append(block)
        self.once.discard(block)
        self.again.discard(block)
        while len(self.once) + len(self.once_ghosts) > self.peak and self.once_ghosts:
            self.once_ghosts.pop(0)
        while len(self.once_ghosts) + len(self.again_ghosts) > self.peak and self.again_ghosts:
            self.again_ghosts.pop(0)


class NaiveS3Fifo(Rule):
    def __init__(self) -> None:
        self.small: list[str] = []
        self.main: list[str] = []
        self.hits: dict[str, int] = {}
        self.ghosts: list[str] = []
        self.peak = 0

    def victim(self, leaves: set[str]) -> str:
        while True:
            small = next((block for block in self.small if block in leaves), None)
            main = next((block for block in self.main if block in leaves), None)
            if small is not None and (len(self.small) * 10 > self.peak or main is None):
                if self.hits[small] <= 1:
                    return small
                self.small.remove(small)
                self.main.append(small)
                self.hits[small] = 0
            elif main is not None:
                if self.hits[main] == 0:
                    return main
                self.main.remove(main)
                self.main.append(main)
                self.hits[main] -= 1

    def used(self, blocks: list[str]) -> None:
        for block in blocks:
            self.hits[block] = min(self.hits[block] + 1, 3)

    def stored(self, blocks: list[str]) -> None:
        for block in blocks[::-1]:
            self.hits[block] = 0
            if block in self.ghosts:
                self.ghosts.remove(block)
                self.main.append(block)
            else:
                self.small.append(block)
        self.peak = max(self.peak, len(self.small) + len(self.main))

    def evicted(self, block: str) -> None:
        if block in self.small:
            self.small.remove(block)
            self.ghosts.append(block)
            del self.ghosts[: max(0, len(self.ghosts) - self.peak)]
        else:
            self.main.remove(block)


class NaiveGdsf(Rule):
    def __init__(self, block_tokens: int, block_bytes: int) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.age = 0.0
        self.uses: dict[str, int] = {}
        self.priority: dict[str, float] = {}
        self.now = 0
        self.last: dict[str, int] = {}

    def victim(self, leaves: set[str]) -> str:
        return min(leaves, key=lambda block: (self.priority[block], self.last[block]))

    def _count(self, blocks: list[str]) -> None:
        self.now += 1
        for block in blocks:
            self.uses[block] = self.uses.get(block, 0) + 1
            depth = (len(block) - 1) * self.block_tokens
            cost = self.block_tokens * (1 + depth / ATTENTION_TOKENS) / self.block_bytes
            self.priority[block] = self.age + self.uses[block] * cost
            self.last[block] = self.now

    used = stored = _count

    def evicted(self, block: str) -> None:
        self.age = max(self.age, self.priority[block])
        del self.uses[block]
