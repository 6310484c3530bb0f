"""What is left of a job, timed: what policies that choose degrees compute for every job in every plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tilework.core.interfaces import ClusterView, CostModel, JobView
from tilework.core.request import Request, Shape
from tilework.core.work import DECODE, DIFFUSE, ENCODE, Group, StageId, Start
from tilework.policy.toolkit.demand import Speed, step_speeds
from tilework.policy.toolkit.order import by_urgency, jobs_at_hand

_NO_SPEED = Speed(1, 0)


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """A job's uncommitted rest: encode (0 once it is done), steps at each degree, decode; not before `ready_ns`.

    `speeds` are ascending in degree, and empty when no steps are left; `fastest` is the narrowest of the quickest.
    `earliest_ns` is when it ends if it runs at that degree from now on.
    """

    job: JobView
    ready_ns: int
    encode_ns: int
    num_steps: int
    speeds: tuple[Speed, ...]
    decode_ns: int
    fastest: Speed = field(init=False)
    earliest_ns: int = field(init=False)

    @property
    def due_ns(self) -> int:
        return self.job.urgency_ns

    def __post_init__(self) -> None:
        self.fastest = min(self.speeds, key=lambda speed: (speed.step_ns, speed.degree), default=_NO_SPEED)
        steps_ns = self.num_steps * self.fastest.step_ns
        self.earliest_ns = self.ready_ns + self.encode_ns + steps_ns + self.decode_ns

    def starts(self, group: Group, num_steps: int, why: str) -> Iterator[Start]:
        """Encode if it is due, `num_steps` steps on the group, and decode if these are the last."""
        stage, jobs = self.job.stage, (self.job.job_id,)
        assert stage is not None, f"job {self.job.job_id} has nothing left to start"
        if stage.name == ENCODE:
            yield Start(stage=stage, job_ids=jobs, devices=group[:1], num_steps=1, why=why)
        if num_steps:
            diffuse = StageId(stage.pipeline, DIFFUSE)
            yield Start(stage=diffuse, job_ids=jobs, devices=group, num_steps=num_steps, why=why)
        if num_steps == self.num_steps:
            decode = StageId(stage.pipeline, DECODE)
            yield Start(stage=decode, job_ids=jobs, devices=group[:1], num_steps=1, why=why)


class TaskReader:
    """Reads the tasks of jobs at one time.

    What requests of a shape cost is looked up once: there are many jobs, and few shapes.
    """

    def __init__(self, free_ns: Mapping[int, int], costs: CostModel, max_degree: int, now_ns: int) -> None:
        """`free_ns` says when each device is free that is up."""
        self._free_ns, self._costs, self._max_degree, self._now_ns = free_ns, costs, max_degree, now_ns
        self._prices: dict[tuple[str, Shape, bool, int], tuple[int, tuple[Speed, ...], int]] = {}

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
        key = request.pipeline, request.shape, request.guided, request.preview_every
        if key not in self._prices:
            encode_ns, decode_ns = (
                self._costs.work_ns(StageId(request.pipeline, stage), (request,), 1) for stage in (ENCODE, DECODE)
            )
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
