"""Filling single devices with works: what every policy of degree 1 shares.

A device holds at most one running and one queued work, so that it never waits for the controller, and a more urgent
job waits for two chunks at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tilework.core.interfaces import ClusterView, CostModel, GpuView, JobView
from tilework.core.progress import Cursor
from tilework.core.work import DIFFUSE, Start

WORKS_PER_GPU = 2


@dataclass(slots=True)
class Slots:
    """A plan under construction: which device has room, and where each job stands after the starts so far."""

    view: ClusterView
    costs: CostModel
    chunk_ns: int
    starts: list[Start] = field(default_factory=list)
    _cursors: dict[int, Cursor] = field(default_factory=dict)
    _tails: dict[int, JobView] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)

    def free(self) -> Iterator[GpuView]:
        """Devices with room for one more work: idle ones first, then those that end soonest; ties by id."""
        room = [gpu for gpu in self.view.gpus if self.num_works(gpu) < WORKS_PER_GPU]
        yield from sorted(room, key=lambda gpu: (self.num_works(gpu), gpu.free_ns, gpu.gpu))

    def num_works(self, gpu: GpuView) -> int:
        return len(gpu.works) + self._counts.get(gpu.gpu, 0)

    def continued(self, gpu: GpuView) -> JobView | None:
        """The job that the device works on last, if something of it is left to start."""
        job = self._tails.get(gpu.gpu) or self._committed_tail(gpu)
        return job if job is not None and self._cursor(job).stage is not None else None

    def _committed_tail(self, gpu: GpuView) -> JobView | None:
        if not gpu.works:
            return None
        job = self.view.job(gpu.works[-1].job_ids[0])
        # The last work may be a remnant of a job that was cancelled, or restarted elsewhere.
        return job if job is not None and job.works and job.works[-1] is gpu.works[-1] else None

    def start(self, job: JobView, gpu: GpuView, why: str) -> None:
        """Append the next piece of `job` to `gpu`: its encode, a chunk of steps, or its decode."""
        cursor = self._cursor(job)
        assert cursor.stage is not None, f"job {job.job_id} has nothing left to start"
        num_steps = self._chunk_steps(job, cursor)
        self.starts.append(
            Start(stage=cursor.stage, job_ids=(job.job_id,), gpus=(gpu.gpu,), num_steps=num_steps, why=why)
        )
        self._cursors[job.job_id] = cursor.advanced(num_steps)
        self._tails[gpu.gpu] = job
        self._counts[gpu.gpu] = self._counts.get(gpu.gpu, 0) + 1

    def _cursor(self, job: JobView) -> Cursor:
        return self._cursors.get(job.job_id) or Cursor(job.stage, job.num_steps_left)

    def _chunk_steps(self, job: JobView, cursor: Cursor) -> int:
        assert cursor.stage is not None
        if cursor.stage.name != DIFFUSE:
            return 1
        step_ns = self.costs.run_ns(cursor.stage, (job.request.shape,), 1)
        return max(1, min(cursor.num_steps_left, self.chunk_ns // max(1, step_ns)))


Choice = tuple[JobView, str]


def fill(slots: Slots, choose: Callable[[GpuView], Choice | None]) -> None:
    """Give free slots to what `choose` picks, one after another, until it picks nothing for any device."""
    while choice := _first_choice(slots, choose):
        gpu, (job, why) = choice
        slots.start(job, gpu, why)


def _first_choice(slots: Slots, choose: Callable[[GpuView], Choice | None]) -> tuple[GpuView, Choice] | None:
    for gpu in slots.free():
        if choice := choose(gpu):
            return gpu, choice
    return None
