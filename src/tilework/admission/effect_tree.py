"""Reservations in order of their deadlines, in a tree that stores the effect of any sequence of them.

Leaves have up to `_MOST_IN_LEAF` blocks; the children of a node differ in height by at most one (Adelson-Velsky and
Landis, 1962). The effect of a node's blocks (`admission.effects`) is computed when it is first needed, and dropped when
one of the blocks changes. So a change, and a query for any place in the order, take time in proportion to the logarithm
of the number of blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from tilework.admission.effects import (
    Delays,
    Marks,
    bounds_of,
    bounds_through,
    delays_of,
    lower,
    run_alone,
    scale_of,
    step_back,
)
from tilework.admission.reservation_timeline import DeviceTimes
from tilework.core.block import Block
from tilework.core.time import Margin

Key = tuple[int, int]
"""Place of a reservation in the order: its deadline and its job's id."""
_MOST_IN_LEAF = 32
_SCALES = 2  # The scale of admission's margin and that of the guard's.


class EffectTree:
    """Reservations by key, each with devices. `num_visits` counts the nodes whose effect was computed or used."""

    def __init__(self) -> None:
        self._root: _Leaf | _Node = _Leaf()
        self.num_visits = 0

    def put(self, key: Key, block: Block) -> None:
        """Add a reservation, or replace it."""
        self._root = _put(self._root, key, block)

    def remove(self, key: Key) -> None:
        """Remove a reservation, which must be there."""
        self._root = _removed(self._root, key) or _Leaf()

    def pass_before(self, key: Key, free_ns: DeviceTimes) -> None:
        """Advance the times at which devices are free to those after all reservations before this place."""
        node = self._root
        while isinstance(node, _Node):
            if key <= node.second_from:
                node = node.first
            else:
                self._delays(node.first).apply(free_ns)
                node = node.second
        self.num_visits += 1
        for block in node.blocks[: bisect_left(node.keys, key)]:
            run_alone(block, free_ns)

    def bounds_from(self, key: Key, margin: Margin) -> Marks:
        """Return the marks by which devices must be free for all reservations from this place on."""
        node = self._root
        scale = scale_of(margin)
        marks: Marks = {}
        later: list[_Leaf | _Node] = []
        while isinstance(node, _Node):
            if key <= node.second_from:
                later.append(node.second)
                node = node.first
            else:
                node = node.second
        for one in later:  # The last in the order comes first.
            marks = self._bounds_before(one, marks, scale)
        self.num_visits += 1
        for block in reversed(node.blocks[bisect_left(node.keys, key) :]):
            step_back(block, marks, scale)
        return marks

    def _bounds_before(self, node: _Leaf | _Node, later: Marks, scale: int) -> Marks:
        """Return the marks by which devices must be free before a node, for it and for the bounds after it."""
        bounds = self._bounds(node, scale)
        if not later:
            return dict(bounds)
        marks = bounds_through(self._delays(node), later, scale)
        lower(marks, bounds)
        return marks

    def _delays(self, node: _Leaf | _Node) -> Delays:
        self.num_visits += 1
        if node.delays is None:
            if isinstance(node, _Node):
                node.delays = self._delays(node.first).then(self._delays(node.second))
            else:
                node.delays = delays_of(node.blocks)
        return node.delays

    def _bounds(self, node: _Leaf | _Node, scale: int) -> Marks:
        self.num_visits += 1
        found = node.bounds.get(scale)
        if found is None:
            if isinstance(node, _Node):
                found = self._bounds_before(node.first, self._bounds(node.second, scale), scale)
            else:
                found = bounds_of(node.blocks, scale)
            if len(node.bounds) == _SCALES:
                node.bounds.clear()  # They are usually of margins that are used no more.
            node.bounds[scale] = found
        return found


@dataclass(slots=True, eq=False)
class _Leaf:
    """Blocks in order of their keys, and their effect as far as it is known: delays, and bounds by scale of margin."""

    keys: list[Key] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    delays: Delays | None = None
    bounds: dict[int, Marks] = field(default_factory=dict)

    @property
    def height(self) -> int:
        return 0


@dataclass(slots=True, eq=False)
class _Node:
    """Two parts of the order. The keys of the second part are not before `second_from`, all others are."""

    first: _Leaf | _Node
    second: _Leaf | _Node
    second_from: Key
    height: int = 0
    delays: Delays | None = None
    bounds: dict[int, Marks] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.height = 1 + max(self.first.height, self.second.height)


def _forget(node: _Leaf | _Node) -> None:
    node.delays = None
    node.bounds.clear()


def _put(node: _Leaf | _Node, key: Key, block: Block) -> _Leaf | _Node:
    """Return the node with this block in place of the one with the same key, if any."""
    _forget(node)
    if isinstance(node, _Node):
        if key < node.second_from:
            node.first = _put(node.first, key, block)
        else:
            node.second = _put(node.second, key, block)
        return _balanced(node)
    index = bisect_left(node.keys, key)
    if index < len(node.keys) and node.keys[index] == key:
        node.blocks[index] = block
        return node
    node.keys.insert(index, key)
    node.blocks.insert(index, block)
    if len(node.keys) <= _MOST_IN_LEAF:
        return node
    half = len(node.keys) // 2
    halves = _Leaf(node.keys[:half], node.blocks[:half]), _Leaf(node.keys[half:], node.blocks[half:])
    return _Node(*halves, node.keys[half])


def _removed(node: _Leaf | _Node, key: Key) -> _Leaf | _Node | None:
    """Return the node without the block of this key; None if it has no other."""
    _forget(node)
    if isinstance(node, _Leaf):
        index = bisect_left(node.keys, key)
        assert node.keys[index] == key
        del node.keys[index], node.blocks[index]
        return node if node.keys else None
    if key < node.second_from:
        first = _removed(node.first, key)
        if first is None:
            return node.second
        node.first = first
    else:
        second = _removed(node.second, key)
        if second is None:
            return node.first
        node.second = second
    return _joined(node)


def _joined(node: _Node) -> _Leaf | _Node:
    """Return the node, balanced; or one leaf in its place, if its blocks fit well into one."""
    first, second = node.first, node.second
    if (
        isinstance(first, _Leaf)
        and isinstance(second, _Leaf)
        and len(first.keys) + len(second.keys) <= _MOST_IN_LEAF // 2
    ):
        return _Leaf(first.keys + second.keys, first.blocks + second.blocks)
    return _balanced(node)


def _balanced(node: _Node) -> _Node:
    """Return a balanced node with the same blocks; the children of this one differ in height by at most two."""
    first, second = node.first, node.second
    if isinstance(first, _Node) and first.height > second.height + 1:
        if isinstance(first.second, _Node) and first.second.height > first.first.height:
            middle = first.second
            first = _Node(_Node(first.first, middle.first, first.second_from), middle.second, middle.second_from)
        return _Node(first.first, _Node(first.second, second, node.second_from), first.second_from)
    if isinstance(second, _Node) and second.height > first.height + 1:
        if isinstance(second.first, _Node) and second.first.height > second.second.height:
            middle = second.first
            second = _Node(middle.first, _Node(middle.second, second.second, second.second_from), middle.second_from)
        return _Node(_Node(first, second.first, node.second_from), second.second, second.second_from)
    node.height = 1 + max(first.height, second.height)
    return node
