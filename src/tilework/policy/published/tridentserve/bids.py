"""What it is worth to dispatch a waiting request now, in each way that is open to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tilework.policy.published.tridentserve.layout import Pool
from tilework.policy.published.tridentserve.program import PoolOption
from tilework.policy.published.tridentserve.ways import Way, Ways
from tilework.policy.toolkit.tasks import Task

ON_TIME, LATE, MOST_SPEED = 1_000_000, 100_000, 1_000
"""Rewards in thousandths; see `TridentServe`."""


@dataclass(slots=True, eq=False)
class Bid:
    """A waiting request and its rewards: `ways` and `options` go together, the slowest first.

    `earliest_ns` is when it ends in the quickest of its ways.
    """

    task: Task
    ways: tuple[Way, ...]
    options: tuple[PoolOption, ...]
    earliest_ns: int

    def within(self, widest: Mapping[Pool, int]) -> Sequence[PoolOption]:
        """The options, without those that need more devices of a pool than any node has free."""
        if all(option.width <= widest.get(option.pool, 0) for option in self.options):
            return self.options
        return tuple([option for option in self.options if option.width <= widest.get(option.pool, 0)])

    def way(self, option: PoolOption) -> Way:
        return self.ways[self.options.index(option)]


def read_bids(tasks: Iterable[Task], ways: Ways) -> list[Bid]:
    """The bids of tasks that have not begun, without those that have no way."""
    tables: dict[int, _RewardTable] = {}
    bids = []
    for task in tasks:
        if found := ways.of(task):
            table = tables.get(id(found))
            if table is None:
                table = tables[id(found)] = _RewardTable.of(found)
            bids.append(table.bid(task))
    return bids


@dataclass(frozen=True, slots=True)
class _RewardTable:
    """Ways, and what the speed of each adds to the reward, less its penalty.

    They go from slow to quick, so the number of those in time says which they are.
    """

    ways: tuple[Way, ...]
    added: tuple[int, ...]
    best_ns: int
    _known: dict[tuple[int, int], tuple[PoolOption, ...]] = field(default_factory=dict)

    @staticmethod
    def of(ways: tuple[Way, ...]) -> _RewardTable:
        best_ns = min(way.run_ns for way in ways)
        added = tuple([MOST_SPEED * best_ns // max(1, way.run_ns) - way.penalty for way in ways])
        return _RewardTable(ways, added, best_ns)

    def bid(self, task: Task) -> Bid:
        deadline_ns, best_ns = task.job.request.deadline_ns, self.best_ns
        slack_ns = (task.due_ns if deadline_ns is None else deadline_ns) - task.ready_ns
        reward, num = ON_TIME, len(self.ways)
        if deadline_ns is None or slack_ns < best_ns:
            late_ns = max(0, best_ns - slack_ns)
            reward = min(ON_TIME, LATE + LATE * late_ns // max(1, best_ns))
        elif slack_ns < self.ways[0].run_ns:
            num = sum([way.run_ns <= slack_ns for way in self.ways])
        options = self._known.get((reward, num))
        if options is None:
            pairs = zip(self.ways[-num:], self.added[-num:], strict=True)
            options = tuple([PoolOption(way.degree, reward + added, way.pool, way.run_ns) for way, added in pairs])
            self._known[reward, num] = options
        return Bid(task, self.ways[-num:], options, task.ready_ns + best_ns)
