"""Consecutive stages of a request on the same devices run as one: the next run is there before the last one ends."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from builders import POLICIES, request, table
from tilework.control.controller import ControllerConfig
from tilework.core.actions import Action, RunWork
from tilework.core.events import Event, WorkFinished
from tilework.core.request import Request
from tilework.core.work import Work
from tilework.cost.table import CostTable
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation


class Handovers:
    """How often the next run of a job, of another stage, was handed out before its last one had finished, or later.

    Those are left out that begin on another device, and those whose device had other runs in the meantime.
    """

    def __init__(self) -> None:
        self.num_ahead, self.late = 0, list[tuple[Work, Work]]()
        self._latest: dict[int, Work] = {}
        self._queued: dict[int, list[int]] = {}  # By device: the runs that were handed out to it, in order.
        self._finished: set[int] = set()

    def observe(self, event: Event, actions: Iterable[Action], now_ns: int) -> None:
        if isinstance(event, WorkFinished):
            self._finished.add(event.work_id)
        for action in actions:
            if isinstance(action, RunWork):
                self._take(action.work)

    def _take(self, work: Work) -> None:
        device_id = work.devices[0]
        queue = self._queued.setdefault(device_id, [])
        for job_id in work.job_ids:
            last = self._latest.get(job_id)
            if last is not None and last.devices[0] == device_id and last.stage != work.stage:
                if last.work_id not in self._finished:
                    self.num_ahead += 1
                elif queue[-1] == last.work_id:
                    self.late.append((last, work))
            self._latest[job_id] = work
        for one in work.devices:
            self._queued.setdefault(one, []).append(work.work_id)


def handovers(requests: Iterable[Request], policy: str, costs: CostTable, num_devices: int) -> Handovers:
    found = Handovers()
    simulation = Simulation(ControllerConfig(policy=policy), costs, SimConfig(num_devices=num_devices))
    simulation.run(requests, observe=found.observe)
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stage_that_follows_on_the_same_device_is_queued_behind_the_last_one(policy: str) -> None:
    asked = [request(str(index), index * 0.4, slo_s=4.0, steps=4 + index % 7) for index in range(30)]
    found = handovers(asked, policy, table(degrees=(1, 2)), 2)
    assert found.num_ahead >= 30
    assert found.late == []
