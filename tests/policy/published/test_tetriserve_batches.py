"""Selective continuous batching of TetriServe (§5): which requests share steps, and that none is late by it."""

from __future__ import annotations

from builders import batched, on_time, planned, request, shipped
from stages import DECODE, DIFFUSE
from tilework.control.controller import ControllerConfig
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import Group, Plan
from tilework.cost.table_costs import TableCosts
from tilework.policy.published.tetriserve.policy import TetriServe
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace
from tilework.sim.workloads.registry import make_workload
from tilework.sim.workloads.requests import to_requests

# A step takes 100 ms alone, 140 ms for two, 180 ms for three; of 490 ms of a round these are 4, 3 and 2.


def in_a_round(
    requests: list[Request],
    num_devices: int = 1,
    costs: TableCosts | None = None,
    last_devices: dict[int, Group] | None = None,
    aside: tuple[int, ...] = (),
) -> Plan:
    policy = TetriServe(round_ns=500 * NS_PER_MS)
    return planned(
        policy, requests, num_devices, costs or TableCosts(batched()), last_devices=last_devices, aside=aside
    )


def steps(plan: Plan) -> list[tuple[tuple[int, ...], Group, int]]:
    return [(start.job_ids, start.devices, start.num_steps) for start in plan.starts if start.stage.name == DIFFUSE]


def test_jobs_without_devices_share_steps_with_jobs_that_have_them() -> None:
    asked = [request(uid, slo_s=9) for uid in "abc"]
    plan = in_a_round(asked)
    assert steps(plan) == [((0, 1, 2), (0,), 2)]
    assert [start.job_ids for start in plan.starts] == [(0,), (1,), (2,), (0, 1, 2)], "encodes come first"
    assert plan.starts[-1].why.endswith("2 without room of their own make steps with it")
    assert steps(in_a_round(asked[:2])) == [((0, 1), (0,), 3)]
    assert sorted(job_ids for job_ids, _, _ in steps(in_a_round(asked, num_devices=3))) == [(0,), (1,), (2,)], (
        "all have room"
    )


def test_only_requests_of_one_shape_share() -> None:
    first, small = request("a", slo_s=9), request("small", side=64, slo_s=9.5)
    assert steps(in_a_round([first, small])) == [((0,), (0,), 4)]


def test_no_request_joins_that_would_make_another_late() -> None:
    """Four steps take 400 ms alone, and 560 ms together, but for three of them in the first round."""
    other = request("b", slo_s=9)
    assert steps(in_a_round([request("tight", steps=4, slo_s=0.45), other])) == [((0,), (0,), 4)]
    assert steps(in_a_round([request("tight", steps=4, slo_s=0.55), other])) == [((0,), (0,), 4)]
    assert steps(in_a_round([request("loose", steps=4, slo_s=0.65), other])) == [((0, 1), (0,), 3)]


def test_a_request_with_all_steps_is_decoded_and_the_others_continue() -> None:
    plan = in_a_round([request("short", steps=2, slo_s=8), request("long", slo_s=9)])
    assert steps(plan) == [((0, 1), (0,), 2), ((1,), (0,), 2)]
    assert [(start.stage.name, start.job_ids) for start in plan.starts[2:]] == [
        (DIFFUSE, (0, 1)),
        (DECODE, (0,)),
        (DIFFUSE, (1,)),
    ]


def test_jobs_that_shared_steps_stay_together() -> None:
    asked = [request(uid, slo_s=9) for uid in "abc"]
    for home in (0, 1):
        plan = in_a_round(asked, num_devices=2, last_devices={0: (0,), 1: (1,), 2: (home,)})
        assert [(job_ids, devices) for job_ids, devices, _ in steps(plan) if 2 in job_ids] == [((home, 2), (home,))]


def test_late_ones_share_with_late_ones_only() -> None:
    late = [request(uid, steps=90, slo_s=1) for uid in "yz"]
    assert steps(in_a_round([request("a", slo_s=9), late[0]], aside=(1,))) == [((0,), (0,), 4)]
    assert steps(in_a_round(late, aside=(0, 1))) == [((0, 1), (0,), 3)]


def test_a_batch_must_save_a_tenth_and_be_allowed() -> None:
    asked = [request(uid, slo_s=9) for uid in "ab"]
    for fixed_s, shares in ((0.015, False), (0.025, True)):  # Two save half of that, of 200 ms.
        plan = in_a_round(asked, costs=TableCosts(batched(fixed_s, 0.1 - fixed_s)))
        assert ((0, 1) in [job_ids for job_ids, _, _ in steps(plan)]) == shares
    assert steps(in_a_round(asked, costs=TableCosts(batched(), max_batch=1))) == [((0,), (0,), 4)]


def test_small_requests_of_sdxl_keep_more_deadlines_by_it() -> None:
    workload = make_workload("patchedserve-sdxl", {"rate_per_s": 1.4, "num_requests": 120, "scale": 1.0})
    requests, traces = to_requests(workload.requests(0)), dict[int, Trace]()
    for max_batch in (1, 12):
        config = ControllerConfig(policy="tetriserve", max_batch=max_batch)
        traces[max_batch] = Simulation(config, shipped("sdxl_h100"), SimConfig(num_devices=2)).run(requests)
    assert on_time(traces[12]) > on_time(traces[1]) + 0.2
    for run in traces[12].runs:
        shapes = {traces[12].endings[job_id].request.shape for job_id in run.work.job_ids}
        assert len(shapes) == 1
