"""The lookahead policy: its rollouts, its decisions, and their outcome in simulation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from builders import finished, flux_requests, groups, on_time, planned, profile, request, shipped, simulate, table
from stages import DIFFUSE
from tilework.control.controller import ControllerConfig
from tilework.core.actions import Action, Stop
from tilework.core.component import Memory
from tilework.core.events import Event
from tilework.core.policy import ClusterView, JobView
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS, NS_PER_S
from tilework.cost.demand import Speed
from tilework.cost.table_costs import TableCosts
from tilework.policy.lookahead.arrivals import DueArrivals
from tilework.policy.lookahead.forecast import Claim, JobForecast
from tilework.policy.lookahead.node_assignment import NodeAssignment
from tilework.policy.lookahead.node_jobs import NodeJobs
from tilework.policy.lookahead.node_table import NodeTable
from tilework.policy.lookahead.policy import LookaheadPolicy
from tilework.policy.lookahead.rollout import simulate_ahead
from tilework.policy.lookahead.selection import Selection
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation
from tilework.sim.trace import Trace
from tilework.sim.workloads.requests import to_requests
from tilework_lab.workloads.tetriserve import TetriServe

WIDE = table(degrees=(1, 2, 4))  # Ten steps with encode and decode take 1.06, 0.69 and 0.45 s on 1, 2 and 4 devices.
MS = NS_PER_MS
# A step takes 100, 60 and 40 ms on 1, 2 and 4 devices.
SPEEDS = tuple(Speed(degree, step_ms * MS) for degree, step_ms in ((1, 100), (2, 60), (4, 40)))


def forecast(due_ms: float = inf, steps: int = 10, claim: Claim = Claim.FEASIBLE, **more: float) -> JobForecast:
    """A job that runs at `degree`, if given; its step ends after `hold_ms`."""
    due_ns, weight = due_ms * MS, more.get("weight", 1.0)
    level = next((level for level, speed in enumerate(SPEEDS) if speed.degree == more.get("degree")), -1)
    head_ns, hold_ns = more.get("head_ms", 0.0) * MS, more.get("hold_ms", 0.0) * MS
    return JobForecast(
        job_id=0,
        claim=claim,
        order_key=due_ns,
        due_ns=due_ns,
        speeds=SPEEDS,
        usual=1,
        num_steps=float(steps),
        head_ns=head_ns,
        tail_ns=0.0,
        weight=weight,
        level=level,
        hold_ns=hold_ns,
    )


# Rollouts.


@pytest.mark.parametrize(("due_ms", "degree"), [(1000, 1), (999, 2), (600, 2), (599, 4), (400, 4)])
def test_a_feasible_job_gets_the_narrowest_group_that_is_in_time(due_ms: float, degree: int) -> None:
    others = [forecast(due_ms) for _ in range(8 // degree - 1)]
    result = simulate_ahead([forecast(due_ms), *others], 8, 0)
    assert (result.degrees, result.late) == ([degree] * (8 // degree), None)


def test_the_first_late_job_in_order_of_service_is_named() -> None:
    assert simulate_ahead([forecast(1000), forecast(399), forecast(100)], 8, 0).late == 1
    assert simulate_ahead([forecast(400), forecast(400)], 4, 0).late == 1, "one after the other"
    assert simulate_ahead([forecast(400), forecast(800)], 4, 0).late is None


def test_free_devices_go_to_the_job_that_gains_most() -> None:
    assert simulate_ahead([forecast(5000), forecast(5000, steps=11)], 3, 0).degrees == [1, 2]
    assert simulate_ahead([forecast(5000), forecast(5000, steps=11)], 8, 0).degrees == [4, 4]


def test_a_job_without_a_deadline_gets_its_usual_width_of_what_others_leave() -> None:
    best_effort = forecast(claim=Claim.BEST_EFFORT)
    assert simulate_ahead([forecast(1000), best_effort, best_effort], 8, 0).degrees == [4, 2, 2], (
        "wider is worth it for the feasible job"
    )
    assert simulate_ahead([forecast(1000), best_effort], 2, 0).degrees == [2, 0]


def test_the_next_change_is_predicted() -> None:
    result = simulate_ahead([forecast(1000), forecast(5000, steps=40)], 3, 0)
    assert (result.degrees, result.then, result.next_ns) == ([1, 2], [0, 2], 1000 * MS)
    result = simulate_ahead([forecast(407), forecast(5000)], 4, 7 * MS)
    assert (result.degrees, result.then, result.next_ns) == ([4, 0], [0, 4], 407 * MS)


def test_the_time_before_the_steps_counts() -> None:
    assert simulate_ahead([forecast(1000, head_ms=1)], 1, 0).late == 0
    assert simulate_ahead([forecast(1000, head_ms=1)], 2, 0).late is None


def test_devices_become_available_when_the_step_on_them_ends() -> None:
    """Ten steps on four devices take 400 ms; the wide one gives its four back at the end of its step."""
    wide = forecast(5000, steps=40, degree=4, hold_ms=30)
    assert simulate_ahead([forecast(430), wide], 4, 0).late is None
    assert simulate_ahead([forecast(429), wide], 4, 0).late == 0
    assert simulate_ahead([forecast(429), forecast(5000, steps=40, degree=4)], 4, 0).late is None, "its step is over"
    assert simulate_ahead([forecast(1000), forecast(2000, degree=2, hold_ms=450)], 3, 0).late is None, (
        "it starts at once on what fits"
    )
    narrow = forecast(2000, steps=20, degree=1, hold_ms=90)
    result = simulate_ahead([forecast(400), narrow], 5, 0)
    assert (result.degrees, result.late) == ([4, 1], None), "a job that keeps its devices delays no other"


# Decisions.


def widths(requests: list[Request], num_devices: int) -> list[int]:
    plan = planned(LookaheadPolicy(), requests, num_devices, TableCosts(WIDE))
    of_job = {start.job_ids[0]: len(start.devices) for start in plan.starts if start.stage.name == DIFFUSE}
    return [of_job.get(index, 0) for index in range(len(requests))]


def test_the_job_with_most_to_do_is_deferred_if_not_all_can_be_on_time() -> None:
    small = [request(str(index), slo_s=1.07) for index in range(4)]
    large = request("large", slo_s=1.06, steps=20)
    assert widths([large, *small], 4) == [0, 1, 1, 1, 1]


def test_weight_counts_when_a_job_must_be_deferred() -> None:
    tight = {"slo_s": 0.5}
    assert widths([request("a", **tight), request("b", **tight)], 4) == [4, 0]
    assert widths([request("a", **tight), request("b", **tight, weight=2.0)], 4) == [0, 4]


def test_a_job_without_a_deadline_begins_no_step_on_devices_that_are_needed_before_it_ends() -> None:
    """A step of the large one takes 0.4 s on one device; `wide` is to have all devices as soon as `small` is done."""
    costs = profile({64: {1: 0.05}, 128: {1: 0.4, 2: 0.2, 4: 0.1}})
    small = request("small", side=64, steps=4, slo_s=0.25)
    wide = request("wide", 0.0, side=128, steps=10, slo_s=1.3)
    relaxed = request("relaxed", 0.01, side=128, steps=5)
    trace = simulate([small, wide, relaxed], "tilework", num_devices=4, costs=costs)
    assert on_time(trace) == 1.0
    first_ns = min(one.start_ns for one in trace.runs if one.work.job_ids == (2,) and one.work.stage.name == DIFFUSE)
    assert first_ns >= min(one.end_ns for one in trace.runs if one.work.job_ids == (0,) and one.steps)


def test_a_job_that_cannot_be_on_time_is_dropped_to_best_effort_with_its_reason() -> None:
    plan = planned(LookaheadPolicy(), [request("a", slo_s=0.4), request("b", slo_s=1)], 8, TableCosts(WIDE))
    assert plan.dropped_to_best_effort == ((0, "even if nothing else ran, it would finish 0.05 s late"),)
    assert not plan.starts


# Late requests.


def late_beside(*arrivals_ms: int, now_ms: int, steps: int, due: bool) -> tuple[Claim, float]:
    """The claim of a late job of 60 ms per step, and when it is held no longer, in ms.

    Requests that can be on time came at these times; the last is still here if `due`.
    """
    arrivals = DueArrivals()
    for at_ms in arrivals_ms:
        arrivals.add([at_ms * MS])
    late = forecast(steps=steps, claim=Claim.LATE)
    node = NodeJobs([], now_ms * MS, 200 * MS, lambda _: inf, due_arrivals=arrivals, forecasts=[late])
    if due:
        node.forecasts.append(replace(forecast(due_ms=9000), arrival_ns=arrivals_ms[-1] * MS))
    until_ns = node.hold_late()
    return late.claim, until_ns / MS


def test_a_late_job_is_held_where_another_request_is_likely_to_come_while_it_runs() -> None:
    """It takes 600 ms; requests come every 1,000 ms."""
    assert late_beside(0, 1000, 2000, now_ms=2100, steps=10, due=True) == (Claim.HELD, inf)
    assert late_beside(0, 1000, 2000, now_ms=2100, steps=10, due=False) == (Claim.HELD, 2600)
    assert late_beside(0, 1000, 2000, now_ms=2600, steps=10, due=False) == (Claim.LATE, inf)


def test_a_late_job_that_is_cheap_or_nearly_alone_is_served() -> None:
    assert late_beside(0, 1000, 2000, now_ms=2100, steps=8, due=True)[0] is Claim.LATE
    assert late_beside(0, 5000, 10_000, now_ms=10_100, steps=10, due=True)[0] is Claim.LATE
    assert late_beside(2000, now_ms=2100, steps=10, due=True)[0] is Claim.LATE, "nothing is known yet"


def test_the_mean_time_between_arrivals_follows_the_latest() -> None:
    arrivals = DueArrivals()
    arrivals.add([0])
    assert arrivals.gap_ns == inf
    arrivals.add([100, 0])
    assert (arrivals.last_ns, arrivals.gap_ns) == (100, 100)
    arrivals.add([100, 600])
    assert (arrivals.last_ns, arrivals.gap_ns) == (600, 140)


def test_a_held_job_gets_no_device_and_keeps_those_of_its_step() -> None:
    held, small = forecast(steps=10, claim=Claim.HELD), forecast(due_ms=900, steps=2)
    assert simulate_ahead([small, held], 4, 0).degrees == [4, 0]
    running = forecast(steps=10, claim=Claim.HELD, degree=2, hold_ms=50)
    result = simulate_ahead([small, running], 2, 0)
    assert result.degrees == [2, 0]
    assert result.next_ns == 50 * MS + 2 * 60 * MS


def test_late_requests_do_not_block_those_that_can_be_on_time() -> None:
    """The large request is late from the start; each small one has 30 ms to spare, and a step takes 100 ms."""
    costs = table(degrees=(1,))
    small = [request(f"small-{index}", float(index), steps=4, slo_s=0.49) for index in range(8)]
    trace = simulate([request("large", 0.0, steps=30, slo_s=0.5), *small], "tilework", num_devices=1, costs=costs)
    late = [ending.request.uid for ending in trace.endings if not ending.on_time]
    assert set(late) <= {"large", "small-0", "small-1"}, "until two have come nothing is known of the gaps"
    (large,) = (ending for ending in trace.endings if ending.request.uid == "large")
    assert large.finish_ns <= 8 * NS_PER_S + 2 * 3.06 * NS_PER_S, "it waits no longer than it takes"


def test_a_job_that_was_deferred_in_vain_is_served() -> None:
    """The second is late even if the first, which costs more, is deferred, since that would have to end its step."""
    devices: list[Any] = [SimpleNamespace(device_id=device_id, works=(), is_loading=False) for device_id in range(2)]
    selection = Selection(NodeJobs(devices, 0, 200 * MS, lambda _: inf))
    first, second = forecast(594, steps=9.9, degree=2, hold_ms=54), forecast(600, steps=9.5, weight=2)
    selection.node.forecasts += [first, second]
    assert selection.choose().result.degrees == [2, 0]
    assert (first.claim, second.claim) == (Claim.FEASIBLE, Claim.DEFERRED)


def run(requests: list[Request], num_devices: int) -> tuple[Trace, int]:
    """The trace, and how often works were told to stop."""
    stops: list[Action] = []

    def observe(_: Event, actions: tuple[Action, ...], now_ns: int) -> None:
        stops.extend(action for action in actions if isinstance(action, Stop))

    config = ControllerConfig(policy="tilework")
    trace = Simulation(config, WIDE, SimConfig(num_devices=num_devices)).run(requests, observe=observe)
    return trace, len(stops)


def test_a_wide_job_makes_room_at_its_next_step_and_gets_its_devices_back() -> None:
    """Else the second would be late; its chunk would last until 0.72 s."""
    trace, num_stops = run([request("a", slo_s=3, steps=40), request("b", 0.55, slo_s=0.7)], 4)
    assert on_time(trace) == 1.0
    assert num_stops
    assert [len(group) for group in groups(trace)["a"]] == [4, 2, 4]
    (start_ns,) = {min(run.start_ns for run in trace.runs if run.work.job_ids == (1,))}
    assert start_ns <= 0.6 * NS_PER_S


def test_nothing_is_stopped_where_no_job_needs_it() -> None:
    trace, num_stops = run([request("a", slo_s=9), request("b", 0.1, slo_s=9), request("c", 0.2)], 12)
    assert (on_time(trace), num_stops) == (1.0, 0)


def test_no_job_is_stopped_for_one_that_is_late_by_the_end_of_the_step() -> None:
    """A step of `a` takes 0.16 s. At its end, `b` has 0.4 s left, and takes 0.45."""
    requests = [request("a", slo_s=3, side=256), request("b", 0.06, slo_s=0.55)]
    trace, num_stops = run(requests, 4)
    assert num_stops == 0
    assert on_time(trace) == 0.5
    _, num_stops = run([requests[0], request("b", 0.06, slo_s=0.65)], 4)
    assert num_stops


def test_a_job_that_is_on_time_on_idle_devices_does_not_wait_for_more() -> None:
    """`b` is to have two devices, one of which is in a step of a second."""
    trace = simulate([request("a", side=512), request("b", 0.3, slo_s=1.2)], "tilework", num_devices=3, costs=WIDE)
    assert min(one.start_ns for one in trace.runs if one.work.job_ids == (1,)) < 0.4 * NS_PER_S
    assert [ending.on_time for ending in trace.endings if ending.request.uid == "b"] == [True]


@pytest.mark.slow
def test_full_devices_serve_requests_of_one_size_on_few_devices_each() -> None:
    """At 98% of what devices can do one by one. Measured: 85% on time, `edf` 82%; 74% if waiting has no cost."""
    workload = TetriServe(mix="1024", rate_per_s=1.675, scale=2.0, num_requests=200)
    costs = shipped(workload.table)
    ours, edf = (
        on_time(simulate(to_requests(workload.requests(2)), policy, num_devices=8, costs=costs))
        for policy in ("tilework", "edf")
    )
    assert ours > edf


# It can wait for 0.2 s; a step of the long one takes 0.6 and 0.4 s on 2 and 4 devices.
STEPS = profile({64: {1: 0.1}, 128: {1: 1.0, 2: 0.6, 4: 0.4}})
HURRIED, LONG = request("hurried", side=64, slo_s=1.2), request("long", 2.0)


@pytest.mark.parametrize(("before", "num_devices", "widest"), [([HURRIED], 4, 2), ([], 4, 4), ([HURRIED], 8, 4)])
def test_a_device_is_left_for_requests_that_cannot_wait_for_the_end_of_a_long_step(
    before: list[Request], num_devices: int, widest: int
) -> None:
    """As one came recently that could not wait; but not if other nodes are idle."""
    trace = simulate([*before, LONG], "tilework", num_devices=num_devices, costs=replace(STEPS, devices_per_node=4))
    assert max(map(len, groups(trace)["long"])) == widest


def test_a_request_that_cannot_wait_for_the_end_of_a_long_step_is_on_time() -> None:
    again = replace(HURRIED, uid="again", arrival_ns=int(2.1 * NS_PER_S), deadline_ns=int(3.3 * NS_PER_S))
    known, unknown = (simulate([*one, LONG, again], "tilework", num_devices=4, costs=STEPS) for one in ([HURRIED], []))
    assert (on_time(known), on_time(unknown)) == (1.0, 0.5)


def test_a_job_that_will_be_wider_in_a_moment_waits_for_that() -> None:
    """A step takes 63 ms on two devices and 39 on four: before `a` ends, `b` waits for up to 24 ms."""
    requests = [request("a", slo_s=0.75), request("b", 0.05, slo_s=9, steps=60)]
    trace = simulate(requests, "tilework", num_devices=4, costs=WIDE)
    steps = [one for one in trace.runs if one.work.job_ids == (1,) and one.work.stage.name == DIFFUSE]
    last_narrow_ns = max(one.end_ns for one in steps if len(one.devices) == 2)
    first_wide_ns = min(one.start_ns for one in steps if len(one.devices) == 4)
    over_ns = max(one.end_ns for one in trace.runs if one.work.job_ids == (0,))
    assert over_ns - 63 * MS <= last_narrow_ns <= over_ns + 26 * MS
    assert first_wide_ns <= over_ns + 26 * MS


def test_short_jobs_without_a_deadline_go_first_and_none_starves() -> None:
    long = [request("long", 0.001, steps=30)]
    short = [request(f"short {index}", 0.3 * index, steps=4) for index in range(400)]
    order = finished(simulate([*short, *long], "tilework", num_devices=1))
    assert order[0] == "short 0"
    assert 1 < order.index("long") < len(order) - 1


def test_a_job_that_has_waited_long_goes_before_a_shorter_one_that_has_not() -> None:
    """When `first` is done, `long` has waited for 0.8 s, and `short`, which takes half as long, for 0.1 s."""
    requests = [request("first", steps=8), request("long", 0.1, steps=10), request("short", 0.8, steps=6)]
    assert finished(simulate(requests, "tilework", num_devices=1)) == ["first", "long", "short"]
    requests[2] = request("short", 0.1, steps=6)
    assert finished(simulate(requests, "tilework", num_devices=1)) == ["first", "short", "long"]


def test_the_few_jobs_of_one_tenant_do_not_wait_for_the_many_of_another() -> None:
    many = [request(f"many {index}", steps=10, tenant="a") for index in range(8)]
    order = finished(simulate([*many, request("few", 1.5, steps=10, tenant="b")], "tilework", num_devices=1))
    assert order.index("few") <= 3


# Several nodes.


def test_a_new_request_goes_where_the_fewest_idle_devices_are_enough() -> None:
    """On nodes of two devices: wide ones keep a node that is whole."""
    costs = replace(table(degrees=(1, 2)), devices_per_node=2)
    narrow, wide = {"slo_s": 1.3}, {"slo_s": 0.75}
    requests = [request("a", **narrow), request("b", 0.01, **wide), request("c", 0.02, **narrow)]
    trace = simulate(requests, "tilework", num_devices=4, costs=costs)
    nodes = {uid: {device_id // 2 for group in taken for device_id in group} for uid, taken in groups(trace).items()}
    assert nodes["a"] == nodes["c"]
    assert nodes["b"].isdisjoint(nodes["a"])
    assert on_time(trace) == 1.0


def test_a_whole_node_is_tried_first_while_another_stays_whole() -> None:
    """At low load a job need not share a node; at high load the fullest nodes are tried first."""
    nodes = NodeTable([a_device(index, index // 4) for index in range(12)])
    nodes.take_room(2, 3)
    assert nodes.with_room(1, 3)[:2] == [0, 2]
    nodes.take_room(0, 1)
    assert nodes.with_room(1, 3) == [2, 0, 1], "only one node is whole"


def a_device(device_id: int, pool: int, *, is_busy: bool = False) -> Any:
    return SimpleNamespace(
        device_id=device_id,
        node=pool,
        pool=pool,
        works=[None] * is_busy,
        is_loading=False,
        num_changes=0,
        free_ns=0,
        memory=Memory(),
    )


def test_a_table_counts_idle_devices_again_where_they_have_changed() -> None:
    devices = [a_device(index, index // 2) for index in range(6)]
    table, view = NodeTable(devices), cast(ClusterView, SimpleNamespace(needs_loads=True, job=lambda _job_id: None))
    table.update([], view, 0)
    assert table.idle == {0: 2, 1: 2, 2: 2}
    table.changed.clear()
    assert table.take_idle(0, 2) == 0
    devices[2].works, devices[2].num_changes = [None], 1
    devices[4].is_loading = True
    table.update([], view, 0)
    assert table.idle == {0: 2, 1: 1, 2: 2}, "what a plan has taken is there again, and one that loads ahead is idle"
    assert table.changed == {1}, "a load ahead of need is no change"
    devices[2].works, devices[2].num_changes = [], 2
    table.update([], view, 0)
    assert table.idle == {0: 2, 1: 2, 2: 2}


def test_a_node_whose_work_is_committed_has_room_beside_its_jobs_and_their_arrivals_count() -> None:
    nodes = NodeTable([a_device(index, index // 4) for index in range(8)])
    nodes.full.add(0)
    nodes.set_committed(0, [9, 5])
    assert (nodes.due_arrivals[0].last_ns, nodes.due_arrivals[0].gap_ns) == (9, 4)
    assert (nodes.changed, nodes.full, nodes.with_room(3, 2)) == ({1}, set(), [1])


def test_a_table_of_pools_knows_which_may_run_what() -> None:
    """Pools of two, one and three devices; the first two serve it, and the last one is busy."""
    devices = [a_device(index, pool, is_busy=pool == 2) for index, pool in enumerate((0, 0, 1, 2, 2, 2))]
    pools, within = NodeTable(devices), frozenset((0, 1, 2))
    view: Any = SimpleNamespace(job=lambda _job_id: None, needs_loads=False)
    pools.update([], view, 0)
    assert (pools.widest_within(within), pools.widest_within(None), pools.widest_within(frozenset((2,)))) == (2, 3, 1)
    assert pools.with_room(1, 4, within) == [1, 0]
    assert sorted(pools.least_loaded(4, within)) == [0, 1]
    assert pools.take_idle(None, 1, frozenset((0, 1))) == 0
    assert not pools.only_there(0, within), "the pool of device 2 is idle, too"
    assert pools.only_there(0, frozenset((0, 1))), "no other serves it"
    assert not pools.only_there(1, frozenset((0, 1)))
    assert pools.only_there(0, frozenset((0, 1, 3, 4, 5))), "the other one is busy"


def test_a_job_that_has_not_begun_goes_to_another_node_that_becomes_idle() -> None:
    costs = replace(table(), devices_per_node=1)
    requests = [request("a", steps=40), request("b", steps=5), request("c", 0.1)]
    trace = simulate(requests, "tilework", num_devices=2, costs=costs)
    assert finished(trace) == ["b", "c", "a"]


def test_devices_that_only_make_others_faster_count_as_room() -> None:
    """No device is idle. `loose` needs one of its four, `tight` two; so the node of `tight` is the fuller one."""
    costs = replace(table(degrees=(1, 2, 4)), devices_per_node=4)
    requests = [request("loose", slo_s=9, steps=40), request("tight", slo_s=3, steps=40), request("c", 0.2, slo_s=1.3)]
    trace = simulate(requests, "tilework", num_devices=8, costs=costs)
    nodes = {uid: {device_id // 4 for group in taken for device_id in group} for uid, taken in groups(trace).items()}
    assert nodes["c"] == nodes["tight"] != nodes["loose"]
    assert on_time(trace) == 1.0


def test_a_job_that_found_no_node_is_tried_again_after_one_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of one device: `a` and `b` have them, and `c` can be on time on neither."""
    requests = [
        request("a", slo_s=1.1, steps=10),
        request("b", slo_s=1.1, steps=10),
        request("c", 0.01, slo_s=2.0, steps=10),
    ]
    tried_ns: list[int] = []
    place = NodeAssignment._place

    def spy(self: NodeAssignment, job: Any, elsewhere: Any = None) -> int | None:
        if elsewhere is not None:
            tried_ns.append(self.forecaster.now_ns)
        return place(self, job, elsewhere)

    monkeypatch.setattr(NodeAssignment, "_place", spy)
    costs = replace(table(degrees=(1,)), devices_per_node=1)
    simulate(requests, "tilework", num_devices=2, costs=costs)
    assert tried_ns
    assert all(after - before >= 100 * MS for before, after in pairwise(tried_ns))


def test_a_job_that_would_be_late_on_its_node_moves_to_another() -> None:
    """`c` leaves one device of its node to `a`, which would be late on it, and goes on where `b` is soon done."""
    costs = replace(table(degrees=(1, 2)), devices_per_node=3)
    requests = [request("a", slo_s=1.5, steps=20), request("b", slo_s=0.58, steps=8), request("c", 0.1, slo_s=0.75)]
    trace = simulate(requests, "tilework", num_devices=6, costs=costs)
    nodes = {uid: {device_id // 3 for group in taken for device_id in group} for uid, taken in groups(trace).items()}
    assert nodes["a"] == {0, 1}
    assert nodes["c"] == {0}
    assert on_time(trace) == 1.0


@pytest.mark.parametrize(("far", "expected"), [((0, 1), set()), ((1, 0), {1})])
def test_no_job_is_expected_on_a_node_that_is_too_far(
    monkeypatch: pytest.MonkeyPatch, far: tuple[int, int], expected: set[int]
) -> None:
    """As above: `a` would be late on node 0, which has its state, and is stopped for node 1 if that is near."""
    seen, expect = set[int](), NodeTable.expect

    def expects(nodes: NodeTable, job: JobView, number: int, width: int) -> None:
        seen.add(number)
        expect(nodes, job, number, width)

    monkeypatch.setattr(NodeTable, "expect", expects)
    monkeypatch.setattr(TableCosts, "move_ns", lambda *asked: 2 * NS_PER_S if asked[-1] == far else 0)
    costs = replace(table(degrees=(1, 2)), devices_per_node=3)
    requests = [request("a", slo_s=1.5, steps=20), request("b", slo_s=0.58, steps=8), request("c", 0.1, slo_s=0.75)]
    simulate(requests, "tilework", num_devices=6, costs=costs)
    assert seen == expected


# Against another policy.


@pytest.mark.parametrize("seed", range(3))
def test_more_are_on_time_than_under_tetriserve(seed: int) -> None:
    costs = shipped("flux1dev_h100_eager")
    requests = flux_requests(60, per_minute=18, scale=1.0, seed=seed)
    ours, theirs = (
        on_time(simulate(requests, name, num_devices=8, costs=costs)) for name in ("tilework", "tetriserve")
    )
    assert ours > theirs
