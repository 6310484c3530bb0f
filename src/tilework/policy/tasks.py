"""What is left of a job, timed: what policies that choose degrees compute for every job in every plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilework.core.interfaces import CostModel, JobView
from tilework.core.progress import Cursor
from tilework.core.work import DECODE, DIFFUSE, ENCODE, Group, StageId, Start
from tilework.policy.demand import Speed, step_speeds


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """A job's uncommitted rest: encode (0 once it is done), steps at each degree, decode; not before `ready_ns`.

    `speeds` are ascending in degree, and empty when no steps are left.
    """

    job: JobView
    ready_ns: int
    encode_ns: int
    num_steps: int
    speeds: tuple[Speed, ...]
    decode_ns: int

    @property
    def due_ns(self) -> int:
        return self.job.urgency_ns

    @property
    def fastest(self) -> Speed:
        return min(self.speeds, key=lambda speed: (speed.step_ns, speed.degree))

    @property
    def earliest_ns(self) -> int:
        """When it ends if it runs at its fastest degree from now on."""
        steps_ns = self.num_steps * self.fastest.step_ns if self.num_steps else 0
        return self.ready_ns + self.encode_ns + steps_ns + self.decode_ns

    def starts(self, group: Group, num_steps: int, why: str) -> Iterator[Start]:
        """Encode if it is due, `num_steps` steps on the group, and decode if these are the last."""
        stage, jobs = self.job.stage, (self.job.job_id,)
        assert stage is not None, f"job {self.job.job_id} has nothing left to start"
        if stage.name == ENCODE:
            yield Start(stage=stage, job_ids=jobs, gpus=group[:1], num_steps=1, why=why)
        if num_steps:
            diffuse = StageId(stage.pipeline, DIFFUSE)
            yield Start(stage=diffuse, job_ids=jobs, gpus=group, num_steps=num_steps, why=why)
        if num_steps == self.num_steps:
            decode = StageId(stage.pipeline, DECODE)
            yield Start(stage=decode, job_ids=jobs, gpus=group[:1], num_steps=1, why=why)


def read_task(job: JobView, free_ns: Mapping[int, int], costs: CostModel, max_degree: int, now_ns: int) -> Task | None:
    """The task of a job at a time; None if all of it is committed, or no degree up to `max_degree` was profiled.

    `free_ns` says when each device is free that is up. Raises UnknownCost.
    """
    if job.stage is None:
        return None
    pipeline, shapes = job.stage.pipeline, (job.request.shape,)
    left = {stage.name: num_steps for stage, num_steps in Cursor(job.stage, job.num_steps_left).pieces()}
    speeds = step_speeds(job.request, costs, max_degree) if DIFFUSE in left else ()
    if DIFFUSE in left and not speeds:
        return None
    ends_ns = [free_ns[gpu] for work in job.works for gpu in work.gpus if gpu in free_ns]
    return Task(
        job=job,
        ready_ns=max([now_ns, *ends_ns]),
        encode_ns=costs.run_ns(StageId(pipeline, ENCODE), shapes, 1) if ENCODE in left else 0,
        num_steps=left.get(DIFFUSE, 0),
        speeds=speeds,
        decode_ns=costs.run_ns(StageId(pipeline, DECODE), shapes, 1),
    )
