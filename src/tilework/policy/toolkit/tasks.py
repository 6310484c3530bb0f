"""The remaining work of a job, timed at each degree: policies compute it for every job in every plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tilework.core.graph.progress import Cursor
from tilework.core.policy import ClusterView, CostModel, DeviceView, JobView
from tilework.core.request import Request, StepClass, step_key
from tilework.core.work import Group, Start
from tilework.cost.demand import Speed, head_and_tail_ns, step_speeds
from tilework.policy.toolkit.known_demands import ByClass
from tilework.policy.toolkit.order import by_urgency, jobs_at_hand
from tilework.policy.toolkit.starts import before_steps, start_at_once, start_steps

NO_STEPS = Speed(1, 0)
"""The speed of a task without steps: one device, no time."""

_UNKNOWN = (0, None)


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
        """Return when it ends if it runs at this speed from `ready_ns` on."""
        return self.ready_ns + self.head_ns + self.num_steps * speed.step_ns + self.tail_ns

    def starts(self, group: Group, num_steps: int, why: str) -> Iterator[Start]:
        """Yield the stages before the steps, `num_steps` steps on the group, and the stages after the last steps.

        Of several stages with steps only the next one makes steps.
        """
        job_id = self.job.job_id
        left = self.job.left
        assert left.stage is not None, f"job {job_id} has nothing left to start"
        yield from start_at_once(left, job_id, group[0], why)
        left = before_steps(left)
        if num_steps and left.stage is not None:
            num_now = min(num_steps, left.num_left_here)
            yield start_steps(left.stage, (job_id,), group, num_now, why)
            yield from start_at_once(left.advanced(num_now), job_id, group[0], why)


class Price(NamedTuple):
    """The time of the stages before the steps, of a step at each degree, and of the other stages."""

    head_ns: int
    speeds: tuple[Speed, ...]
    tail_ns: int


class TaskPrices:
    """The costs of the remaining work of requests. They are looked up once for each class, of which there are few, and
    again when the cost model has learned of such requests.
    """

    def __init__(self) -> None:
        self._known: ByClass[tuple[StepClass, int, int, int], tuple[int, Price]] = ByClass()

    def of(self, request: Request, left: Cursor, max_degree: int, costs: CostModel) -> Price:
        """Return the price of the remaining work of a request. Raises UnknownCost."""
        position = left.position if left.itinerary.num_stepped > 1 else 0
        key = (step_key(request), left.num_done, position, max_degree)
        version = costs.version_of(request)
        known_version, price = self._known.get(key, _UNKNOWN)
        if price is not None and known_version == version:
            return price
        head_ns, tail_ns = head_and_tail_ns(request, left, costs)
        price = Price(head_ns, step_speeds(request, costs, max_degree, left), tail_ns)
        self._known[key] = version, price
        return price

    def forget(self, pipeline: str) -> None:
        """Drop the prices of a pipeline."""
        self._known.forget(pipeline)


class TaskReader:
    """Reads the tasks of jobs at one time."""

    def __init__(
        self,
        devices: Mapping[int, DeviceView],
        costs: CostModel,
        max_degree: int,
        now_ns: int,
        prices: TaskPrices | None = None,
    ) -> None:
        """`devices` are all that are up, by id. `prices` may be kept from one time to the next."""
        self._devices = devices
        self._costs = costs
        self._max_degree = max_degree
        self._now_ns = now_ns
        self._prices = prices or TaskPrices()

    def read(self, job: JobView) -> Task | None:
        """Return the task of a job; None if all of it is committed, or no degree up to `max_degree` was profiled.

        Raises UnknownCost.
        """
        left = job.left
        if left.stage is None:
            return None
        head_ns, speeds, tail_ns = self._prices.of(job.request, left, self._max_degree, self._costs)
        if left.num_steps_left and not speeds:
            return None
        up = self._devices
        ends_ns = [up[device_id].free_ns for work in job.works for device_id in work.devices if device_id in up]
        return Task(
            job=job,
            ready_ns=max([self._now_ns, *ends_ns]),
            head_ns=head_ns,
            num_steps=left.num_steps_left,
            speeds=speeds,
            tail_ns=tail_ns,
        )


def tasks_at_hand(view: ClusterView, costs: CostModel, now_ns: int) -> list[Task]:
    """Return the running jobs and the most urgent waiting ones, in order of urgency."""
    if not view.devices:
        return []
    sizes: dict[int, int] = {}
    for device in view.devices:
        sizes[device.node] = sizes.get(device.node, 0) + 1
    devices = {device.device_id: device for device in view.devices}
    max_degree = max(sizes.values())
    jobs = sorted(jobs_at_hand(view, max(32, 4 * len(view.devices))), key=by_urgency)
    reader = TaskReader(devices, costs, max_degree, now_ns)
    return [task for job in jobs if (task := reader.read(job)) is not None]
