"""A model that is removed while others are served: no policy asks for what its requests cost any more."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from builders import POLICIES, request, table
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Accept
from tilework.core.events import Cancelled, DeviceJoined, ModelRemoved, Submitted
from tilework.core.request import Request, Status
from tilework.core.time import NS_PER_S
from tilework.cost.table import CostTable, merged
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation

REMOVED = "removed"


def both() -> CostTable:
    return merged([table(degrees=(1, 2)), table(degrees=(1, 2), pipeline=REMOVED)])


def of_removed(one: Request) -> Request:
    return replace(one, pipeline=REMOVED)


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_of_other_models_go_on(policy: str) -> None:
    requests = [of_removed(request(f"r{index}", 0.5 * index)) for index in range(12)]
    requests += [request(f"a{index}", 4.0 * index) for index in range(30)]
    simulation = Simulation(ControllerConfig(policy=policy), both(), SimConfig(num_devices=2))
    simulation._clock.at(30 * NS_PER_S, partial(simulation._handle, ModelRemoved(REMOVED)))
    assert {one.status for one in simulation.run(requests).endings} == {Status.DONE}


@pytest.mark.parametrize("policy", POLICIES)
def test_devices_may_join_after_that(policy: str) -> None:
    """Some policies plan anew then, for what they have seen."""
    controller = Controller(ControllerConfig(policy=policy), both())
    controller.handle(DeviceJoined(0, 0), 0)
    gone = of_removed(request("r"))
    controller.handle(Submitted(gone), 0)
    for at_s in (20, 21):  # A placement is made for this one.
        one = request(f"a{at_s}", at_s)
        controller.handle(Submitted(one), one.arrival_ns)
    controller.handle(Cancelled(gone.uid, "test"), 22 * NS_PER_S)
    controller.handle(ModelRemoved(REMOVED), 22 * NS_PER_S)
    controller.handle(DeviceJoined(1, 1, memory_bytes=1 << 40), 23 * NS_PER_S)
    last = request("b", 24)
    assert any(isinstance(one, Accept) for one in controller.handle(Submitted(last), last.arrival_ns))
