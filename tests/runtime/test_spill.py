"""States that spill between the runs of requests that take turns, alone and in groups, on real workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import tilework
import tiny
from builders import Idle, table
from runtime.rig import Rig, assert_nothing_is_left
from tilework.core.model import ModelSource
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import Status
from tilework.core.work import Plan, Start
from tilework.policy import registry

WIDE = 96


@dataclass(frozen=True)
class Turns(Idle):
    """Runs every job one step at a time, and then the others: wide pictures on both devices, others on one.

    A job has no work before the last one has ended. Narrow ones change their device after every second step.
    """

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        idle = {device.device_id for device in view.devices if not device.works}
        starts: list[Start] = []
        for job in sorted(view.waiting(), key=lambda job: (-job.left.num_steps_left, job.job_id)):
            stage = job.left.stage
            assert stage is not None
            is_wide = stage.has_steps and job.request.shape.width == WIDE
            devices = (0, 1) if is_wide else ((job.job_id + job.left.num_steps_left // 2) % 2,)
            if idle.issuperset(devices):
                idle.difference_update(devices)
                starts.append(Start(stage=stage, job_ids=(job.job_id,), devices=devices, num_steps=1, why="its turn"))
        return Plan(starts=tuple(starts))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    tiny.prepare()
    tiny.save_sd3(tmp_path, "dpm")
    registry._GIVEN["turns"] = Turns
    try:
        rig = Rig(
            ModelSource(path=str(tmp_path)), "turns", costs=table(degrees=(1, 2), pipeline="tiny-sd3"), states_bytes=1
        )
        rig.start()
        yield rig
        rig.close()
    finally:
        del registry._GIVEN["turns"]


def test_requests_that_spill_after_each_run_give_the_stock_pictures(rig: Rig, tmp_path: Path) -> None:
    pipeline = tilework.reference(str(tmp_path))
    specs = {f"{width}-{seed}": tiny.spec(width=width, seed=seed) for width in (64, WIDE) for seed in range(3)}
    for outcome in rig.outcomes(specs):
        assert outcome.status is Status.DONE, outcome.reason
        assert outcome.image is not None
        spec = specs[outcome.uid]
        differences = np.abs(tiny.pixels(outcome.image).astype(int) - tiny.run_stock(pipeline, spec).pixels)
        assert differences.max() <= (1 if spec.width == WIDE else 0), outcome.uid
    kept = rig.engine.status.usage().kept
    assert kept.keys() == {0, 1}
    # The second device has not run a step of a wide picture that the first does not know. It spills all the same.
    assert all(one.num_spills >= one.num_returns >= 10 for one in kept.values()), kept
    assert all(one.num_bytes == 0 for one in kept.values())
    rig.wait_until_idle()
    assert_nothing_is_left(rig.engine)
