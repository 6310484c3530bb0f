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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilework.core.interfaces import Block, Demand
from tilework.core.time import NS_PER_MS
from tilework.policy.plane import Levels, place, place_all


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
_MANY = 64


def slacks_ns(levels: Levels, blocks: Iterable[Block], margin: Margin, now_ns: int) -> list[int]:
    """By how much each block could end later and still be in time by the margin. `levels` is used up."""
    fixed_ns, share = margin.fixed_ns, margin.share
    return [
        block.due_ns - end_ns - fixed_ns - int(share * (end_ns - now_ns))
        for block, end_ns in zip(blocks, place_all(levels, blocks), strict=True)
    ]


class Promises:
    """The blocks of all promised jobs, in order of their deadlines, on the devices as they are at one time.

    There must be a device.
    """

    def __init__(self, levels: Levels, blocks: Sequence[Block], now_ns: int) -> None:
        self.levels = levels
        self._blocks = blocks
        self._now_ns = now_ns
        self._firsts: dict[Demand, tuple[int, Levels]] = {}
        self._slacks: list[int] | None = None

    def end_ns(self, due_ns: int, demand: Demand) -> int | None:
        """When a newcomer that is due then would end; None if it would break a promise or be late itself."""
        index = self._place_of(due_ns)
        levels = self._levels(0, index, self.levels)
        end_ns = place(levels, demand, self._now_ns)
        if ADMISSION_MARGIN.due_ns(end_ns, self._now_ns) > due_ns or not self._in_time(levels, index):
            return None
        return end_ns

    def earliest_ns(self, demand: Demand, at_least_ns: int = 0) -> int:
        """A deadline, from `at_least_ns` on, with which a newcomer would be let in: the earliest, or nearly so."""
        if demand not in self._firsts:
            self._firsts[demand] = self._first(demand)
        index, levels = self._firsts[demand]
        while True:
            due_ns = max(at_least_ns, self._due_ns(demand, index, levels))
            if index >= len(self._blocks) or self.end_ns(due_ns, demand) is not None:
                return due_ns
            behind = max(index + 1, self._place_of(due_ns))
            index, levels = behind, self._levels(index, behind, levels)

    def _first(self, demand: Demand) -> tuple[int, Levels]:
        """A place in the order at which a newcomer breaks no promise of those behind it, and the levels there.

        It is the first at which everybody behind has the newcomer's time to spare, which is more than they may need: up
        to `_MANY` promises the first place of all is found by bisection.
        """
        index = self._first_to_spare(demand.run_ns)
        if len(self._blocks) <= _MANY:
            index = self._bisect(demand, index)
        return index, self._levels(0, index, self.levels)

    def _first_to_spare(self, time_ns: int) -> int:
        if self._slacks is None:
            self._slacks = slacks_ns(self._levels(0, 0, self.levels), self._blocks, ADMISSION_MARGIN, self._now_ns)
        behind = range(len(self._slacks), 0, -1)
        return next((index for index in behind if self._slacks[index - 1] < time_ns), 0)

    def _bisect(self, demand: Demand, high: int) -> int:
        low = 0
        while low < high:
            middle = (low + high) // 2
            levels = self._levels(0, middle, self.levels)
            place(levels, demand, self._now_ns)
            if self._in_time(levels, middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _due_ns(self, demand: Demand, index: int, levels: Levels) -> int:
        """The earliest deadline that suits a place in the order."""
        end_ns = place(self._levels(0, 0, levels), demand, self._now_ns)
        before_ns = self._blocks[index - 1].due_ns if index else 0
        return max(before_ns, ADMISSION_MARGIN.due_ns(end_ns, self._now_ns))

    def _place_of(self, due_ns: int) -> int:
        """Behind those that are due at the same time."""
        return bisect_left(self._blocks, due_ns + 1, key=_due_ns)

    def _levels(self, first: int, last: int, levels: Levels) -> Levels:
        """When devices are free after the blocks from `first` to before `last`; `levels` is left as it is."""
        after = [list(node) for node in levels]
        for _ in place_all(after, self._blocks[first:last]):
            pass
        return after

    def _in_time(self, levels: Levels, index: int) -> bool:
        """Whether the blocks from `index` on are; `levels` is used up."""
        fixed_ns, share, now_ns = ADMISSION_MARGIN.fixed_ns, ADMISSION_MARGIN.share, self._now_ns
        blocks = self._blocks[index:]
        return all(
            end_ns + fixed_ns + int(share * (end_ns - now_ns)) <= block.due_ns
            for block, end_ns in zip(blocks, place_all(levels, blocks), strict=True)
        )


def _due_ns(block: Block) -> int:
    return block.due_ns
