"""The remaining work of a job, timed at each degree: policies compute it for every job in every plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tilework.core.graph.progress import Cursor
from tilework.core.interfaces import ClusterView, CostModel, JobView
from tilework.core.request import Request, StepClass, step_key
from tilework.core.work import Group, Start
from tilework.policy.toolkit.demand import Speed, head_and_tail_ns, step_speeds
from tilework.policy.toolkit.order import by_urgency, jobs_at_hand
from tilework.policy.toolkit.starts import before_steps, start_at_once, start_steps

NO_STEPS = Speed(1, 0)
"""The speed of a task without steps: one device, no time."""


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """The remaining work of a job, not before `ready_ns`: stages before its steps, steps at each degree, other stages.

    `head_ns` is the time of the stages before, `tail_ns` that of the others. `speeds` are ascending in degree, and
    empty when no steps are left; `fastest` is the narrowest of the quickest. `earliest_ns` is when it ends if it runs
    at that degree from now on. `group_speeds` are the speeds at which it can be given a group: `speeds`, or `NO_STEPS`.
    """

    job: JobView
    ready_ns: int
    head_ns: int
    num_steps: int
    speeds: tuple[Speed, ...]
    tail_ns: int
    fastest: Speed = field(init=False)
    earliest_ns: int = field(init=False)
    group_speeds: tuple[Speed, ...] = field(init=False)

    @property
    def due_ns(self) -> int:
        return self.job.urgency_ns

    def __post_init__(self) -> None:
        self.group_speeds = self.speeds or (NO_STEPS,)
        self.fastest = min(self.group_speeds, key=lambda speed: (speed.step_ns, speed.degree))
        self.earliest_ns = self.finish_ns(self.fastest)

    def finish_ns(self, speed: Speed) -> int:
        """When it ends if it runs at this speed from `ready_ns` on."""
        return self.ready_ns + self.head_ns + self.num_steps * speed.step_ns + self.tail_ns

    def starts(self, group: Group, num_steps: int, why: str) -> Iterator[Start]:
        """The stages before the steps, `num_steps` steps on the group, and the stages after them if these are the last.

        Of several stages with steps only the next one makes steps.
        """
        job_id, left = self.job.job_id, self.job.left
        assert left.stage is not None, f"job {job_id} has nothing left to start"
        yield from start_at_once(left, job_id, group[0], why)
        left = before_steps(left)
        if num_steps and left.stage is not None:
            num_now = min(num_steps, left.num_left_here)
            yield start_steps(left.stage, (job_id,), group, num_now, why)
            yield from start_at_once(left.advanced(num_now), job_id, group[0], why)


class TaskReader:
    """Reads the tasks of jobs at one time. What requests of one class cost is looked up once: there are few classes."""

    def __init__(self, free_ns: Mapping[int, int], costs: CostModel, max_degree: int, now_ns: int) -> None:
        """`free_ns` is when each device that is up becomes free."""
        self._free_ns, self._costs, self._max_degree, self._now_ns = free_ns, costs, max_degree, now_ns
        self._prices: dict[tuple[StepClass, int, int], tuple[int, tuple[Speed, ...], int]] = {}

    def read(self, job: JobView) -> Task | None:
        """The task of a job; None if all of it is committed, or no degree up to `max_degree` was profiled.

        Raises UnknownCost.
        """
        left = job.left
        if left.stage is None:
            return None
        head_ns, speeds, tail_ns = self._price(job.request, left)
        if left.num_steps_left and not speeds:
            return None
        ends_ns = [
            self._free_ns[device_id] for work in job.works for device_id in work.devices if device_id in self._free_ns
        ]
        return Task(
            job=job,
            ready_ns=max([self._now_ns, *ends_ns]),
            head_ns=head_ns,
            num_steps=left.num_steps_left,
            speeds=speeds,
            tail_ns=tail_ns,
        )

    def _price(self, request: Request, left: Cursor) -> tuple[int, tuple[Speed, ...], int]:
        """The time of the stages before the steps, of a step at each degree, and of the other stages."""
        key = step_key(request), left.num_done, left.position if left.itinerary.num_stepped > 1 else 0
        if key not in self._prices:
            head_ns, tail_ns = head_and_tail_ns(request, left, self._costs)
            speeds = step_speeds(request, self._costs, self._max_degree, left)
            self._prices[key] = head_ns, speeds, tail_ns
        return self._prices[key]


def tasks_at_hand(view: ClusterView, costs: CostModel, now_ns: int) -> list[Task]:
    """The running jobs and the most urgent waiting ones, in order of urgency."""
    if not view.devices:
        return []
    sizes: dict[int, int] = {}
    for device in view.devices:
        sizes[device.node] = sizes.get(device.node, 0) + 1
    free_ns, max_degree = {device.device_id: device.free_ns for device in view.devices}, max(sizes.values())
    jobs = sorted(jobs_at_hand(view, max(32, 4 * len(view.devices))), key=by_urgency)
    reader = TaskReader(free_ns, costs, max_degree, now_ns)
    return [task for job in jobs if (task := reader.read(job)) is not None]
