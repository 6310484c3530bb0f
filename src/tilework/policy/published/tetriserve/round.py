"""The time of one round: how many steps fit into it, and whether a task can be on time after it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.cost.demand import Segment, Speed, min_device_allocation
from tilework.policy.published.tetriserve.round_length import whole_steps
from tilework.policy.toolkit.tasks import Task


@dataclass(slots=True, eq=False)
class Round:
    """A round from `now_ns` on; its last `margin_ns` are left free."""

    now_ns: int
    round_ns: int
    margin_ns: int
    end_ns: int = field(init=False)
    limit_ns: int = field(init=False)
    _in_rounds: dict[tuple[Speed, ...], tuple[Speed, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.end_ns = self.now_ns + self.round_ns
        self.limit_ns = self.end_ns - self.margin_ns

    def minimal_allocation(self, task: Task) -> tuple[Segment, ...]:
        """The cheapest degrees that meet the deadline, by what steps take in rounds; if none do, by what they take."""
        budget_ns = task.due_ns - self.now_ns - task.head_ns - task.tail_ns
        in_rounds = self._in_rounds.get(task.speeds)
        if in_rounds is None:
            in_rounds = self._in_rounds[task.speeds] = whole_steps(task.speeds, self.round_ns, self.margin_ns)
        return min_device_allocation(in_rounds, task.num_steps, budget_ns) or min_device_allocation(
            task.speeds, task.num_steps, budget_ns
        )

    def num_steps(self, task: Task, speed: Speed, start_ns: int) -> int:
        """Steps that a task runs in this round, from `start_ns` on; one if a step is longer than a round."""
        room_ns = self.limit_ns - start_ns - task.head_ns
        num_steps = min(task.num_steps, max(0, room_ns) // max(1, speed.step_ns))
        is_long = speed.step_ns > self.round_ns - self.margin_ns
        return max(1, num_steps) if is_long else num_steps

    def can_wait(self, task: Task) -> bool:
        """Whether a task can be on time even if it does not run in this round."""
        return self.end_ns + task.head_ns + self.later_ns(task, task.num_steps) <= task.due_ns

    def saves(self, task: Task, speed: Speed) -> bool:
        """Whether a task can be on time if it runs at this speed in this round."""
        num_steps = self.num_steps(task, speed, task.ready_ns)
        run_end_ns = task.ready_ns + task.head_ns + num_steps * speed.step_ns
        return self.final_ns(task, run_end_ns, task.num_steps - num_steps) <= task.due_ns

    def final_ns(self, task: Task, run_end_ns: int, num_steps_left: int) -> int:
        """When a task ends at the earliest if its works in this round end then and leave this many steps."""
        begin_ns = max(run_end_ns, self.end_ns) if num_steps_left else run_end_ns
        return begin_ns + self.later_ns(task, num_steps_left)

    def later_ns(self, task: Task, num_steps: int) -> int:
        """The least time that steps and decode take after this round, whole rounds but for the last."""
        if not num_steps:
            return task.tail_ns
        step_ns = task.fastest.step_ns
        per_round = max(1, (self.round_ns - self.margin_ns) // max(1, step_ns))
        num_rounds = (num_steps - 1) // per_round
        last_ns = (num_steps - num_rounds * per_round) * step_ns
        return num_rounds * max(self.round_ns, step_ns) + last_ns + task.tail_ns
