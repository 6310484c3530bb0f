"""The worth of dispatching a waiting request now, or a batch of them, in each way that is open to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tilework.policy.placement.profile import ClassProfile
from tilework.policy.published.tridentserve.layout import Pool
from tilework.policy.published.tridentserve.program import PoolOption
from tilework.policy.published.tridentserve.ways import Way, Ways
from tilework.policy.toolkit.tasks import Task

ON_TIME, LATE, MOST_SPEED = 1_000_000, 100_000, 1_000
"""Rewards in thousandths; see `TridentServe`."""


@dataclass(slots=True, eq=False)
class Bid:
    """Waiting requests that begin together, as a rule one, and the rewards of all: `ways` and `options` go together.

    The slowest way is first. The first of `tasks` is the most urgent. `earliest_ns` is when they end in the quickest of
    their ways.
    """

    tasks: tuple[Task, ...]
    ways: tuple[Way, ...]
    options: tuple[PoolOption, ...]
    earliest_ns: int

    def within(self, widest: Mapping[Pool, int]) -> Sequence[PoolOption]:
        """Return the options, without those that need more devices of a pool than any node has free."""
        if all(option.width <= widest.get(option.pool, 0) for option in self.options):
            return self.options
        return tuple([option for option in self.options if option.width <= widest.get(option.pool, 0)])

    def way(self, option: PoolOption) -> Way:
        return self.ways[self.options.index(option)]


def read_bids(batches: Iterable[tuple[Task, ...]], ways: Ways) -> list[Bid]:
    """Return the bids of tasks that have not begun, without those that have no way."""
    tables: dict[int, _RewardTable] = {}
    bids = []
    for tasks in batches:
        if found := ways.of(tasks[0], len(tasks)):
            table = tables.get(id(found))
            if table is None:
                table = tables[id(found)] = _RewardTable.of(found)
            bids.append(table.bid(tasks))
    return bids


_Alike = tuple[ClassProfile, int]
"""The profile of a class, of which there is one, and a position."""


def one_by_one(tasks: Iterable[Task]) -> list[tuple[Task, ...]]:
    """Return each task by itself."""
    return [(task,) for task in tasks]


def batched(tasks: Iterable[Task], ways: Ways) -> list[tuple[Task, ...]]:
    """Return tasks that have not begun, in order of urgency: those of one class in batches, by their first ones.

    A batch is as large as is optimal for its steps (`Ways.most_together`), or smaller if a member would be late by it.

    Source: TridentServe appendix E.1.
    """
    found: list[list[Task]] = []
    latest: dict[_Alike, list[Task]] = {}
    most_of: dict[_Alike, int] = {}
    for task in tasks:
        key = ways.profile_of(task), task.job.left.position
        most = most_of.get(key)
        if most is None:
            most = most_of[key] = ways.most_together(task)
        if most == 1 or not task.job.may_share or task.job.works:
            found.append([task])
            continue
        batch = latest.get(key)
        if batch is None or len(batch) == most or not _all_in_time([*batch, task], ways):
            batch = latest[key] = []
            found.append(batch)
        batch.append(task)
    return [tuple(batch) for batch in found]


def _all_in_time(tasks: Sequence[Task], ways: Ways) -> bool:
    """Return whether there is a way for a batch in which no task is late that would be on time by itself."""
    alone, together = ways.of(tasks[0]), ways.of(tasks[0], len(tasks))
    if not alone or not together:
        return False
    deadlines_ns = [(task.job.request.deadline_ns, task.ready_ns) for task in tasks]
    slacks_ns = [deadline_ns - ready_ns for deadline_ns, ready_ns in deadlines_ns if deadline_ns is not None]
    return not any(alone[-1].run_ns <= slack_ns < together[-1].run_ns for slack_ns in slacks_ns)


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

    def bid(self, tasks: tuple[Task, ...]) -> Bid:
        rewards = 0
        num = len(self.ways)
        for task in tasks:
            reward, its_num = self._reward(task)
            rewards += reward
            num = min(num, its_num)
        options = self._known.get((rewards, num))
        if options is None:
            pairs = zip(self.ways[-num:], self.added[-num:], strict=True)
            options = tuple([PoolOption(way.degree, rewards + added, way.pool, way.run_ns) for way, added in pairs])
            self._known[rewards, num] = options
        return Bid(tasks, self.ways[-num:], options, tasks[0].ready_ns + self.best_ns)

    def _reward(self, task: Task) -> tuple[int, int]:
        """Return what a task is worth, and in how many of the ways: the quickest ones, if it can be on time."""
        deadline_ns = task.job.request.deadline_ns
        best_ns = self.best_ns
        slack_ns = (task.due_ns if deadline_ns is None else deadline_ns) - task.ready_ns
        if deadline_ns is None or slack_ns < best_ns:
            late_ns = max(0, best_ns - slack_ns)
            return min(ON_TIME, LATE + LATE * late_ns // max(1, best_ns)), len(self.ways)
        if slack_ns < self.ways[0].run_ns:
            return ON_TIME, sum([way.run_ns <= slack_ns for way in self.ways])
        return ON_TIME, len(self.ways)
