"""A policy that puts jobs together, for tests of what becomes of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from builders import Idle
from tilework.core.policy import ClusterView, CostModel, DeviceView, JobView
from tilework.core.work import Plan, Start
from tilework.policy import registry


@dataclass
class Batches(Idle):
    """Gives each device works of up to `most` jobs of any sizes, for `chunk` steps, and forms them anew each time.

    It queues up to `ahead` works on a device, of which members may be at work elsewhere before: so works hang together.
    Every `stops`-th plan (0: none) stops somebody.
    """

    most: int = 4
    chunk: int = 2
    ahead: int = 1
    stops: int = 0
    num_plans: int = 0

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        self.num_plans += 1
        if self.stops and self.num_plans % self.stops == 0:
            running = [job for job in self._running(view) if job.may_stop]
            if running:
                return Plan(stops=(running[self.num_plans % len(running)].job_id,))
        free = list(view.waiting())
        if self.ahead > 1:
            # Those that are longest at it last: so members of one work come from several.
            free += [job for job in self._running(view) if job.left.stage is not None and not job.is_stopping][::-1]
        free.sort(key=lambda job: job.left.stage is not None and job.left.stage.has_steps)  # More to put together then.
        starts: list[Start] = []
        for device in sorted(view.devices, key=lambda device: len(device.works)):
            if len(device.works) < self.ahead and free:
                starts.append(self._start(device, free, costs))
        return Plan(starts=tuple(starts))

    def _running(self, view: ClusterView) -> list[JobView]:
        ids = dict.fromkeys(job_id for device in view.devices for work in device.works for job_id in work.job_ids)
        return [job for job in map(view.job, ids) if job is not None and job.works]

    def _start(self, device: DeviceView, free: list[JobView], costs: CostModel) -> Start:
        """The first of those that are free, and others with it; they are free no more."""
        first = free.pop(0)
        assert first.left.stage is not None
        members, num_steps = [first], 1
        if first.left.stage.has_steps:
            for job in tuple(free) if first.may_share and first.left.stage.spec.batchable else ():
                shapes = [member.request.shape for member in (*members, job)]
                is_alike = job.left.stage == first.left.stage and job.may_share
                if len(members) < self.most and is_alike and costs.fits_together(first.left.stage, shapes):
                    members.append(job)
                    free.remove(job)
            num_steps = min(self.chunk, *(job.left.num_left_here for job in members))
        return Start(
            stage=first.left.stage,
            job_ids=tuple(job.job_id for job in members),
            devices=(device.device_id,),
            num_steps=num_steps,
            why="these are there",
        )


class Entangled(Batches):
    """Works that hang together across devices, and now and then a stop."""

    def __init__(self) -> None:
        super().__init__(most=3, chunk=3, ahead=2, stops=7)


@pytest.fixture(scope="module", autouse=True)
def batching() -> Iterator[None]:
    """Makes the policies known in a module that imports this."""
    registry._GIVEN |= {"batches": Batches, "entangled": Entangled}
    yield
    del registry._GIVEN["batches"], registry._GIVEN["entangled"]
