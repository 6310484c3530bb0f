"""The remaining work of a job, timed at each degree: policies compute it for every job in every plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tilework.core.interfaces import ClusterView, CostModel, JobView
from tilework.core.request import Request, StepClass, step_key
from tilework.core.work import DIFFUSE, ENCODE, Group, Start, stages_of
from tilework.policy.toolkit.demand import Speed, step_speeds
from tilework.policy.toolkit.order import by_urgency, jobs_at_hand
from tilework.policy.toolkit.starts import start_stage, start_steps

NO_STEPS = Speed(1, 0)
"""The speed of a task without steps: one device, no time."""


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """The remaining work of a job: encode (0 once it is done), steps at each degree, decode; not before `ready_ns`.

    `speeds` are ascending in degree, and empty when no steps are left; `fastest` is the narrowest of the quickest.
    `earliest_ns` is when it ends if it runs at that degree from now on. `group_speeds` are the speeds at which it can
    be given a group: `speeds`, or `NO_STEPS`.
    """

    job: JobView
    ready_ns: int
    encode_ns: int
    num_steps: int
    speeds: tuple[Speed, ...]
    decode_ns: int
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
        return self.ready_ns + self.encode_ns + self.num_steps * speed.step_ns + self.decode_ns

    def starts(self, group: Group, num_steps: int, why: str) -> Iterator[Start]:
        """Encode if it is due, `num_steps` steps on the group, and decode if these are the last."""
        job_id, stage = self.job.job_id, self.job.stage
        assert stage is not None, f"job {job_id} has nothing left to start"
        encode, _, decode = stages_of(stage.pipeline)
        if stage.name == ENCODE:
            yield start_stage(encode, job_id, group[0], why)
        if num_steps:
            yield start_steps(stage.pipeline, (job_id,), group, num_steps, why)
        if num_steps == self.num_steps:
            yield start_stage(decode, job_id, group[0], why)


class TaskReader:
    """Reads the tasks of jobs at one time. What requests of one class cost is looked up once: there are few classes."""

    def __init__(self, free_ns: Mapping[int, int], costs: CostModel, max_degree: int, now_ns: int) -> None:
        """`free_ns` is when each device that is up becomes free."""
        self._free_ns, self._costs, self._max_degree, self._now_ns = free_ns, costs, max_degree, now_ns
        self._prices: dict[StepClass, tuple[int, tuple[Speed, ...], int]] = {}

    def read(self, job: JobView) -> Task | None:
        """The task of a job; None if all of it is committed, or no degree up to `max_degree` was profiled.

        Raises UnknownCost.
        """
        if job.stage is None:
            return None
        encode_ns, speeds, decode_ns = self._price(job.request)
        has_steps = job.stage.name in (ENCODE, DIFFUSE)
        if has_steps and not speeds:
            return None
        ends_ns = [
            self._free_ns[device_id] for work in job.works for device_id in work.devices if device_id in self._free_ns
        ]
        return Task(
            job=job,
            ready_ns=max([self._now_ns, *ends_ns]),
            encode_ns=encode_ns if job.stage.name == ENCODE else 0,
            num_steps=job.num_steps_left if has_steps else 0,
            speeds=speeds if has_steps else (),
            decode_ns=decode_ns,
        )

    def _price(self, request: Request) -> tuple[int, tuple[Speed, ...], int]:
        """Times of the encode, of a step at each degree, and of the decode."""
        key = step_key(request)
        if key not in self._prices:
            encode, _, decode = stages_of(request.pipeline)
            encode_ns, decode_ns = (self._costs.work_ns(stage, (request,), 1) for stage in (encode, decode))
            self._prices[key] = encode_ns, step_speeds(request, self._costs, self._max_degree), decode_ns
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
