"""What holds for every policy, on small workloads of all kinds: laws of the schedule, and how long anybody waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import FEW_POLICIES, POLICIES, assert_legal, profile, request, table
from stages import DECODE, DIFFUSE, ENCODE, stage_of
from tilework.control.controller import ControllerConfig
from tilework.core.request import OnMiss, Request
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.sim.config import SimConfig
from tilework.sim.faults import Faults
from tilework.sim.invariants import Invariants
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace

SIDES = (64, 128)
LONGEST_ROUND_NS = 2 * NS_PER_S
MOVE_NS = 2 * NS_PER_MS  # At most: what a state takes from one device to others.


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A small cluster and a workload. `degrees` are those that were profiled."""

    requests: list[Request]
    costs: CostTable
    num_devices: int
    degrees: tuple[int, ...]

    def run(self, policy: str) -> Trace:
        """Simulate under the eyes of the invariants, exactly as predicted."""
        controller = ControllerConfig(policy=policy)
        simulation = Simulation(controller, self.costs, SimConfig(num_devices=self.num_devices))
        invariants = Invariants(simulation, controller, Faults(), TableCosts(self.costs))
        trace = simulation.run(self.requests, observe=invariants.check)
        invariants.finish(trace)
        return trace

    def longest_ns(self, request: Request) -> int:
        """What a request takes at the slowest degree, all its stages one after another."""
        costs = TableCosts(self.costs)
        degrees = [degree for degree in self.degrees if degree <= self.num_devices] or [1]
        ends = (costs.run_ns(stage_of(request.pipeline, stage), (request.shape,), 1) for stage in (ENCODE, DECODE))
        diffuse = stage_of(request.pipeline, DIFFUSE)
        step_ns = max(costs.run_ns(diffuse, (request.shape,), degree) for degree in degrees)
        return sum(ends) + request.steps * step_ns


MS = st.integers(10, 300).map(lambda ms: ms / 1000)


@st.composite
def tables(draw: st.DrawFn, degrees: Sequence[int], devices_per_node: int) -> CostTable:
    """Steps gain by each doubling of the degree what they gain, or lose by it."""
    steps_s: dict[int, dict[int, float]] = {}
    for side in SIDES:
        step_s = draw(MS)
        for degree in degrees:
            steps_s.setdefault(side, {})[degree] = round(step_s, 6)
            step_s /= draw(st.sampled_from([1.9, 1.6, 1.2, 1.0, 0.9]))
    ends_s = st.sampled_from([0.0, 0.005, 0.08])
    return replace(profile(steps_s, draw(ends_s), draw(ends_s)), devices_per_node=devices_per_node)


@st.composite
def cases(draw: st.DrawFn, promises: bool = True) -> Case:
    num_devices = draw(st.integers(1, 4))
    degrees = draw(st.sampled_from([(1,), (1, 2), (1, 2, 4)]))
    costs = draw(tables(degrees, draw(st.sampled_from(sorted({-(-num_devices // 2), num_devices})))))
    asked, arrival_s = [], 0.0
    for index in range(draw(st.integers(1, 8))):
        arrival_s += draw(st.sampled_from([0.0, 0.0, 0.03, 0.2, 0.9]))
        slo_s = draw(st.none() | st.integers(1, 40).map(lambda tenths: tenths / 10))
        is_promise = promises and slo_s is not None and draw(st.booleans())
        asked.append(
            request(
                str(index),
                arrival_s,
                side=draw(st.sampled_from(SIDES)),
                steps=draw(st.sampled_from([1, 2, 5, 12])),
                slo_s=slo_s,
                on_miss=OnMiss.REJECT if is_promise else OnMiss.BEST_EFFORT,
                weight=draw(st.sampled_from([1.0, 1.0, 0.25, 4.0])),
            )
        )
    return Case(requests=asked, costs=costs, num_devices=num_devices, degrees=degrees)


@pytest.mark.parametrize("policy", FEW_POLICIES)
@settings(max_examples=30)
@given(case=cases())
def test_every_schedule_keeps_the_laws(policy: str, case: Case) -> None:
    """Each request ends once; a device runs one work at a time, a group together and within a node; each step is run
    once, in order; works take what the table says; and twice the same question has twice the same answer.

    A request for a promise may be refused; all others are done, and promises are kept (`Invariants`, `assert_legal`).
    """
    trace = case.run(policy)
    may_be_refused = {one.uid for one in case.requests if one.is_promise}
    assert_legal(trace, case.num_devices, case.degrees, case.costs.devices_per_node, may_be_refused)
    costs = TableCosts(case.costs)
    requests = {ending.job_id: ending.request for ending in trace.endings}
    for run in trace.runs:
        served = [requests[job_id] for job_id in run.work.job_ids]
        assert run.end_ns - run.start_ns == costs.work_ns(run.work.stage, served, len(run.devices), run.steps)
    assert case.run(policy) == trace


def gaps_ns(trace: Trace) -> list[int]:
    """The intervals in which a request is in the system and no device runs anything."""
    found, busy_until_ns = list[int](), 0
    for run in sorted(trace.runs, key=lambda run: run.start_ns):
        there_ns = [ending.request.arrival_ns for ending in trace.endings if ending.finish_ns > busy_until_ns]
        found.append(run.start_ns - max(busy_until_ns, min(there_ns, default=run.start_ns)))
        busy_until_ns = max(busy_until_ns, run.end_ns)
    return found


def test_gaps_are_found() -> None:
    """Nothing runs from 1.06 to 5 s, and no request is there; `tetriserve` lets the second wait for the next round."""
    requests = [request("a"), request("b", 5.0), request("c", 5.1)]
    case = Case(requests=requests, costs=table(), num_devices=1, degrees=(1,))
    assert max(gaps_ns(case.run("edf"))) == 0
    assert max(gaps_ns(case.run("tetriserve"))) > MOVE_NS


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=30)
@given(case=cases(promises=False))
def test_no_request_waits_longer_than_the_sum_of_all_works(policy: str, case: Case) -> None:
    """While a request is in the system, something runs, except while a state moves. So no request stays longer than all
    requests together take, each at its slowest degree, with a move before each work.

    In plain rounds devices may idle: what is done early waits for the end of the round, which is 2 s at most. At least
    half of a round is used, except in those in which a request ends, so it is twice that time and a round for each.
    Under `tilework` a late request may wait, after each arrival, for as long as it takes itself.
    """
    trace = case.run(policy)
    each_ns = [case.longest_ns(one) for one in case.requests]
    serial_ns = sum(each_ns)
    if policy == "tetriserve":
        most_ns = 2 * serial_ns + (len(case.requests) + 1) * LONGEST_ROUND_NS
    else:
        held_ns = max(each_ns) if policy == "tilework" else 0
        most_ns = serial_ns + MOVE_NS * len(trace.runs) + held_ns * len(each_ns)
        assert max(gaps_ns(trace)) <= MOVE_NS + held_ns
    assert max(ending.latency_ns for ending in trace.endings) <= most_ns
