"""GF-DiT's policy, decision by decision, and what comes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import finished, flux_requests, groups, on_time, planned, profile, request, shipped, simulate, table
from stages import DIFFUSE
from tilework.core.request import Request
from tilework.core.time import NS_PER_S
from tilework.core.work import Group
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.policy import registry
from tilework_lab.policies.gf_dit import BestFit

WIDE = table(degrees=(1, 2, 4))  # Ten steps with encode and decode take 1.06, 0.69 and 0.45 s on 1, 2 and 4 devices.
STRICT, DROP = "gf-dit-edf-best-fit", "gf-dit-edf-best-fit-drop"


def taken(requests: list[Request], num_devices: int, costs: CostTable = WIDE) -> list[Group]:
    """The group of each request, by its place; none if it waits."""
    plan = planned(BestFit(drops_to_best_effort=False), requests, num_devices, TableCosts(costs))
    of_job = {start.job_ids[0]: start.devices for start in plan.starts if start.stage.name == DIFFUSE}
    return [of_job.get(index, ()) for index in range(len(requests))]


def widths(requests: list[Request], num_devices: int, costs: CostTable = WIDE) -> list[int]:
    return [len(group) for group in taken(requests, num_devices, costs)]


@pytest.mark.parametrize(("slo_s", "degree"), [(1.07, 1), (1.05, 2), (0.69, 2), (0.68, 4), (0.46, 4)])
def test_a_job_takes_the_narrowest_group_that_meets_its_deadline(slo_s: float, degree: int) -> None:
    """All others are as urgent, so that nothing is left over."""
    requests = [request(str(index), slo_s=slo_s) for index in range(8 // degree)]
    assert widths(requests, 8) == [degree] * (8 // degree)


def test_remaining_devices_go_to_the_most_urgent_repeatedly() -> None:
    late, soon = request("late", slo_s=9), request("soon", slo_s=8)
    assert widths([late, soon], 4) == [2, 2], "the next wider group, then there are not enough for one wider still"
    assert widths([late, soon], 5) == [1, 4]


def test_no_job_gets_devices_that_make_it_slower() -> None:
    costs = profile({128: {1: 0.1, 2: 0.12, 4: 0.15}})
    assert widths([request("a", slo_s=9), request("late", slo_s=0.1)], 8, costs) == [1, 1]


def test_a_late_request_or_one_without_a_deadline_is_as_quick_as_it_can_be() -> None:
    assert widths([request("late", slo_s=0.1), request("free"), request("more")], 7) == [4, 2, 1]


def test_a_job_gives_devices_up_and_gets_them_back_where_it_is() -> None:
    """The second comes when the first has devices that it does not need, and takes no more than it needs itself."""
    trace = simulate([request("a", slo_s=9, steps=40), request("b", 0.5, slo_s=0.8)], STRICT, num_devices=4, costs=WIDE)
    assert groups(trace) == {"a": [(0, 1, 2, 3), (2, 3), (0, 1, 2, 3)], "b": [(0, 1)]}


def test_strict_order_serves_late_requests_first_and_so_makes_others_late() -> None:
    requests = [request("late", slo_s=0.3), request("good", 0.01, slo_s=1.3)]
    strict, drop = (simulate(requests, policy, num_devices=1) for policy in (STRICT, DROP))
    assert (finished(strict), on_time(strict)) == (["late", "good"], 0.0)
    assert (finished(drop), on_time(drop)) == (["good", "late"], 0.5)


def test_a_hopeless_request_is_dropped_to_best_effort_with_its_reason() -> None:
    plan = planned(
        BestFit(drops_to_best_effort=True), [request("a", slo_s=0.4), request("b", slo_s=1)], 8, TableCosts(WIDE)
    )
    assert plan.dropped_to_best_effort == ((0, "even if nothing else ran, it would finish 0.05 s late"),)
    assert not plan.starts


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "bound_s"), [(STRICT, 130), (DROP, 62)])
def test_best_effort_does_not_starve(policy: str, bound_s: int) -> None:
    """Twice what the device can do: strictly, all that is due within a minute is served first, in two minutes."""
    others = [request(str(index), index * 0.5, slo_s=1.3) for index in range(400)]
    trace = simulate([request("patient", steps=8), *others], policy, num_devices=1)
    assert 5 * NS_PER_S < trace.endings[0].latency_ns < bound_s * NS_PER_S
    assert trace.endings[-1].finish_ns > 300 * NS_PER_S, "or the others was no burden"


def test_no_bubble_opens_between_two_chunks() -> None:
    """What lies before each work is done while the one before it runs."""
    trace = simulate([request("a", steps=40)], STRICT, num_devices=1)
    ends_ns = [run.end_ns for run in trace.runs]
    assert [run.start_ns for run in trace.runs] == [0, *ends_ns[:-1]]
    queued = [run.work.after for run in trace.runs[1:]]
    assert all(queued), "each work is told before the last one ends"


def test_shorter_chunks_keep_more_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the study of its published code has found."""
    requests, costs = flux_requests(150, 18, 1.0, seed=2), shipped("flux1dev_h100_eager")
    monkeypatch.setitem(registry._GIVEN, "long", lambda: BestFit(drops_to_best_effort=True, chunk_ns=NS_PER_S))
    short, long = (on_time(simulate(requests, policy, num_devices=8, costs=costs)) for policy in (DROP, "long"))
    assert short > long + 0.02


def test_it_beats_tetriserve_and_every_simulation_of_it_is_the_same() -> None:
    """TetriServe §6.2 at 12 requests per minute, with a shorter workload: the row to beat."""
    requests, costs = flux_requests(100, 12, 1.0, seed=2), shipped("flux1dev_h100_eager")
    mine, again, other = (
        simulate(requests, policy, num_devices=8, costs=costs) for policy in (DROP, DROP, "tetriserve")
    )
    assert on_time(mine) > max(0.93, on_time(other))
    assert mine == again


def test_a_group_does_not_span_nodes() -> None:
    costs = replace(WIDE, devices_per_node=2)
    trace = simulate([request(str(index), slo_s=0.5) for index in range(4)], STRICT, num_devices=4, costs=costs)
    assert {group for visited in groups(trace).values() for group in visited} <= {
        (0,),
        (1,),
        (2,),
        (3,),
        (0, 1),
        (2, 3),
    }
