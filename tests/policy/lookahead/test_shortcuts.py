"""What is not computed again, since it is known, decides as if it had been."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest

from builders import request, shipped
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Action, RunWork
from tilework.core.events import Event
from tilework.core.policy import JobView
from tilework.core.request import Request, Shape, cost_key
from tilework.core.time import NS_PER_S
from tilework.cost.table import CostTable
from tilework.policy.lookahead.arrivals import Rationing
from tilework.policy.lookahead.node_assignment import NodeAssignment
from tilework.policy.lookahead.selection import Selection
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation

FLUX = replace(shipped("flux1dev_h100_eager"), devices_per_node=4)  # At 256 px one device is the fastest degree.
SDXL = shipped("sdxl_h100")  # With batches.
Decisions = list[tuple[Event, int, tuple[Action, ...]]]


class Recording(Controller):
    def __init__(self, config: ControllerConfig, costs: CostTable) -> None:
        super().__init__(config, costs)
        self.decisions: Decisions = []

    def handle(self, event: Event, now_ns: int) -> tuple[Action, ...]:
        actions = super().handle(event, now_ns)
        self.decisions.append((event, now_ns, actions))
        return actions


def decisions(
    requests: list[Request],
    seed: int = 0,
    jitter: float = 0.0,
    *,
    num_devices: int = 12,
    cancelled: int = 0,
    table: CostTable = FLUX,
) -> Decisions:
    config = ControllerConfig(policy="tilework")
    recording = Recording(config, table)
    sim_config = SimConfig(num_devices=num_devices, seed=seed, jitter=jitter)
    cancels = tuple((one.arrival_ns + NS_PER_S // 9, one.uid) for one in requests[:cancelled])
    Simulation(config, table, sim_config, make_controller=lambda *_: recording).run(requests, cancels)
    return recording.decisions


def mixed(count: int, rate_per_s: float, seed: int) -> Iterator[Request]:
    """Mostly short ones that are due soon after their end, some that may be wider, some without a deadline."""
    rng, at_s = Random(seed), 0.0
    for index in range(count):
        at_s += rng.expovariate(rate_per_s) if rate_per_s else 0.0
        side = rng.choice((256,) * 9 + (512, 1024))
        slo_s = rng.choice((None, 0.2, 0.25, 0.4, 1.0, 2.0))
        one = request(str(index), at_s, side=side, steps=rng.choice((4, 4, 9)), slo_s=slo_s)
        yield replace(one, pipeline="flux.1-dev")


@pytest.mark.parametrize("seed", range(2))
def test_nodes_on_which_nothing_is_to_be_decided_are_as_if_they_were_planned(seed: int) -> None:
    requests = list(mixed(32, 30.0, seed))
    if_committed, num_found = NodeAssignment._if_committed, 0

    def counted(self: NodeAssignment, number: int) -> list[JobView] | None:
        nonlocal num_found
        found = if_committed(self, number)
        num_found += bool(found)
        return found

    with patch.object(NodeAssignment, "_if_committed", counted):
        found = decisions(requests, seed, 0.4, cancelled=3)
    assert num_found > 10, "works of their jobs are in flight"
    with patch.object(NodeAssignment, "_if_committed", lambda _self, _number: None):
        assert found == decisions(requests, seed, 0.4, cancelled=3)


def test_a_job_of_which_all_is_committed_may_still_become_wider() -> None:
    """Of two that have a device each, the longer one gets both for its last step, which was queued on one."""
    requests = [
        replace(request(str(steps), side=1024, steps=steps, slo_s=60.0), pipeline="flux.1-dev") for steps in (5, 6)
    ]
    with patch.object(NodeAssignment, "_if_committed", lambda _self, _number: None):
        planned = decisions(requests, 1, 0.4, num_devices=2)
    assert decisions(requests, 1, 0.4, num_devices=2) == planned


def test_who_was_in_a_batch_with_one_that_only_ends_goes_on() -> None:
    """The decode of one is the last that is queued on the device, behind the last steps that others shared with it."""
    requests = [
        replace(request(str(index), index / 100, side=1024, steps=8 + 2 * index, slo_s=5.0), pipeline="sdxl")
        for index in range(3)
    ]
    with patch.object(NodeAssignment, "_if_committed", lambda _self, _number: None):
        planned = decisions(requests, num_devices=1, table=SDXL)
    works = [one.work for _, _, made in planned for one in made if isinstance(one, RunWork)]
    assert max(len(work.job_ids) for work in works) == 3
    assert decisions(requests, num_devices=1, table=SDXL) == planned


def test_what_a_node_needs_is_the_sum_over_its_jobs_however_these_came() -> None:
    num_needed, num_kept = Selection.num_needed, 0

    def checked(self: Selection) -> int:
        nonlocal num_kept
        num_kept += self._num_needed is not None
        found, served = num_needed(self), self.choose().served
        assert found == min(4, sum(one.needed_degree(self.node.now_ns) for one in served))
        return found

    with patch.object(Selection, "num_needed", checked):
        decisions(list(mixed(24, 0.0, 1)), 1, 0.1)
    assert num_kept > 5, "most come at once"


def test_a_request_is_rationed_by_all_that_were_counted_before_it() -> None:
    """Also of its own moment; a few times come again and again, and devices come and go."""
    rng, kept, anew = Random(4), Rationing(), Rationing()
    keys = [
        cost_key(Request(uid="a", pipeline="toy", shape=Shape(side, side), steps=4, arrival_ns=0))
        for side in (64, 128, 256)
    ]
    answers = set()
    for index in range(600):
        key, now_ns = rng.choice(keys), (index // 7) * NS_PER_S
        if rng.random() < 0.5:
            for rationing in (kept, anew):
                rationing.add(key, now_ns, 3.0 * NS_PER_S * (1 + keys.index(key)), 1.0)
        num_devices = rng.choice((4, 6))
        anew._moment = None
        answer = kept.admits(key, now_ns, num_devices)
        answers.add(answer)
        assert answer == anew.admits(key, now_ns, num_devices), index
    assert answers == {True, False}
