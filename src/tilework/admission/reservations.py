"""Reservations: which requests came in on the condition that their deadline is met, and whether all of them still can
be.

Theory of operation. What is left of each promised job is a block of the GPU x time plane, and it has a *home*: the
devices on which it is to run. A device runs the blocks that have their home there in the order of their deadlines, each
as soon as all of its devices have come to it and it is ready. If all end in time then, all promises can be kept,
whatever else is waiting: the homes are a proof.

A block ends at the largest of some sums: of when a device is free, or a block ready, and of what runs between. So a
proof cannot be spoiled by what goes well: a device that is free earlier, a job that is ready earlier or has less
left, or is gone, lets nobody end later. That is why homes are kept. To place blocks anew, each where it can begin
first, has no such property, on several nodes, with wide blocks or where some are ready later: a device that comes free
early can make a promise late. And what goes wrong costs no more than it takes: nobody ends later by more than devices
and jobs come later.

Going backwards from the deadlines gives for each device until when the blocks can spare it (`homes.latest_ends`): they
are all in time exactly if each device is free, and each job ready, by then. These things preserve the proof:

- admission lets a promise in only if there is one with it (`Reservations.place`), and so gives it its home;
- the guard (`admission.reservation_guard`) lets a policy start only what leaves one: as it is, or with the home of a
  started job moved
  to where it was started, or with all homes chosen anew;
- it starts blocks at their homes when they cannot wait any longer;
- where one is endangered or has lost devices, it chooses homes anew or widens blocks, as far as that helps.

So every policy keeps promises, also one that knows nothing of deadlines. The margins are for what passes between works
and for works that take longer than predicted; admission's is the larger one, so that the guard has some to lose.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from tilework.admission.reservation_timeline import NEVER, Nodes, Times, choose, follow, latest_ends
from tilework.core.interfaces import Block, Demand
from tilework.core.work import Group
from tilework.policy.toolkit.margin import ADMISSION_MARGIN

_MANY, _STRIDE = 256, 32


class Reservations:
    """The blocks of all promised jobs, in order of their deadlines, on the devices as they are at one time.

    `levels` says when each device is free; there must be one. What the blocks before and behind some place in the order
    make of that is worked out once, when it is first needed, at so many places that it takes few blocks to know it at
    any. So most answers take far less time than looking at all blocks.
    """

    def __init__(self, levels: Times, nodes: Nodes, blocks: Sequence[Block], now_ns: int) -> None:
        self.levels = levels
        self.nodes = nodes
        self.blocks = blocks
        self._now_ns = now_ns
        self._stride = 1 if len(blocks) <= _MANY else _STRIDE
        self._levels = [levels]
        self._latest = [dict.fromkeys(levels, NEVER)]

    def at(self, now_ns: int) -> None:
        """Go on to a later time, at which levels and blocks are still the same; blocks may then be a little later."""
        self._now_ns = now_ns

    def place(self, due_ns: int, demand: Demand) -> Block | None:
        """The block of a newcomer that is due then; None if it would be late, or break a promise, wherever it is.

        Homes of others stay, unless there are few promises and it would be refused: then all homes are chosen anew, and
        if that makes room, the guard will do so, too.
        """
        index = self._place_of(due_ns)
        found = self._at_home(index, demand)
        if found is not None and ADMISSION_MARGIN.due_ns(found[1], self._now_ns) <= due_ns:
            return Block(due_ns, 0, demand, found[0])
        return self._anew(index, due_ns, demand) if len(self.blocks) <= _MANY else None

    def earliest_ns(self, demand: Demand, at_least_ns: int = 0) -> int:
        """A deadline, from `at_least_ns` on, with which a newcomer would be let in.

        The earliest with which all homes can stay; with many promises nearly so, since not all places are tried.
        """
        for index in self._places(self._place_of(at_least_ns)):
            found = self._at_home(index, demand)
            if found is not None:
                before_ns = self.blocks[index - 1].due_ns if index else 0
                due_ns = max(at_least_ns, before_ns, ADMISSION_MARGIN.due_ns(found[1], self._now_ns))
                if index == len(self.blocks) or due_ns < self.blocks[index].due_ns:
                    return due_ns
        raise AssertionError("there is room behind all others")

    def _at_home(self, index: int, demand: Demand) -> tuple[Group, int] | None:
        """Devices for a newcomer at a place in the order, which those behind it can spare, and its end on them."""
        levels, latest_ns = self._around(index)
        home = choose(levels, self.nodes, demand, self._now_ns, latest_ns)
        if home is None:
            return None
        return home, max([self._now_ns, *(levels[device_id] for device_id in home)]) + demand.run_ns

    def _anew(self, index: int, due_ns: int, demand: Demand) -> Block | None:
        newcomer = Block(due_ns, self._now_ns, demand)
        blocks = [*self.blocks[:index], newcomer, *self.blocks[index:]]
        homes, ends_ns = follow(dict(self.levels), self.nodes, blocks, anew=True)
        for block, end_ns in zip(blocks, ends_ns, strict=True):
            if ADMISSION_MARGIN.due_ns(end_ns, self._now_ns) > block.due_ns:
                return None
        return Block(due_ns, 0, demand, homes[index])

    def _place_of(self, due_ns: int) -> int:
        """Behind those that are due at the same time."""
        return bisect_left(self.blocks, due_ns + 1, key=_due_ns)

    def _places(self, first: int) -> Iterator[int]:
        """Places from one on: all of them, or those at which most is known, and the last."""
        yield first
        yield from range(first // self._stride * self._stride + self._stride, len(self.blocks), self._stride)
        if first < len(self.blocks):
            yield len(self.blocks)

    def _around(self, index: int) -> tuple[Times, Times]:
        """When devices are free after the blocks before a place in the order, and until when those behind spare them.

        Not to be changed.
        """
        stride, mark, next_mark = self._stride, index // self._stride, -(-index // self._stride)
        levels, latest_ns = self._levels_at(mark), self._latest_at(next_mark)
        if mark < next_mark:
            levels, latest_ns = dict(levels), dict(latest_ns)
            follow(levels, self.nodes, self.blocks[mark * stride : index])
            self._go_back(latest_ns, index, next_mark * stride)
        return levels, latest_ns

    def _levels_at(self, mark: int) -> Times:
        marks, stride = self._levels, self._stride
        while len(marks) <= mark:
            levels, first = dict(marks[-1]), (len(marks) - 1) * stride
            follow(levels, self.nodes, self.blocks[first : first + stride])
            marks.append(levels)
        return marks[mark]

    def _latest_at(self, mark: int) -> Times:
        marks, stride = self._latest, self._stride  # The last mark comes first.
        last = -(-len(self.blocks) // stride)
        while last - len(marks) >= mark:
            latest_ns, first = dict(marks[-1]), (last - len(marks)) * stride
            self._go_back(latest_ns, first, first + stride)
            marks.append(latest_ns)
        return marks[last - mark]

    def _go_back(self, latest_ns: Times, first: int, last: int) -> None:
        blocks = self.blocks[first:last]
        latest_ends(latest_ns, blocks, ADMISSION_MARGIN.latest_all_ns(blocks, self._now_ns))


def _due_ns(block: Block) -> int:
    return block.due_ns
