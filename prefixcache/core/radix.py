"""Path-compressed radix tree over packed block keys.

Rules: an edge is `bytes` of packed keys, compared with one `startswith`, which runs at memory speed; that is why the
tree is neither a dict per block (a Python object per block costs more than everything else together) nor an extension.
Walking changes nothing. Only `graft` and the callers of `split` change the shape. A node's last block is its tail; a
tail goes before what is in front of it. A pin protects a path up to a depth: one object per lease, not one per block.
A node is hot (its blocks are in memory) or cold (they are on disk only), never a mixture. `held` counts the children
below which something is hot or pinned, so that whether a node may leave memory is known without looking down.
Must not know: slots, sessions, policies. Rows are opaque u32 numbers, packed like the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from prefixcache.core.ids import KEY_BYTES, Rows

if TYPE_CHECKING:
    from prefixcache.core.namespaces import Namespace
    from prefixcache.core.nodes import NodeIndex
    from prefixcache.core.reservations import Reservation

ROW_BYTES: Final = 4
ROW_DTYPE: Final = np.dtype("<u4")
_FEW_NODES: Final = 8  # up to here a slice per node is cheaper than one gather of all their rows

# States of a node, in the order of what a walk may pass. Plain ints: they are compared on every step of a lookup.
VISIBLE: Final = 0
WAITING: Final = 1  # committed, its parent is not visible yet
FILLING: Final = 2  # a reservation's; nothing to see
DETACHED: Final = 3  # cleared while leased: unreachable, goes with its last pin

NOT_QUEUED: Final = -1  # `Node.rank`, which belongs to the policy


class Pin:
    """Protects the blocks of `node`'s path with a number below `depth` (node.start < depth <= node.end).

    holder: the list of its lease's or reservation's pins, so that a path cut in two can be pinned on both sides."""

    __slots__ = ("depth", "holder", "node")

    def __init__(self, node: Node, depth: int, holder: list[Pin]) -> None:
        self.node = node
        self.depth = depth
        self.holder = holder


class Node:
    """A run of blocks `[start, start + count)` of one path; `rows` holds one u32 per key of `edge`.

    first_row: its first row if each is known to follow the one before, which is usual (then slices will do where
    numpy's gathers cost ten times as much), else -1."""

    __slots__ = (
        "band", "children", "clean", "cold", "edge", "first_row", "held", "number", "owner", "parent", "pins", "rank",
        "rows", "space", "start", "state", "tick", "uses",
    )  # fmt: skip

    def __init__(self, space: Namespace | None, parent: Node | None, start: int, edge: bytes, rows: bytes) -> None:
        self.space = space
        self.parent = parent
        self.start = start
        self.hold(edge, rows)
        self.children: dict[bytes, Node] | None = None
        self.pins: set[Pin] | None = None
        self.owner: Reservation | None = None
        self.state = VISIBLE
        self.rank = NOT_QUEUED
        self.tick = 0
        self.cold = False
        self.held = 0
        self.clean = 0  # blocks off its tail that are on disk, while a policy has it (policy.tiered)
        self.uses = 0  # leases that ended over the whole of it
        self.band = 0  # its tail's priority, while a policy has it (policy.prioritised)
        self.number = 0  # in the index of nodes by row, where there is one

    @property
    def is_held(self) -> bool:
        """Whether it, or something below it, is in memory or pinned."""
        return not self.cold or self.pins is not None or self.held > 0

    def hold(self, edge: bytes, rows: bytes, first_row: int | None = None) -> None:
        """Changes what it holds. `first_row`: where the caller knows it."""
        self.edge = edge
        self.rows = rows
        self.first_row = first_row_of(rows) if first_row is None else first_row

    @property
    def count(self) -> int:
        return len(self.rows) // ROW_BYTES

    @property
    def end(self) -> int:
        return self.start + len(self.rows) // ROW_BYTES

    def row_array(self) -> Rows:
        """Row numbers of its blocks, read-only u32[count]."""
        return np.frombuffer(self.rows, ROW_DTYPE)

    def pinned_depth(self) -> int:
        """The depth below which its own blocks are pinned (`start` if none is)."""
        return max((pin.depth for pin in self.pins), default=self.start) if self.pins else self.start


class Path:
    """What a walk found: nodes from the root's child on, `blocks` keys deep (the last node maybe in part)."""

    __slots__ = ("blocks", "nodes")

    def __init__(self, nodes: list[Node], blocks: int) -> None:
        self.nodes = nodes
        self.blocks = blocks

    def packed_rows(self) -> bytes:
        """Rows of all its blocks, packed u32."""
        nodes = self.nodes
        if not nodes:
            return b""
        last = nodes[-1]
        wanted = (self.blocks - last.start) * ROW_BYTES
        if len(nodes) == 1:
            return last.rows if len(last.rows) == wanted else last.rows[:wanted]
        parts = [node.rows for node in nodes]
        if len(last.rows) != wanted:
            parts[-1] = last.rows[:wanted]
        return b"".join(parts)

    def stretches(self, first: int, end: int) -> list[slice | Rows]:
        """What to index a column of the table with for its blocks [first, end), 0 <= first < end <= blocks, one piece
        after the other."""
        nodes = self.nodes
        if len(nodes) == 1 and not nodes[0].start and (row := nodes[0].first_row) >= 0:
            return [slice(row + first, row + end)]
        pieces: list[slice | Rows] = []
        for node in nodes:
            start, row = node.start, node.first_row
            if row < 0 or len(nodes) > _FEW_NODES:
                return [np.frombuffer(self.packed_rows(), ROW_DTYPE)[first:end]]
            below = min(start + len(node.rows) // ROW_BYTES, end)
            above = max(first, start)
            if above < below:
                pieces.append(slice(row + above - start, row + below - start))
        return pieces


class RadixTree:
    """One namespace's tree."""

    def __init__(self, space: Namespace | None = None) -> None:
        self.root = Node(space, None, 0, b"", b"")
        self.space = space
        self.index: NodeIndex | None = None
        self.reshaped: list[list[Node]] = []  # of each tour under way (telling.Tour): nodes it is to look at again

    def walk(self, keys: bytes, highest: int = VISIBLE) -> Path:
        """The longest path along `keys` through nodes whose state is at most `highest`."""
        nodes: list[Node] = []
        children = self.root.children
        offset = 0
        size = len(keys)
        while children is not None and offset < size:
            child = children.get(keys[offset : offset + KEY_BYTES])
            if child is None or child.state > highest:
                break
            nodes.append(child)
            edge = child.edge
            if not keys.startswith(edge, offset):
                offset += _common_bytes(edge, keys, offset)
                break
            offset += len(edge)
            children = child.children
        return Path(nodes, offset // KEY_BYTES)

    def next_after(self, path: Path, keys: bytes) -> Node | None:
        """The node that continues `keys` behind `path`, whatever its state (None: nothing does)."""
        if path.nodes and path.nodes[-1].end != path.blocks:
            return None
        children = (path.nodes[-1] if path.nodes else self.root).children
        at = path.blocks * KEY_BYTES
        return children.get(keys[at : at + KEY_BYTES]) if children is not None else None

    def graft(self, path: Path, edge: bytes, rows: bytes, *, cold: bool = False) -> Node:
        """Adds `edge` (not empty, first key not there yet) as a new child where `path` ends, splitting its last node
        if the path ends inside it."""
        parent = self.root
        if path.nodes:
            parent = path.nodes[-1]
            if parent.end != path.blocks:
                parent = self.split(parent, path.blocks - parent.start)
        node = Node(self.space, parent, path.blocks, edge, rows)
        if parent.children is None:
            parent.children = {}
        parent.children[edge[:KEY_BYTES]] = node
        node.cold = cold
        if not cold:
            count_held(parent, 1)
        if self.index is not None:
            self.index.add(node)
        return node

    def split(self, node: Node, count: int) -> Node:
        """Puts the first `count` blocks (0 < count < node.count) into a new node above `node` and returns that.

        `node` keeps its identity for the tail, its children and its place in the policy's order. A reservation that
        fills it then fills both."""
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        assert 0 < count < node.count
        at = count * KEY_BYTES
        upper = Node(node.space, parent, node.start, node.edge[:at], node.rows[: count * ROW_BYTES])
        upper.state = node.state
        if node.owner is not None:
            upper.owner = node.owner
            node.owner.nodes[upper] = node.owner.nodes[node]
            node.owner.nodes[node] += count
        upper.tick = node.tick
        upper.uses = node.uses
        parent.children[upper.edge[:KEY_BYTES]] = upper
        node.hold(node.edge[at:], node.rows[count * ROW_BYTES :])
        node.start += count
        node.parent = upper
        upper.children = {node.edge[:KEY_BYTES]: node}
        if node.pins:
            moved = {pin for pin in node.pins if pin.depth <= node.start}
            for pin in moved:
                pin.node = upper
            upper.pins = moved or None
            node.pins = (node.pins - moved) or None
        # Whether the two together are held is as it was, so the parent's count stands.
        upper.cold = node.cold
        upper.held = int(node.is_held)
        if self.index is not None:
            self.index.add(upper)
        for waiting in self.reshaped:
            waiting.append(upper)
        return upper

    def join(self, node: Node) -> None:
        """Takes a node's parent (not the root, without another child, in the same state) into the node, which keeps its
        identity. A conversation stored turn by turn stays one edge that way. Never while somebody holds a Path."""
        parent = node.parent
        assert parent is not None
        above = parent.parent
        assert above is not None
        assert above.children is not None
        assert parent.children is not None
        assert len(parent.children) == 1
        assert parent.cold is node.cold
        if self.index is not None:
            self.index.move(parent, node)
        node.hold(parent.edge + node.edge, parent.rows + node.rows)
        node.start = parent.start
        node.uses = parent.uses
        node.parent = above
        above.children[node.edge[:KEY_BYTES]] = node
        if parent.pins:
            for pin in parent.pins:
                pin.node = node
            node.pins = parent.pins | (node.pins or set())
        parent.state = DETACHED  # it is no more, but may be waiting in a tour
        for waiting in self.reshaped:
            waiting.append(node)

    def set_cold(self, node: Node, *, cold: bool) -> None:
        """All blocks of a node left memory, or are in it again."""
        was_held = node.is_held
        node.cold = cold
        _tell_parent(node, was_held=was_held)

    def cut_tail(self, node: Node, count: int) -> Rows:
        """Takes the last `count` blocks off a node without children and returns their rows. A node left empty leaves
        its parent; its `parent` link stays for the caller to look at."""
        assert not node.children
        assert 0 < count <= node.count
        keep = node.count - count
        gone = node.row_array()[keep:]
        if keep:
            node.hold(node.edge[: keep * KEY_BYTES], node.rows[: keep * ROW_BYTES], node.first_row)
        else:
            self.unlink(node)
            node.hold(b"", b"", -1)
            if self.index is not None:
                self.index.drop(node)
        return gone

    def unlink(self, node: Node) -> None:
        """Takes `node` with all below it out of its parent."""
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        taken = parent.children.pop(node.edge[:KEY_BYTES])
        assert taken is node
        if not parent.children:
            parent.children = None
        if node.is_held:
            count_held(parent, -1)


def count_held(node: Node, change: int) -> None:
    """A child of `node` became held (1) or is no longer (-1)."""
    was_held = node.is_held
    node.held += change
    _tell_parent(node, was_held=was_held)


def _tell_parent(node: Node, *, was_held: bool) -> None:
    """After a change of `node`: its ancestors up to the first hot one count anew."""
    parent = node.parent
    while parent is not None and node.is_held is not was_held:
        before = parent.is_held
        parent.held += -1 if was_held else 1
        node, was_held, parent = parent, before, parent.parent


def hot_from(node: Node) -> Node:
    """`node` if it is hot, else the nearest hot one above it (at last the root, which counts as hot)."""
    while node.cold and node.parent is not None:
        node = node.parent
    return node


def first_row_of(rows: bytes) -> int:
    """See `Node.first_row`."""
    if len(rows) <= ROW_BYTES:
        return int.from_bytes(rows, "little") if rows else -1
    first = int.from_bytes(rows[:ROW_BYTES], "little")
    end = first + len(rows) // ROW_BYTES
    if int.from_bytes(rows[-ROW_BYTES:], "little") != end - 1:
        return -1
    return first if np.arange(first, end, dtype=ROW_DTYPE).tobytes() == rows else -1


def path_to(node: Node, depth: int) -> Path:
    """The path that ends in `node` at `depth`, without what was cut off above it (DETACHED)."""
    nodes = []
    above: Node | None = node
    while above is not None and above.parent is not None:
        nodes.append(above)
        above = above.parent
    return Path(nodes[::-1], depth)


def node_at(path: Path, end: int) -> Node:
    """The node in which the first `end` blocks (at least one) of a path end."""
    last = path.nodes[-1]
    return last if last.start < end else next(node for node in reversed(path.nodes) if node.start < end)


def pin_path(node: Node, depth: int, holder: list[Pin]) -> None:
    """Pins the path down to `depth`, which ends in `node`, for `holder`."""
    pin = Pin(node, depth, holder)
    holder.append(pin)
    if node.pins is None:
        was_held = node.is_held
        node.pins = {pin}
        if not was_held:
            _tell_parent(node, was_held=False)
    else:
        node.pins.add(pin)


def unpin(pin: Pin) -> Node:
    """Takes a pin off and returns the node it was on."""
    node = pin.node
    pins = node.pins
    assert pins is not None
    pins.remove(pin)
    if not pins:
        node.pins = None
        if not node.is_held:
            _tell_parent(node, was_held=True)
    return node


def subtree(node: Node) -> Iterator[Node]:
    """`node` and all below it, parents first. The tree must not change meanwhile (take a list where it does)."""
    stack = [node]
    while stack:
        top = stack.pop()
        yield top
        if top.children:
            stack.extend(top.children.values())


def _common_bytes(edge: bytes, keys: bytes, offset: int) -> int:
    """Bytes of whole keys that `edge` and `keys[offset:]` share, by halving; they are known to share the first key."""
    low, high = 1, min(len(edge), len(keys) - offset) // KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        # What is below `low` is known to be equal, so every byte is compared about twice at most.
        if edge[low * KEY_BYTES : middle * KEY_BYTES] == keys[offset + low * KEY_BYTES : offset + middle * KEY_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * KEY_BYTES
