"""The radix tree beside a plain dict from prefix to row, under random operations."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixcache.core.ids import KEY_BYTES
from prefixcache.core.radix import ROW_DTYPE, VISIBLE, WAITING, Node, Path, Pin, RadixTree, pin_path, subtree, unpin

Prefix = tuple[int, ...]
prompts = st.lists(st.integers(0, 2), max_size=9).map(tuple)


def packed(prompt: Prefix) -> bytes:
    """Keys that name their whole prefix, as real ones do."""
    return b"".join(bytes(prompt[: end + 1]).ljust(KEY_BYTES, b"\xff") for end in range(len(prompt)))


class RadixBesideDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.model: dict[Prefix, int] = {}
        self.hidden: set[Prefix] = set()
        self.pins: list[tuple[Prefix, list[Pin]]] = []
        self.next_row = 0

    def stored(self, prompt: Prefix) -> int:
        """How many leading blocks the model holds and shows."""
        length = 0
        while length < len(prompt) and prompt[: length + 1] in self.model:
            if prompt[: length + 1] in self.hidden:
                break
            length += 1
        return length

    def known(self, prompt: Prefix) -> int:
        length = 0
        while length < len(prompt) and prompt[: length + 1] in self.model:
            length += 1
        return length

    @rule(prompt=prompts)
    def walk(self, prompt: Prefix) -> None:
        shape = [(node.start, node.edge) for node in subtree(self.tree.root)]
        path = self.tree.walk(packed(prompt))
        assert path.blocks == self.stored(prompt)
        rows = np.frombuffer(path.packed_rows(), ROW_DTYPE).tolist()
        assert rows == [self.model[prompt[: end + 1]] for end in range(path.blocks)]
        behind = self.tree.next_after(path, packed(prompt))
        assert (behind is not None) == (self.known(prompt) > path.blocks)
        assert shape == [(node.start, node.edge) for node in subtree(self.tree.root)], "a lookup changed the tree"

    @rule(prompt=prompts, hidden=st.booleans())
    def insert(self, prompt: Prefix, hidden: bool) -> None:
        keys = packed(prompt)
        path = self.tree.walk(keys, WAITING)
        assert path.blocks == self.known(prompt)
        if path.blocks == len(prompt):
            return
        rows = np.arange(self.next_row, self.next_row + len(prompt) - path.blocks, dtype=ROW_DTYPE)
        self.next_row += len(rows)
        parent_shows = all(node.state == VISIBLE for node in path.nodes)
        node = self.tree.graft(path, keys[path.blocks * KEY_BYTES :], rows.tobytes())
        node.state = WAITING if hidden or not parent_shows else VISIBLE
        for place, row in enumerate(rows.tolist()):
            prefix = prompt[: path.blocks + place + 1]
            self.model[prefix] = row
            if node.state == WAITING:
                self.hidden.add(prefix)

    @rule(prompt=prompts, count=st.integers(1, 3))
    def cut(self, prompt: Prefix, count: int) -> None:
        """The tail of a leaf goes, as far as no pin is on it."""
        path = self.tree.walk(packed(prompt), WAITING)
        if not path.nodes or path.nodes[-1].children:
            return
        node = path.nodes[-1]
        leaf = self.prefix(node)
        count = min(count, node.end - node.pinned_depth())
        if not count:
            assert any(leaf[: len(held)] == held and len(held) == node.end for held, _ in self.pins)
            return
        gone = self.tree.cut_tail(node, count)
        expected = [self.model.pop(leaf[:end]) for end in range(len(leaf) - count + 1, len(leaf) + 1)]
        assert gone.tolist() == expected
        self.hidden &= set(self.model)

    @rule(prompt=prompts)
    def pin(self, prompt: Prefix) -> None:
        path = self.tree.walk(packed(prompt))
        if path.blocks:
            holder: list[Pin] = []
            pin_path(path.nodes[-1], path.blocks, holder)
            self.pins.append((prompt[: path.blocks], holder))

    @rule(which=st.integers(0, 20))
    def unpin(self, which: int) -> None:
        if self.pins:
            _, holder = self.pins.pop(which % len(self.pins))
            unpin(holder[0])

    def prefix(self, node: Node) -> Prefix:
        """The prompt that ends where the node ends, read off its last key."""
        return tuple(node.edge[-KEY_BYTES:][: node.end])

    @invariant()
    def same_blocks(self) -> None:
        rows = {}
        for node in subtree(self.tree.root):
            for place, row in enumerate(node.row_array().tolist()):
                rows[self.prefix(node)[: node.start + place + 1]] = row
        assert rows == self.model

    @invariant()
    def compressed(self) -> None:
        for node in subtree(self.tree.root):
            assert node.parent is None or node.count > 0
            for first, child in (node.children or {}).items():
                assert child.edge.startswith(first)
                assert child.start == node.end
                assert child.parent is node

    @invariant()
    def pins_hold(self) -> None:
        for held, holder in self.pins:
            pin = holder[0]
            assert pin in (pin.node.pins or ())
            assert pin.node.start < pin.depth <= pin.node.end
            assert self.prefix(pin.node)[: pin.depth] == held
            assert held in self.model


TestRadix = RadixBesideDict.TestCase
TestRadix.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_walk_needs_every_byte_equal() -> None:
    """A key that only its middle or its end shares with a stored one is another key."""
    tree = RadixTree()
    keys = packed((1, 2, 3, 4, 5))
    tree.graft(Path([], 0), keys, np.arange(5, dtype=ROW_DTYPE).tobytes())
    for block in range(5):
        for byte in (0, KEY_BYTES // 2, KEY_BYTES - 1):
            at = block * KEY_BYTES + byte
            wrong = keys[:at] + bytes([keys[at] ^ 1]) + keys[at + 1 :]
            assert tree.walk(wrong).blocks == block
