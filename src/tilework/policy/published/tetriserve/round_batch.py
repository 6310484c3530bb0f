"""Requests of one shape that make their steps of a round together, on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tilework.core.graph.progress import Cursor
from tilework.core.interfaces import CostModel
from tilework.core.work import Start
from tilework.policy.toolkit.starts import before_steps, start_at_once, start_steps
from tilework.policy.toolkit.tasks import Task

_LEAST_SAVING = 0.1  # Of a step's time: with less, requests that come later lose more than these gain.


@dataclass(slots=True, eq=False)
class RoundBatch:
    """Tasks that share forward passes from `ready_ns` on, by steps that end before `limit_ns`.

    Their encodes come first, one by one. `parts` are the steps, each with the tasks that make them: a task whose last
    step is made is decoded, and the others continue. `ends_ns` is when a task ends here, and `num_steps_left` how many
    of its steps remain then.

    Source: TetriServe §5, selective continuous batching.
    """

    tasks: Sequence[Task]
    ready_ns: int
    limit_ns: int
    costs: CostModel
    parts: list[tuple[Sequence[Task], int]] = field(default_factory=list, init=False)
    num_steps_left: dict[int, int] = field(init=False)
    ends_ns: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        members = list(self.tasks)
        left = {task.job.job_id: task.job.left.num_steps for task in self.tasks}
        now = max([self.ready_ns, *(task.ready_ns for task in members)]) + sum(task.head_ns for task in members)
        self.num_steps_left, self.ends_ns = left, dict.fromkeys(left, now)
        while members:
            step_ns = step_together_ns(members, self.costs)
            least = min(left[task.job.job_id] for task in members)
            num_steps = min(least, (self.limit_ns - now) // max(1, step_ns))
            if num_steps <= 0:
                return
            self.parts.append((members, num_steps))
            now += num_steps * step_ns
            for task in members:
                left[task.job.job_id] -= num_steps
                now += 0 if left[task.job.job_id] else task.tail_ns
                self.ends_ns[task.job.job_id] = now
            members = [task for task in members if left[task.job.job_id]]

    def starts(self, device_id: int, why: str) -> Iterator[Start]:
        left: dict[int, Cursor] = {}
        for task in self.tasks:
            left[task.job.job_id] = before_steps(task.job.left)
            yield from start_at_once(task.job.left, task.job.job_id, device_id, why)
        for members, num_steps in self.parts:
            stage, job_ids = left[members[0].job.job_id].stage, tuple(task.job.job_id for task in members)
            assert stage is not None
            yield start_steps(stage, job_ids, (device_id,), num_steps, why)
            for job_id in job_ids:
                left[job_id] = left[job_id].advanced(num_steps)
                yield from start_at_once(left[job_id], job_id, device_id, why)


def may_share(tasks: Sequence[Task], task: Task, costs: CostModel) -> bool:
    """Whether a task fits into memory with these, which are of its shape, and a step together saves a tenth.

    Raises UnknownCost.
    """
    joined, request, stage = [*tasks, task], task.job.request, task.job.left.stepped
    if stage is None or not stage.spec.batchable:
        return False
    if not all(each.job.may_share and each.job.left.stepped == stage for each in joined):
        return False
    if not costs.fits_together(stage, [request.shape] * len(joined)):
        return False
    apart_ns = step_together_ns(tasks, costs) + step_together_ns([task], costs)
    return step_together_ns(joined, costs) <= (1.0 - _LEAST_SAVING) * apart_ns


def step_together_ns(tasks: Sequence[Task], costs: CostModel) -> int:
    """The time of a step of these tasks together on one device. Raises UnknownCost."""
    stage = tasks[0].job.left.stepped
    assert stage is not None
    return costs.work_ns(stage, [task.job.request for task in tasks], 1)
