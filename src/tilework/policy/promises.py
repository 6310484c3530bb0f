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
from itertools import accumulate
from math import inf

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
_MANY, _STRIDE = 64, 32


def slacks_ns(levels: Levels, blocks: Sequence[Block], margin: Margin, now_ns: int) -> list[int]:
    """By how much each block could end later and still be in time by the margin. `levels` is used up."""
    fixed_ns, share = margin.fixed_ns, margin.share
    return [
        block.due_ns - end_ns - fixed_ns - int(share * (end_ns - now_ns))
        for block, end_ns in zip(blocks, place_all(levels, blocks), strict=True)
    ]


class Promises:
    """The blocks of all promised jobs, in order of their deadlines, on the devices as they are at one time.

    There must be a device. The blocks are placed once, when that is first needed; a newcomer at some place in the order
    is then placed from the nearest of the levels that were kept, and mostly what those behind it have to spare
    says that it breaks no promise, so that an answer takes far less time than placing all blocks.
    """

    def __init__(self, levels: Levels, blocks: Sequence[Block], now_ns: int) -> None:
        self.levels = levels
        self.blocks = blocks
        self._now_ns = now_ns
        self._placed: _Placed | None = None

    def at(self, now_ns: int) -> None:
        """Go on to a later time, at which levels and blocks are still the same."""
        self._now_ns = now_ns

    def end_ns(self, due_ns: int, demand: Demand) -> int | None:
        """When a newcomer that is due then would end; None if it would break a promise or be late itself."""
        index = self._place_of(due_ns)
        before = self._levels_at(index)
        after = [list(node) for node in before]
        end_ns = place(after, demand, self._now_ns)
        is_late = ADMISSION_MARGIN.due_ns(end_ns, self._now_ns) > due_ns
        return None if is_late or not self._in_time(before, after, index) else end_ns

    def earliest_ns(self, demand: Demand, at_least_ns: int = 0) -> int:
        """A deadline, from `at_least_ns` on, with which a newcomer would be let in: the earliest, or nearly so."""
        index = self._first(demand)
        while True:
            due_ns = max(at_least_ns, self._due_ns(demand, index))
            if index >= len(self.blocks) or self.end_ns(due_ns, demand) is not None:
                return due_ns
            index = max(index + 1, self._place_of(due_ns))

    def _first(self, demand: Demand) -> int:
        """A place in the order at which a newcomer breaks no promise of those behind it.

        It is the first at which everybody behind has the newcomer's time to spare, which is more than they may need: up
        to `_MANY` promises the first place of all is found by bisection.
        """
        index = bisect_left(self._all.spare_ns, demand.run_ns - self._gained_ns)
        return self._bisect(demand, index) if len(self.blocks) <= _MANY else index

    def _bisect(self, demand: Demand, high: int) -> int:
        low = 0
        while low < high:
            middle = (low + high) // 2
            before = self._levels_at(middle)
            after = [list(node) for node in before]
            place(after, demand, self._now_ns)
            if self._in_time(before, after, middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _due_ns(self, demand: Demand, index: int) -> int:
        """The earliest deadline that suits a place in the order."""
        end_ns = place(self._levels_at(index), demand, self._now_ns)
        before_ns = self.blocks[index - 1].due_ns if index else 0
        return max(before_ns, ADMISSION_MARGIN.due_ns(end_ns, self._now_ns))

    def _place_of(self, due_ns: int) -> int:
        """Behind those that are due at the same time."""
        return bisect_left(self.blocks, due_ns + 1, key=_due_ns)

    @property
    def _all(self) -> _Placed:
        if self._placed is None:
            self._placed = _Placed.of(self.levels, self.blocks, self._now_ns)
        return self._placed

    @property
    def _gained_ns(self) -> int:
        """What everybody has to spare more than when the blocks were placed: the margin becomes smaller with time."""
        return int(ADMISSION_MARGIN.share * (self._now_ns - self._all.at_ns))

    def _levels_at(self, index: int) -> Levels:
        """When devices are free after the blocks before `index`."""
        kept = index // _STRIDE
        levels = [list(node) for node in self._all.levels[kept]]
        place_all(levels, self.blocks[kept * _STRIDE : index])
        return levels

    def _in_time(self, before: Levels, after: Levels, index: int) -> bool:
        """Whether the blocks from `index` on are, with and without a newcomer before them; `after` is used up."""
        if self._all.spare_ns[index] + self._gained_ns >= self._most_delay_ns(before, after):
            return True
        fixed_ns, share, now_ns = ADMISSION_MARGIN.fixed_ns, ADMISSION_MARGIN.share, self._now_ns
        blocks = self.blocks[index:]
        return all(
            end_ns + fixed_ns + int(share * (end_ns - now_ns)) <= block.due_ns
            for block, end_ns in zip(blocks, place_all(after, blocks), strict=True)
        )

    def _most_delay_ns(self, before: Levels, after: Levels) -> float:
        """By how much a newcomer delays anybody at most, with the margin that grows with it.

        On one node, where every block takes one device: by no more than it raises any of the levels, in order, since
        placing a block keeps that so. One that is ready later may change places with another, for as long as that.
        Where some take several devices there is no such bound.
        """
        if len(self.levels) > 1 or self._all.widest > 1:
            return inf
        delay_ns = max(high - low for low, high in zip(before[0], after[0], strict=True))
        return (1 + ADMISSION_MARGIN.share) * (delay_ns + self._all.wait_ns) + 1


@dataclass(frozen=True, slots=True)
class _Placed:
    """The blocks as they were placed at `at_ns`.

    `spare_ns` of each is what it and all behind it have at least; the last entry is of nobody. `levels` are before each
    `_STRIDE`-th block. `wait_ns` is the longest that one which is not ready could keep the first free device waiting.
    """

    at_ns: int
    spare_ns: list[float]
    levels: list[Levels]
    wait_ns: int
    widest: int

    @staticmethod
    def of(levels: Levels, blocks: Sequence[Block], now_ns: int) -> _Placed:
        after, kept = [list(node) for node in levels], []
        slacks: list[float] = []
        for first in range(0, len(blocks) + 1, _STRIDE):
            kept.append([list(node) for node in after])
            slacks += slacks_ns(after, blocks[first : first + _STRIDE], ADMISSION_MARGIN, now_ns)
        spare_ns = list(accumulate(reversed([*slacks, inf]), min))[::-1]
        free_ns = min(min(node) for node in levels)
        wait_ns = max((block.ready_ns - free_ns for block in blocks), default=0)
        widest = max((block.demand.width for block in blocks), default=0)
        return _Placed(at_ns=now_ns, spare_ns=spare_ns, levels=kept, wait_ns=max(0, wait_ns), widest=widest)


def _due_ns(block: Block) -> int:
    return block.due_ns
