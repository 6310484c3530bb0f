"""`tridentserve` on random pipelines, sizes and memory, simulated: what it starts fits, and nothing is lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import request
from placements import staged_table
from stages import STAGES
from tilework.control.controller import ControllerConfig
from tilework.core.actions import Action, Place, RunWork
from tilework.core.events import Event
from tilework.core.request import Request, Status
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.policy.placement.roles import PlacementType, Role
from tilework.policy.published.tridentserve.ways import Profiles
from tilework.sim.config import SimConfig
from tilework.sim.faults import Faults
from tilework.sim.invariants import Invariants
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace

SIDES = (64, 128)
ROLES = dict(zip(STAGES, Role, strict=True))


@dataclass(frozen=True)
class Case:
    """A pipeline on nodes of `per_node` devices, and requests for it."""

    table: CostTable
    num_devices: int
    requests: tuple[Request, ...]

    @property
    def per_node(self) -> int:
        return self.table.devices_per_node or self.num_devices


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Each stage fits on a device by itself. Activations of the larger size are at least those of the smaller one."""
    weights = {role: draw(st.integers(1, 40)) for role in Role}
    small = {role: draw(st.integers(0, 10)) for role in Role}
    large = {role: small[role] + draw(st.integers(0, 20)) for role in Role}
    least = max(weights[role] + large[role] for role in Role)
    memory_bytes = draw(st.integers(least, sum(weights.values()) + max(large.values())))
    hundredths = st.integers(1, 40).map(lambda number: number / 100)
    seconds = {side: tuple(draw(hundredths) for _ in Role) for side in SIDES}
    activations = {side: tuple(some[role] for role in Role) for side, some in zip(SIDES, (small, large), strict=True)}
    table = staged_table(weights, seconds, memory_bytes, activations)  # type: ignore[arg-type]
    arrivals = draw(st.lists(st.integers(0, 8), min_size=1, max_size=24))
    requests, at_s = [], 0.0
    for number, gap in enumerate(arrivals):
        at_s += gap / 10
        slo_s = draw(st.sampled_from((None, 0.5, 6.0)))
        side, steps = draw(st.sampled_from(SIDES)), draw(st.integers(1, 4))
        requests.append(request(str(number), at_s, side=side, steps=steps, slo_s=slo_s))
    table = replace(table, devices_per_node=draw(st.sampled_from((2, 4))))
    return Case(table, draw(st.integers(1, 6)), tuple(requests))


@dataclass
class Starts:
    """Of each start the type that its device had then; "" before there was a placement."""

    kinds: Mapping[int, str]
    found: list[tuple[RunWork, str]]

    def observe(self, _event: Event, actions: tuple[Action, ...], _now_ns: int) -> None:
        for action in actions:
            if isinstance(action, Place):
                self.kinds = {one: name for group, name in action.placement.groups for one in group}
            elif isinstance(action, RunWork):
                self.found += [(action, self.kinds.get(one, "")) for one in action.work.devices]


def assert_fitting(case: Case, trace: Trace, starts: Starts) -> None:
    """A stage runs where it belongs, and fits beside the weights of all stages that belong there.

    A request of which some size fits nowhere so takes turns; one that has begun its steps keeps its device.
    """
    costs, profiles = TableCosts(case.table), Profiles()
    sizes = [min(case.per_node, case.num_devices - first) for first in range(0, case.num_devices, case.per_node)]
    profiles.set_devices(case.table.memory_bytes, sizes)
    by_job = {one.job_id: one.request for one in trace.endings}
    begun: dict[int, tuple[int, ...]] = {}
    for action, kind in starts.found:
        work, asked = action.work, by_job[action.work.job_ids[0]]
        role, footprint = ROLES[work.stage.name], profiles.of(asked, costs).footprint
        is_kept = begun.get(work.job_ids[0]) == work.devices
        begun[work.job_ids[0]] = work.devices if role is Role.D else ()
        if not kind or is_kept:
            continue
        roles = PlacementType(kind).roles
        assert role in roles
        held = sum(footprint.weights[one] for one in roles)
        assert held + footprint.activations[role][1] <= footprint.usable_bytes, f"{work.stage} of {asked} on {kind}"


def assert_in_order(case: Case, trace: Trace) -> None:
    """Devices run one work at a time, and stages of a request follow each other, each once."""
    for device_id in range(case.num_devices):
        runs = sorted((run.start_ns, run.end_ns) for run in trace.runs if device_id in run.work.devices)
        assert all(first[1] <= second[0] for first, second in pairwise(runs))
    positions: dict[int, int] = {}
    for run in sorted(trace.runs, key=lambda run: (run.start_ns, run.end_ns)):
        for job_id, _, position, _ in run.work.members:
            assert position == positions.get(job_id, 0)
            done = run.steps if run.work.stage.has_steps else 1  # Fewer steps than planned, if it was stopped.
            positions[job_id] = position + done


@pytest.mark.parametrize("policy", ["tridentserve", "tilework"])
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_what_is_started_fits_where_it_runs_and_every_request_is_done(policy: str, case: Case) -> None:
    config, starts = ControllerConfig(policy=policy), Starts({}, [])
    simulation = Simulation(config, case.table, SimConfig(num_devices=case.num_devices, hosts_have_read=True))
    invariants = Invariants(simulation, config, Faults(), TableCosts(case.table))  # No device holds more than it can.

    def observe(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        invariants.check(event, actions, now_ns)
        starts.observe(event, actions, now_ns)

    trace = simulation.run(case.requests, observe=observe)
    invariants.finish(trace)
    assert {one.status for one in trace.endings} == {Status.DONE}
    assert_in_order(case, trace)
    assert_fitting(case, trace, starts)
