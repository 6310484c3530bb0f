"""TridentServe's baselines: how devices are divided, who is served first, and what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from builders import PIPELINE, finished, groups, job, planned, poisson, profile, request, shipped, simulate, table
from policy.published.l20_requests import TABLES, C, D, E, notes, of_size
from quick import quick
from stages import DECODE, DIFFUSE, ENCODE, at_start
from tilework.control.cluster.tracker import Tracker
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Action, Place
from tilework.core.block import Demand
from tilework.core.component import Memory
from tilework.core.cost_row import CostRow
from tilework.core.events import Event
from tilework.core.graph.graph import Graph
from tilework.core.graph.stage import StageSpec, StepShare
from tilework.core.request import OnMiss, Request, Status
from tilework.core.time import ns_from_s
from tilework.core.work import NewPlacement
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.policy.registry import make_policy
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace
from tilework.sim.workloads.registry import make_workload
from tilework.sim.workloads.requests import to_requests
from tilework_lab.policies.trident_baselines.baselines import buckets, one_degree, pooled_buckets
from tilework_lab.policies.trident_baselines.policy import TridentBaseline, priority

COLOCATED = ("trident-b1", "trident-b2", "trident-b3", "trident-b4")
POOLED = ("trident-b5", "trident-b6")
ALL = COLOCATED + POOLED
# A step of 64 px takes 100 ms on any number of devices; one of 192 px 400, 200 and 100 ms on 1, 2 and 4 devices.
MIXED = profile({64: {1: 0.1, 2: 0.1, 4: 0.1}, 192: {1: 0.4, 2: 0.2, 4: 0.1}}, decode_s=0.5)


# The order of service.


def test_the_class_of_a_late_request_rises() -> None:
    ends = [99, 100, 101, 110, 120, 130, 140, 170, 179, 180, 1000]
    assert [priority(end, 100, 10) for end in ends] == [0, 0, 4, 3, 2, 1, 1, 1, 1, 0, 0]


def wide_behind_narrow() -> list[Request]:
    """Four devices: `busy` takes one for 3.5 s. `wide` needs all for 3.5 s, `narrow` one for 1.5 s."""
    return [
        request("busy", 0, side=64, steps=30, slo_s=100),
        request("wide", 0.1, side=192, steps=30, slo_s=100),
        request("narrow", 0.2, side=64, steps=10, slo_s=100),
    ]


def test_first_in_first_out_blocks() -> None:
    """`narrow` waits behind `wide`, beside three idle devices."""
    trace = simulate(wide_behind_narrow(), "trident-b3", num_devices=4, costs=MIXED)
    assert finished(trace) == ["busy", "wide", "narrow"]
    assert groups(trace) == {"busy": [(0,)], "wide": [(0, 1, 2, 3)], "narrow": [(0,)]}


def test_shortest_first_overtakes() -> None:
    trace = simulate(wide_behind_narrow(), "trident-b4", num_devices=4, costs=MIXED)
    assert finished(trace) == ["narrow", "busy", "wide"]


def test_a_bucket_blocks_itself_alone() -> None:
    """`wide` and `narrow` are in two buckets."""
    costs = replace(MIXED, devices_per_node=8)
    policy = buckets({4: 0.5, 1: 0.5})
    trace = run(policy, wide_behind_narrow(), costs, num_devices=8)[0]
    assert finished(trace) == ["narrow", "busy", "wide"]


def first_of(policy: str, *requests: Request) -> str:
    """Which of these an idle device begins first."""
    plan = planned(make_policy(policy), list(requests), costs=TableCosts(table()))
    return requests[plan.starts[0].job_ids[0]].uid


def late(uid: str, steps: int, times: float) -> Request:
    """A request that, if it began now, would be late by so many times what it takes."""
    run_s = 0.06 + 0.1 * steps
    return replace(request(uid, steps=steps), deadline_ns=ns_from_s(run_s * (1 - times)))


def test_requests_age() -> None:
    """In time before late, and then the shortest; of late ones the latest, counted in times of its own."""
    in_time = late("in time", 50, -1)
    assert first_of("trident-b4", late("late", 5, 0.5), in_time) == "in time"
    assert first_of("trident-b4", in_time, late("shorter", 40, -1)) == "shorter"
    assert first_of("trident-b4", late("late", 5, 0.5), late("later", 50, 1.5)) == "later"
    assert first_of("trident-b4", late("late", 5, 0.5), late("longer", 50, 0.5)) == "late"
    assert first_of("trident-b4", late("latest", 60, 7.5), in_time) == "in time"
    assert first_of("trident-b4", late("latest", 40, 8.5), in_time) == "latest"
    assert first_of("trident-b3", late("late", 5, 0.5), in_time) == "late", "it came first"


def test_without_a_deadline_a_request_is_late_after_a_minute() -> None:
    later = replace(request("later", steps=40), deadline_ns=ns_from_s(70))
    assert first_of("trident-b4", request("none", steps=590), later) == "later"
    assert first_of("trident-b4", request("none", steps=30), later) == "none"


# Degrees and devices.


def run(
    policy: str | TridentBaseline, requests: list[Request], costs: CostTable, num_devices: int = 16
) -> tuple[Trace, list[NewPlacement]]:
    """The trace, and the placements that were told."""
    told: list[NewPlacement] = []

    def observe(event: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        told.extend(action.placement for action in actions if isinstance(action, Place))

    make = partial(Controller, policy=make_policy(policy) if isinstance(policy, str) else policy)
    simulation = Simulation(ControllerConfig(), costs, SimConfig(num_devices=num_devices), make_controller=make)
    return simulation.run(requests, observe=observe), told


def stage_widths(trace: Trace, stage: str) -> dict[int, int]:
    """By side of the request, the devices that the stage ran on; of the latest request."""
    return {int(uid.partition("-")[0]): len(ran[-1]) for uid, ran in groups(trace, stage).items() if ran}


@pytest.mark.parametrize(
    ("policy", "of_d", "of_c"),
    [
        ("trident-b1", {512: 4, 2048: 4, 3072: 4}, {512: 4, 2048: 4, 3072: 4}),
        ("trident-b2", {512: 1, 2048: 2, 3072: 4}, {512: 1, 2048: 2, 3072: 4}),
        ("trident-b3", {512: 1, 2048: 2, 3072: 4}, {512: 1, 2048: 2, 3072: 4}),
        ("trident-b4", {512: 1, 2048: 2, 3072: 4}, {512: 1, 2048: 2, 3072: 4}),
        ("trident-b5", {512: 1, 2048: 2, 3072: 4, 4096: 8}, {512: 1, 2048: 1, 3072: 2, 4096: 2}),
        ("trident-b6", {512: 1, 2048: 2, 3072: 4, 4096: 8}, {512: 1, 2048: 1, 3072: 2, 4096: 2}),
    ],
)
def test_degrees(policy: str, of_d: dict[int, int], of_c: dict[int, int]) -> None:
    """All sizes come twice, the second time when all were seen."""
    sides = (4096, 3072, 2048, 512) * 2
    asked = [
        of_size("flux1_l20", f"{side}x{side}", uid=f"{side}-{index}", arrival_s=200.0 * index)
        for index, side in enumerate(sides)
    ]
    trace, _ = run(policy, asked, shipped("flux1_l20"), num_devices=64)
    assert stage_widths(trace, DIFFUSE) == of_d
    assert stage_widths(trace, DECODE) == of_c
    assert set(stage_widths(trace, ENCODE).values()) == {1}


@pytest.mark.parametrize("policy", quick(("trident-b4", "trident-b6"), ALL))
def test_every_request_ends_and_each_work_is_on_devices_of_its_stage(policy: str) -> None:
    """A minute of FLUX at more than 32 devices can do; the requests at the end wait long."""
    costs = shipped("flux1_l20")
    asked = to_requests(make_workload("tridentserve-flux", {"rate_per_s": 1.0, "minutes": 2.0}).requests(3))
    trace, told = run(policy, asked, costs, num_devices=32)
    statuses = {ending.request.uid: ending.status for ending in trace.endings}
    too_large = {one.uid for one in asked if one.shape.width == 4096} if policy in COLOCATED else set()
    assert statuses == {one.uid: Status.FAILED if one.uid in too_large else Status.DONE for one in asked}
    for device_id in range(32):
        runs = sorted((one.start_ns, one.end_ns) for one in trace.runs if device_id in one.devices)
        assert all(first[1] <= second[0] for first, second in pairwise(runs))
    assert_kept(trace, told, policy)
    assert run(policy, asked, costs, num_devices=32) == (trace, told)


def assert_kept(trace: Trace, told: Sequence[NewPlacement], policy: str) -> None:
    """With the last placement: what began after all requests were seen ran on devices of its stage and bucket.

    A layout that follows what is seen changes at first; `test_the_layout_changes_rarely` has when.
    """
    role_of = {ENCODE: "E", DIFFUSE: "D", DECODE: "C"}
    last = told[-1].groups
    kinds = {device_id: kind for group, kind in last for device_id in group}
    settled_ns = max(ending.request.arrival_ns for ending in trace.endings)
    later = [one for one in trace.runs if one.start_ns > settled_ns]
    assert later
    for one in later:
        assert {role_of[one.work.stage.name] in kinds[device_id] for device_id in one.devices} == {True}
        if policy in ("trident-b1", "trident-b2", "trident-b5") and one.work.stage.name == DIFFUSE:
            assert one.devices in [group for group, _ in last], "a group of a bucket"


def test_a_group_is_held_until_the_decode_ends() -> None:
    """The decode runs on one device of two, and the other one does nothing else meanwhile."""
    asked = [request("first", 0, side=192), request("second", 0.1, side=64)]
    trace = run(one_degree(2), asked, MIXED, num_devices=2)[0]
    runs = {(one.work.job_ids[0], one.work.stage.name): one for one in trace.runs}
    assert runs[0, DIFFUSE].devices == (0, 1)
    assert runs[0, DECODE].devices == (0,)
    assert runs[1, ENCODE].start_ns == runs[0, DECODE].end_ns


def test_pools_work_side_by_side() -> None:
    """While one request is decoded, the steps of the next one run."""
    asked = [request(uid, 0, side=64) for uid in "ab"]
    trace = run("trident-b6", asked, MIXED, num_devices=3)[0]
    runs = {(one.work.job_ids[0], one.work.stage.name): one for one in trace.runs}
    assert runs[1, DIFFUSE].start_ns < runs[0, DECODE].end_ns
    assert [len({one.devices for one in trace.runs if one.work.stage.name == name}) for name in (ENCODE, DECODE)] == [
        1,
        1,
    ]


def test_all_steps_are_one_work() -> None:
    trace = run("trident-b6", [request("a", steps=50, side=192)], MIXED, num_devices=8)[0]
    assert [one.steps for one in trace.runs if one.work.stage.name == DIFFUSE] == [50]


def test_an_exact_request_takes_one_device_and_holds_its_group() -> None:
    asked = [request("exact", 0, side=192, exact=True), request("other", 0, side=64)]
    trace = run(one_degree(4), asked, MIXED, num_devices=4)[0]
    assert groups(trace)["exact"] == [(0,)]
    assert finished(trace) == ["exact", "other"]
    assert max(len(one.devices) for one in trace.runs if one.work.job_ids == (1,)) == 4


@pytest.mark.parametrize("policy", ALL)
def test_on_narrow_nodes_a_request_takes_what_there_is(policy: str) -> None:
    """Its steps are best on four devices, and a node has two."""
    asked = [request(str(index), float(index), side=192, steps=5) for index in range(4)]
    trace = run(policy, asked, replace(MIXED, devices_per_node=2), num_devices=8)[0]
    assert {ending.status for ending in trace.endings} == {Status.DONE}
    assert {len(one.devices) for one in trace.runs if one.work.stage.name == DIFFUSE} == {2}


def several_stages() -> CostTable:
    """Two stages with steps, at best on four devices and on two, and between them one that gains nothing by more."""
    graph = Graph(
        PIPELINE,
        (
            StageSpec(name="draft", outputs=("a",), steps=StepShare(last=0.5), degrees=None),
            StageSpec(name="enlarge", inputs=("a",), outputs=("b",), degrees=None),
            StageSpec(name="paint", inputs=("b",), outputs=("c",), steps=StepShare(first=0.5), degrees=None),
        ),
    )
    seconds = {"draft": (0.4, 0.2, 0.1), "enlarge": (0.2, 0.2, 0.2), "paint": (0.4, 0.2, 0.2)}
    rows = [
        CostRow(pipeline=PIPELINE, stage=stage, height=128, width=128, degree=2**index, seconds=each_s)
        for stage, of_degree in seconds.items()
        for index, each_s in enumerate(of_degree)
    ]
    return CostTable(hardware="toy", rows=tuple(rows), graphs={PIPELINE: graph})


@pytest.mark.parametrize(("policy", "of_enlarge"), [("trident-b3", 2), ("trident-b6", 1)])
def test_several_stages_of_one_role_share_a_group(policy: str, of_enlarge: int) -> None:
    """Steps have the least of their optimal degrees. The stage between holds the group, or takes what suits it."""
    trace = run(policy, [request("a")], several_stages(), num_devices=4)[0]
    ran = {one.work.stage.name: len(one.devices) for one in trace.runs}
    assert ran == {"draft": 2, "enlarge": of_enlarge, "paint": 2}


def test_what_a_request_is_expected_to_take() -> None:
    """Of four devices for all of its time, or of one before and after its steps."""
    costs, asked = TableCosts(MIXED), request("a", side=192, steps=30)
    held = make_policy("trident-b3").demand(asked, at_start(asked), costs)
    assert held == Demand(4, ns_from_s(3.5))
    assert held.is_flat
    moved = make_policy("trident-b6").demand(asked, at_start(asked), costs)
    assert moved == Demand(4, ns_from_s(3.5), 0, ns_from_s(0.5))


# When the layout changes.


def test_the_layout_changes_rarely() -> None:
    """By what was seen: at the first request of a class, and when the number of requests has doubled."""
    sides = (64, 64, 192, 64, 64, 64, 64, 64, 64, 64)
    asked = [request(str(index), 10.0 * index, side=side) for index, side in enumerate(sides)]
    _, told = run("trident-b2", asked, MIXED, num_devices=16)
    sizes = [
        {len(group): sum(len(other) == len(group) for other, _ in one.groups) for group, _ in one.groups}
        for one in told
    ]
    assert sizes == [{1: 16}, {4: 1, 1: 12}]
    assert "a static layout" in told[0].why
    assert "4 EDC in groups of 4, 12 EDC in groups of 1" in told[1].why


def test_a_role_that_comes_later_gets_a_pool_then() -> None:
    """The first pipeline has steps alone, the second also a stage before and one after."""
    graph = Graph("bare", (StageSpec(name="only", outputs=("picture",), steps=StepShare(), degrees=None),))
    rows = [replace(one, pipeline="bare", stage="only") for one in MIXED.rows if one.stage == DIFFUSE]
    costs = replace(MIXED, rows=(*MIXED.rows, *rows), graphs={"bare": graph})
    bare = replace(request("bare", side=192), pipeline="bare")
    trace, told = run("trident-b6", [bare, request("full", 1.0, side=192)], costs, num_devices=8)
    assert finished(trace) == ["bare", "full"]
    assert [{kind for _, kind in one.groups} for one in told] == [{"D"}, {"D", "E", "C"}]


def test_a_layout_follows_the_requests_at_each_doubling() -> None:
    """Of four wide groups as many as there are wide requests, at the 1st, 2nd, 4th and 8th request, not in between."""
    sides = (192, 64, 64, 192, 64, 64, 64, 64)
    asked = [request(str(index), 10.0 * index, side=side) for index, side in enumerate(sides)]
    _, told = run("trident-b2", asked, MIXED, num_devices=16)
    assert [sum(len(group) == 4 for group, _ in one.groups) for one in told] == [4, 2, 1]


def test_a_layout_that_is_given_never_changes() -> None:
    asked = poisson(40, 2.0, seed=1)
    policy = pooled_buckets({1: 1.0}, {E: 1, D: 5, C: 2})
    _, told = run(policy, asked, table(), num_devices=8)
    assert [len(one.groups) for one in told] == [8]


def test_devices_that_join_or_are_lost_are_divided_again() -> None:
    policy = buckets({2: 1.0})
    assert {start.devices for start in planned(policy, [request("a", side=192)], 4, TableCosts(MIXED)).starts} == {
        (0,),
        (0, 1),
    }
    again = planned(policy, [request("b", side=192)], costs=TableCosts(MIXED), devices=(5, 6, 7))
    assert {start.devices for start in again.starts} == {(6,), (6, 7)}


# Memory.


@pytest.mark.parametrize("policy", quick(("trident-b1", "trident-b5"), ALL))
@pytest.mark.parametrize("name", TABLES)
def test_what_does_not_fit_fails_and_nothing_else(name: str, policy: str) -> None:
    """As in the paper: the largest size of FLUX.1 and of HunyuanVideo, where all stages are on each device."""
    sizes = notes(name)["mixes"]["medium"]
    asked = [of_size(name, size, uid=size, arrival_s=index) for index, size in enumerate(sizes)]
    trace, _ = run(policy, asked, shipped(name), num_devices=128)
    expected = {"flux1_l20": {"4096x4096"}, "hunyuanvideo_l20": {"1280x720x129"}}.get(name, set())
    failed = {ending.request.uid for ending in trace.endings if ending.status is Status.FAILED}
    assert failed == (expected if policy in COLOCATED else set())
    assert all(ending.status is Status.DONE for ending in trace.endings if ending.request.uid not in failed)


@pytest.mark.parametrize(
    ("policy", "name", "size", "text"),
    [
        ("trident-b1", "flux1_l20", "4096x4096", "49.9 GB on each device at degree 4"),
        ("trident-b3", "flux1_l20", "4096x4096", "48.3 GB on each device at degree 8"),
        ("trident-b1", "hunyuanvideo_l20", "1280x720x129", "47.3 GB on each device at degree 4"),
        ("trident-b4", "hunyuanvideo_l20", "1280x720x129", "47.3 GB on each device at degree 8"),
    ],
)
def test_the_reason_says_what_is_missing(policy: str, name: str, size: str, text: str) -> None:
    trace, _ = run(policy, [of_size(name, size)], shipped(name), num_devices=8)
    (ending,) = trace.endings
    assert ending.status is Status.FAILED
    assert text in ending.reason
    assert ending.reason.endswith("and a device has 46.3 GB")


def test_what_fits_no_more_fails_when_devices_are_lost() -> None:
    """3072 px fit beside all stages on two devices, and not on one."""
    costs, policy = TableCosts(shipped("flux1_l20")), make_policy("trident-b3")
    tracker = Tracker(policy, costs)
    for device_id in range(4):
        tracker.add_device(device_id, 0, memory=Memory(costs.memory_bytes))
    for job_id in range(2):
        tracker.add_job(job(job_id, of_size("flux1_l20", "3072x3072", uid=str(job_id))))
    assert {start.job_ids for start in policy.plan(tracker, costs, 0).starts} == {(0,)}
    for device_id in range(3):
        tracker.remove_device(device_id, set())
    ((job_id, why), (other_id, _)) = policy.plan(tracker, costs, 0).failures
    assert (job_id, other_id) == (0, 1)
    assert why.startswith("3072x3072 does not fit: it needs 53.2 GB on each device at degree 1")


def test_without_a_limit_everything_fits() -> None:
    costs = replace(shipped("flux1_l20"), memory_bytes=None)
    trace, _ = run("trident-b3", [of_size("flux1_l20", "4096x4096")], costs, num_devices=8)
    assert [ending.status for ending in trace.endings] == [Status.DONE]


# Promises.


@pytest.mark.parametrize("policy", ALL)
def test_promises_are_kept(policy: str) -> None:
    asked = [
        replace(one, on_miss=OnMiss.REJECT) if one.deadline_ns is not None and index % 3 == 0 else one
        for index, one in enumerate(poisson(60, 3.0, seed=5, slo_s=4.0))
    ]
    trace = simulate(asked, policy, num_devices=4, costs=table(degrees=(1, 2)))
    kept = [ending for ending in trace.endings if ending.request.is_promise and ending.status is not Status.REJECTED]
    assert kept
    assert all(ending.on_time for ending in kept)
