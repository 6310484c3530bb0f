"""Promises: which requests came in on the condition that their deadline is met, and whether all of them still can be.

Theory of operation. What is left of each promised job is a block of the GPU x time plane. If these blocks, placed one
after another in the order of their deadlines on the devices as they become free, all end in time, then all promises
can be kept, whatever else is waiting: the placement is a certificate. Three things preserve it:

- admission lets a promise in only if there is a certificate with it (`Promises.end_ns`);
- the guard (`policy.guard`) lets a policy start only what leaves one;
- and it starts the first blocks itself when they cannot wait any longer.

So every policy keeps promises, also one that knows nothing of deadlines. The margins are for what passes between works
and for works that take longer than predicted; admission's is the larger one, so that the guard has some to lose.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from tilework.core.interfaces import Demand
from tilework.core.time import NS_PER_MS
from tilework.policy.plane import Levels, place


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """How much earlier than its deadline a block is to end: a fixed part, and a share of the time until then."""

    fixed_ns: int
    share: float

    def due_ns(self, end_ns: int, now_ns: int) -> int:
        """The earliest deadline for which a block may end then."""
        return end_ns + self.fixed_ns + int(self.share * (end_ns - now_ns))


ADMISSION_MARGIN = Margin(fixed_ns=80 * NS_PER_MS, share=0.06)
GUARD_MARGIN = Margin(fixed_ns=40 * NS_PER_MS, share=0.03)


@dataclass(frozen=True, slots=True)
class Block:
    """What is left of a promised job: `demand`, not before `ready_ns`, due at `due_ns`."""

    due_ns: int
    ready_ns: int
    demand: Demand


def slacks_ns(levels: Levels, blocks: Sequence[Block], margin: Margin, now_ns: int) -> list[int]:
    """By how much each block could end later and still be in time by the margin. `levels` is used up."""
    return [block.due_ns - margin.due_ns(place(levels, block.demand, block.ready_ns), now_ns) for block in blocks]


class Promises:
    """The blocks of all promised jobs, in order of their deadlines, on the devices as they are at one time.

    There must be a device.
    """

    def __init__(self, levels: Levels, blocks: Sequence[Block], now_ns: int) -> None:
        self._free_ns = levels
        self._blocks = blocks
        self._now_ns = now_ns
        self._firsts: dict[Demand, int] = {}

    def end_ns(self, due_ns: int, demand: Demand) -> int | None:
        """When a newcomer that is due then would end; None if it would break a promise or be late itself."""
        index = self._place_of(due_ns)
        levels = self._levels(index)
        end_ns = place(levels, demand, self._now_ns)
        if ADMISSION_MARGIN.due_ns(end_ns, self._now_ns) > due_ns or not self._in_time(levels, index):
            return None
        return end_ns

    def earliest_ns(self, demand: Demand, at_least_ns: int = 0) -> int:
        """The earliest deadline, from `at_least_ns` on, with which a newcomer would be let in."""
        index = self._first(demand)
        while True:
            due_ns = max(at_least_ns, self._due_ns(demand, index))
            true_index = self._place_of(due_ns)
            if true_index <= index:
                return due_ns
            index = true_index

    def _first(self, demand: Demand) -> int:
        """The first place in the order at which a newcomer breaks no promise of those behind it."""
        if demand not in self._firsts:
            self._firsts[demand] = self._search(demand)
        return self._firsts[demand]

    def _search(self, demand: Demand) -> int:
        low, high = 0, len(self._blocks)
        while low < high:
            middle = (low + high) // 2
            levels = self._levels(middle)
            place(levels, demand, self._now_ns)
            if self._in_time(levels, middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _due_ns(self, demand: Demand, index: int) -> int:
        """The earliest deadline that suits a place in the order."""
        end_ns = place(self._levels(index), demand, self._now_ns)
        before_ns = self._blocks[index - 1].due_ns if index else 0
        return max(before_ns, ADMISSION_MARGIN.due_ns(end_ns, self._now_ns))

    def _place_of(self, due_ns: int) -> int:
        """Behind those that are due at the same time."""
        return bisect_left(self._blocks, due_ns + 1, key=_due_ns)

    def _levels(self, index: int) -> Levels:
        """When devices are free after the first `index` blocks."""
        levels = [list(node) for node in self._free_ns]
        for block in self._blocks[:index]:
            place(levels, block.demand, block.ready_ns)
        return levels

    def _in_time(self, levels: Levels, index: int) -> bool:
        """Whether the blocks from `index` on are; `levels` is used up."""
        return all(
            ADMISSION_MARGIN.due_ns(place(levels, block.demand, block.ready_ns), self._now_ns) <= block.due_ns
            for block in self._blocks[index:]
        )


def _due_ns(block: Block) -> int:
    return block.due_ns
