"""Policies and admission, decision by decision; `test_sim` shows what comes of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builders import ONE_OF_EACH, PIPELINE, planned, request, simulate, table
from quick import quick
from stages import DECODE, DIFFUSE, ENCODE, at_start, stage_of
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import RunWork
from tilework.core.block import Demand
from tilework.core.events import DeviceJoined, Submitted, WorkFailed, WorkFinished
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS, NS_PER_S, ns_from_s
from tilework.core.work import Group, Plan
from tilework.cost.demand import demand_at
from tilework.cost.table_costs import TableCosts
from tilework.policy.published.edf import EarliestDeadlineFirst
from tilework.policy.published.fixed import FixedDegree
from tilework.policy.registry import SHIPPED, policy_names
from tilework.policy.toolkit.fixed_groups import Lane, LanePlan

COSTS = TableCosts(table())
WIDE_COSTS = TableCosts(table(degrees=(1, 2, 4)))


def service_time_ns(asked: Request) -> int:
    return demand_at(asked, at_start(asked), 1, COSTS).run_ns


def told(plan: Plan) -> list[tuple[int, int, str, int]]:
    return [(start.devices[0], start.job_ids[0], start.stage.name, start.num_steps) for start in plan.starts]


# Devices and chunks.


@dataclass(eq=False)
class Device:
    device_id: int
    works: list[None]
    free_ns: int


def test_devices_with_room_are_ordered_by_idle_then_free_time_then_id() -> None:
    works = {0: (1, 50), 1: (1, 40), 2: (0, 60), 3: (2, 5), 4: (1, 40), 5: (0, 60)}
    devices: list[Any] = [Device(device_id, [None] * count, free) for device_id, (count, free) in works.items()]
    lanes = [Lane((device_id,)) for device_id in devices]
    view: Any = SimpleNamespace(devices=devices)
    asked: list[Group] = []
    LanePlan(view, lanes, COSTS, 1).plan(lambda lane: asked.append(lane.ids))
    assert asked == [(2,), (5,), (1,), (4,), (0,)]


def test_a_lane_is_as_busy_as_its_busiest_device() -> None:
    devices: list[Any] = [Device(0, [None], 50), Device(1, [], 0), Device(2, [None, None], 70), Device(3, [None], 90)]
    lane = Lane(tuple(devices))
    assert (lane.ids, lane.num_works, lane.free_ns) == ((0, 1, 2, 3), 2, 90)


@pytest.mark.parametrize(
    ("chunk_ms", "steps_left", "num_steps"),
    [(200, 10, 2), (299, 10, 2), (300, 10, 3), (1, 10, 1), (5000, 10, 10), (200, 1, 1)],
)
def test_a_chunk_has_as_many_steps_as_fit_and_at_least_one(chunk_ms: int, steps_left: int, num_steps: int) -> None:
    policy = FixedDegree(degree=1, chunk_ns=chunk_ms * NS_PER_MS)
    plan = planned(policy, [request("a", steps=steps_left)])
    assert told(plan) == [(0, 0, ENCODE, 1), (0, 0, "diffuse", num_steps)]


@pytest.mark.parametrize("policy", [FixedDegree(degree=1), EarliestDeadlineFirst()])
def test_each_idle_device_gets_a_job_before_any_gets_a_second_work(policy: Any) -> None:
    plan = planned(policy, [request(uid, slo_s=9) for uid in "abc"], num_devices=2)
    assert told(plan)[:2] == [(0, 0, ENCODE, 1), (1, 1, ENCODE, 1)]
    assert sorted(told(plan)[2:]) == [(0, 0, "diffuse", 2), (1, 1, "diffuse", 2)]


def test_a_job_that_begins_again_does_not_follow_its_remnant() -> None:
    """The stopped second work of the failed attempt is still on device 0; the job goes to the idle device 1."""
    control = Controller(ControllerConfig(policy="edf"), table())
    for device_id in (0, 1):
        control.handle(DeviceJoined(device_id, 0), 0)
    control.handle(Submitted(request("a")), 0)
    again = control.handle(WorkFailed(1, "broken"), 1)
    works = [action.work for action in again if isinstance(action, RunWork)]
    assert [(work.stage.name, work.devices) for work in works] == [(ENCODE, (1,)), ("diffuse", (1,))]


# Earliest deadline first.


def test_urgency_is_the_deadline_and_patience_without_one() -> None:
    policy = EarliestDeadlineFirst()
    due, patient = request("due", 5.0, slo_s=2.0), request("patient", 5.0)
    assert policy.urgency_ns(due, False) == 7 * NS_PER_S
    assert policy.urgency_ns(patient, False) == policy.urgency_ns(patient, True) == 65 * NS_PER_S
    assert policy.urgency_ns(due, True) == 605 * NS_PER_S, "a late request comes after one without a deadline"


# Weights.


def served(*requests: Request, policy: str = "edf") -> list[str]:
    """The requests in the order in which they are done on one device."""
    endings = simulate(list(requests), policy, num_devices=1).endings
    return [ending.request.uid for ending in sorted(endings, key=lambda ending: ending.finish_ns)]


def test_patience_is_divided_by_the_weight() -> None:
    policy, heavy, light = EarliestDeadlineFirst(), request("a", 5.0, weight=4.0), request("b", 5.0, weight=0.25)
    assert policy.urgency_ns(heavy, False) == (5 + 15) * NS_PER_S
    assert policy.urgency_ns(light, False) == (5 + 240) * NS_PER_S
    late = request("c", 5.0, slo_s=2.0, weight=4.0)
    assert policy.urgency_ns(late, False) == 7 * NS_PER_S, "a request that can be on time needs no weight"
    assert policy.urgency_ns(late, True) == (5 + 150) * NS_PER_S


@pytest.mark.parametrize("policy", ["edf", "tetriserve"])
def test_heavier_requests_without_a_deadline_are_served_first(policy: str) -> None:
    blocker, light, heavy = request("blocker", slo_s=5), request("light", 0.1), request("heavy", 0.1, weight=4.0)
    assert served(blocker, light, heavy, policy=policy) == ["blocker", "heavy", "light"]


def test_a_weight_makes_up_for_arriving_later_but_not_for_ever() -> None:
    """Of weights 4 and 1, the heavier goes first if it comes within three quarters of the patience."""
    others = [request(f"other{index}", slo_s=59 + index / 100) for index in range(55)]
    for arrival_s, order in ((44.0, ["heavy", "light"]), (46.0, ["light", "heavy"])):
        both = [request("light", 0.0), request("heavy", arrival_s, weight=4.0)]
        done = served(*others, *both)
        assert [uid for uid in done if uid in order] == order


@pytest.mark.parametrize("policy", ["edf", "tetriserve"])
def test_no_job_starves_under_a_stream_of_heavier_ones(policy: str) -> None:
    """More of weight 4 than the device can do, for five minutes; one of weight 1 waits for its minute and a bit."""
    stream = [request(str(index), index * 0.9, weight=4.0) for index in range(330)]
    endings = simulate([request("light", 0.5), *stream], policy, num_devices=1).endings
    assert endings[0].latency_ns < 75 * NS_PER_S
    assert endings[0].latency_ns > 30 * NS_PER_S, "or the stream was no burden"


@pytest.mark.parametrize(("slack_ns", "dropped"), [(0, ()), (-1, (0,))])
def test_only_what_would_be_late_even_alone_is_dropped_to_best_effort(slack_ns: int, dropped: tuple[int, ...]) -> None:
    asked = request("a", slo_s=(service_time_ns(request("a")) + slack_ns) / NS_PER_S)
    plan = planned(EarliestDeadlineFirst(), [asked])
    assert tuple(job_id for job_id, _ in plan.dropped_to_best_effort) == dropped
    assert bool(plan.starts) == (not dropped), "a plan that drops jobs starts nothing"


def test_whatever_may_start_now_is_checked_not_only_the_head() -> None:
    requests = [request("first", slo_s=2), request("late", steps=30, slo_s=2.1), request("third", slo_s=2.2)]
    plan = planned(EarliestDeadlineFirst(), requests, num_devices=2)
    assert plan.dropped_to_best_effort == ((1, "even if nothing else ran, it would finish 0.96 s late"),)


def test_a_running_job_that_has_become_late_is_dropped_to_best_effort() -> None:
    """Its steps took far longer than predicted: the one that can still be on time takes over."""
    control = Controller(ControllerConfig(policy="edf"), table())
    control.handle(DeviceJoined(0, 0), 0)
    control.handle(Submitted(request("slow", slo_s=1.5)), 0)
    control.handle(Submitted(request("other", slo_s=4.0)), 0)
    control.handle(WorkFinished(1, 10 * NS_PER_MS), 10 * NS_PER_MS)
    actions = control.handle(WorkFinished(2, 200 * NS_PER_MS), 1200 * NS_PER_MS)
    (begun,) = (action.work for action in actions if isinstance(action, RunWork))
    assert (begun.job_ids, begun.why) == (
        (1,),
        "goes before a request that has 596.00 s more; due in 2.80 s, needs 1.06 s on 1 device",
    )
    assert control.tracker.jobs[0].dropped_to_best_effort


def test_equal_deadlines_are_served_in_order_of_arrival() -> None:
    control = Controller(ControllerConfig(policy="edf"), table())
    control.handle(DeviceJoined(0, 0), 0)
    for uid in ("a", "b"):
        control.handle(Submitted(request(uid, slo_s=9)), 0)
    actions = control.handle(WorkFinished(1, 10 * NS_PER_MS), 10 * NS_PER_MS)
    begun = [action.work for action in actions if isinstance(action, RunWork)]
    assert [work.job_ids for work in begun if work.stage.name == DIFFUSE] == [(0,)]


@pytest.mark.parametrize(
    ("asked", "dropped_to_best_effort", "why"),
    [
        (request("a"), False, "is most urgent; no deadline"),
        (request("a", slo_s=9), False, "is most urgent; due in 9.00 s, needs 1.06 s on 1 device"),
        (request("a", slo_s=0.5), True, "is most urgent; it cannot be on time any more"),
    ],
)
def test_every_start_has_a_reason(asked: Request, dropped_to_best_effort: bool, why: str) -> None:
    control = Controller(ControllerConfig(policy="edf"), table())
    control.handle(Submitted(asked), 0)
    actions = control.handle(DeviceJoined(0, 0), 0)
    first = next(action.work for action in actions if isinstance(action, RunWork))
    assert first.why == why
    assert control.tracker.jobs[0].dropped_to_best_effort == dropped_to_best_effort


# Fixed degrees.


@pytest.mark.parametrize(
    ("devices", "groups"),
    [
        (range(8), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ((0, 1, 2, 3, 5, 6, 7), [(0, 1, 2, 3), (6, 7), (5,)]),
        ((1, 2, 3, 4, 5), [(1, 2, 3, 4), (5,)]),
        ((0, 1, 8, 9, 10), [(0, 1), (8, 9), (10,)]),
    ],
)
def test_the_devices_of_a_node_are_divided_into_groups(devices: Any, groups: list[tuple[int, ...]]) -> None:
    requests = [request(str(index)) for index in range(3)]
    plan = planned(FixedDegree(degree=4), requests, costs=WIDE_COSTS, devices=tuple(devices))
    steps = [start for start in plan.starts if start.stage.name == "diffuse"]
    assert [start.devices for start in sorted(steps, key=lambda start: start.job_ids)] == groups
    for start in steps:
        assert start.why.startswith("keeps its group until it is finished")
        assert start.why.endswith("can form a group now") == (len(start.devices) < 4)


def test_encode_and_decode_run_on_the_first_device_of_the_group() -> None:
    plan = planned(FixedDegree(degree=2, chunk_ns=NS_PER_S), [request("a", steps=3)], costs=WIDE_COSTS, num_devices=2)
    assert [(start.stage.name, start.devices) for start in plan.starts] == [(ENCODE, (0,)), ("diffuse", (0, 1))]


def test_a_pipeline_takes_as_many_devices_as_it_was_profiled_for() -> None:
    plan = planned(FixedDegree(degree=8), [request("a")], costs=WIDE_COSTS, num_devices=8)
    assert [start.devices for start in plan.starts] == [(0,), (0, 1, 2, 3)]
    assert plan.starts[0].why == "has waited longest; its pipeline was profiled for 4 devices at most"


def test_a_chunk_at_a_wide_degree_has_more_steps() -> None:
    """A step takes 100 ms on one GPU and 62.5 ms on two."""
    (_, steps) = planned(FixedDegree(degree=2), [request("a")], costs=WIDE_COSTS, num_devices=2).starts
    assert steps.num_steps == 3


def test_the_demand_at_a_fixed_degree() -> None:
    asked = request("a", steps=4)
    seconds = 0.01 + 4 * 0.1 / 1.6**2 + 0.05
    assert FixedDegree(degree=4).demand(asked, at_start(asked), WIDE_COSTS) == Demand(
        4, ns_from_s(seconds), ns_from_s(0.01), ns_from_s(0.05)
    )
    assert FixedDegree(degree=8).demand(asked, at_start(asked), WIDE_COSTS).width == 4


def test_a_service_time_counts_every_stage() -> None:
    asked = request("a", steps=3)
    assert service_time_ns(asked) == ns_from_s(0.01 + 0.3 + 0.05)
    assert COSTS.run_ns(stage_of(PIPELINE, DECODE), (asked.shape,), 1) == ns_from_s(0.05)


@pytest.mark.parametrize("policy", quick((*ONE_OF_EACH, "onepiece"), policy_names()))
def test_the_docs_have_a_row_for_every_policy(policy: str) -> None:
    """What ships is on the page of policies, all else on that of the lab."""
    page = Path(__file__).parents[2] / ("docs" if policy in SHIPPED else "lab/docs") / "policies.md"
    text = page.read_text("utf-8").partition("\n## Departures")[0]
    rows = (row for row in text.splitlines() if row.startswith("| `"))
    assert policy in {name for row in rows for name in re.findall("`([^`]+)`", row)}
