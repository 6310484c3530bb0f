"""What it is worth to dispatch a waiting request now, on each number of devices that is efficient for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tilework.policy.toolkit.degrees import efficient_speeds
from tilework.policy.toolkit.demand import Speed, worthwhile
from tilework.policy.toolkit.knapsack import Option
from tilework.policy.toolkit.tasks import Task

ON_TIME, LATE, MOST_SPEED = 1_000_000, 100_000, 1_000
"""Rewards in thousandths; see `TridentServe`."""


@dataclass(slots=True, eq=False)
class Bid:
    """A waiting request and its rewards: `speeds` and `options` go together, ascending.

    `earliest_ns` is when it ends at the quickest of its efficient degrees.
    """

    task: Task
    speeds: tuple[Speed, ...]
    options: tuple[Option, ...]
    earliest_ns: int

    def within(self, widest: int) -> tuple[Option, ...]:
        """The options, without those that need more devices than any node has free."""
        if self.options[-1].width <= widest:
            return self.options
        return tuple([option for option in self.options if option.width <= widest])

    def reward(self, speed: Speed) -> int:
        """The reward at a speed, in whole numbers."""
        return self.options[self.speeds.index(speed)].value // MOST_SPEED


def read_bids(tasks: Iterable[Task]) -> list[Bid]:
    """The bids of tasks that have not begun.

    What tasks with the same remaining work have in common is computed once: there are many tasks, few of them differ.
    """
    tables: dict[tuple[int, int, int, int], _RewardTable] = {}
    bids = []
    for task in tasks:
        # Narrower than a request class: what is left of it. Speeds of one class are one object, with a cheaper hash.
        key = task.head_ns, task.num_steps, task.tail_ns, id(task.speeds)
        table = tables.get(key)
        if table is None:
            table = tables[key] = _RewardTable.of(task)
        bids.append(table.bid(task))
    return bids


@dataclass(frozen=True, slots=True)
class _RewardTable:
    """The duration of remaining work at each efficient degree, and what its speed adds to the reward.

    Wider degrees are quicker, so the number of those in time says which they are.
    """

    speeds: tuple[Speed, ...]
    runs_ns: tuple[int, ...]
    added: tuple[int, ...]
    best_ns: int
    _known: dict[tuple[int, int], tuple[Option, ...]] = field(default_factory=dict)

    @staticmethod
    def of(task: Task) -> _RewardTable:
        speeds = tuple(worthwhile(efficient_speeds(task.group_speeds)))
        runs_ns = tuple([task.head_ns + task.num_steps * speed.step_ns + task.tail_ns for speed in speeds])
        best_ns = min(runs_ns)
        added = tuple([MOST_SPEED * best_ns // max(1, run_ns) for run_ns in runs_ns])
        return _RewardTable(speeds, runs_ns, added, best_ns)

    def bid(self, task: Task) -> Bid:
        deadline_ns, best_ns = task.job.request.deadline_ns, self.best_ns
        slack_ns = (task.due_ns if deadline_ns is None else deadline_ns) - task.ready_ns
        reward, num = ON_TIME, len(self.speeds)
        if deadline_ns is None or slack_ns < best_ns:
            late_ns = max(0, best_ns - slack_ns)
            reward = min(ON_TIME, LATE + LATE * late_ns // max(1, best_ns))
        elif slack_ns < self.runs_ns[0]:
            num = sum([run_ns <= slack_ns for run_ns in self.runs_ns])
        options = self._known.get((reward, num))
        if options is None:
            pairs = zip(self.speeds[-num:], self.added[-num:], strict=True)
            options = tuple([Option(speed.degree, reward + added) for speed, added in pairs])
            self._known[reward, num] = options
        return Bid(task, self.speeds[-num:], options, task.ready_ns + best_ns)
