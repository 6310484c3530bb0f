"""Policies and admission, decision by decision; `test_sim` shows what comes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from builders import ALL_STAGES, PIPELINE, request, table
from tilework.control.controller import Controller, ControllerConfig
from tilework.control.job import Job
from tilework.control.tracker import Tracker
from tilework.core.actions import RunStage, RunSteps
from tilework.core.events import GpuJoined, StageFinished, StepsFinished, Submitted, WorkFailed
from tilework.core.interfaces import Admitted, Refused
from tilework.core.progress import Cursor
from tilework.core.request import OnMiss, Request
from tilework.core.time import NS_PER_MS, NS_PER_S, ns_from_s
from tilework.core.work import DECODE, ENCODE, Plan, StageId
from tilework.cost.table import TableCosts
from tilework.policy.admission import EtaAdmission, service_time_ns, start_ns
from tilework.policy.chunks import Slots
from tilework.policy.edf import EarliestDeadlineFirst
from tilework.policy.fixed import FixedDegreeOne

COSTS = TableCosts(table())
SERVICE_S = 0.01 + 10 * 0.1 + 0.05


def planned(policy: Any, requests: list[Request], num_gpus: int = 1) -> Plan:
    """What a policy plans when all these wait and all devices are idle."""
    tracker = Tracker(COSTS)
    for gpu in range(num_gpus):
        tracker.add_device(gpu, 0, ALL_STAGES)
    for job_id, asked in enumerate(requests):
        urgency_ns = policy.urgency_ns(asked, False)
        tracker.add_job(Job(job_id=job_id, request=asked, urgency_ns=urgency_ns, eta_ns=0, done=Cursor.start(asked)))
    plan: Plan = policy.plan(tracker, COSTS, 0)
    return plan


def told(plan: Plan) -> list[tuple[int, int, str, int]]:
    return [(start.gpus[0], start.job_ids[0], start.stage.name, start.num_steps) for start in plan.starts]


# Devices and chunks.


def test_devices_with_room_come_idle_first_then_soonest_free_then_by_id() -> None:
    works = {0: (1, 50), 1: (1, 40), 2: (0, 60), 3: (2, 5), 4: (1, 40), 5: (0, 60)}
    gpus = [SimpleNamespace(gpu=gpu, works=[None] * count, free_ns=free) for gpu, (count, free) in works.items()]
    view: Any = SimpleNamespace(gpus=gpus)
    assert [gpu.gpu for gpu in Slots(view, COSTS, 1).free()] == [2, 5, 1, 4, 0]


@pytest.mark.parametrize(
    ("chunk_ms", "steps_left", "num_steps"),
    [(200, 10, 2), (299, 10, 2), (300, 10, 3), (1, 10, 1), (5000, 10, 10), (200, 1, 1)],
)
def test_a_chunk_has_as_many_steps_as_fit_and_at_least_one(chunk_ms: int, steps_left: int, num_steps: int) -> None:
    policy = FixedDegreeOne(chunk_ns=chunk_ms * NS_PER_MS)
    plan = planned(policy, [request("a", steps=steps_left)])
    assert told(plan) == [(0, 0, ENCODE, 1), (0, 0, "diffuse", num_steps)]


@pytest.mark.parametrize("policy", [FixedDegreeOne(), EarliestDeadlineFirst()])
def test_each_idle_device_gets_a_job_before_any_gets_a_second_work(policy: Any) -> None:
    plan = planned(policy, [request(uid, slo_s=9) for uid in "abc"], num_gpus=2)
    assert told(plan)[:2] == [(0, 0, ENCODE, 1), (1, 1, ENCODE, 1)]
    assert sorted(told(plan)[2:]) == [(0, 0, "diffuse", 2), (1, 1, "diffuse", 2)]


def test_a_job_that_begins_again_does_not_follow_its_remnant() -> None:
    """The stopped second work of the failed attempt is still on device 0; the job goes to the idle device 1."""
    control = Controller(ControllerConfig(), table())
    for gpu in (0, 1):
        control.handle(GpuJoined(gpu, 0, ALL_STAGES), 0)
    control.handle(Submitted(request("a")), 0)
    again = control.handle(WorkFailed(1, "broken"), 1)
    works = [action.work for action in again if isinstance(action, RunStage | RunSteps)]
    assert [(work.stage.name, work.gpus) for work in works] == [(ENCODE, (1,)), ("diffuse", (1,))]


# Earliest deadline first.


def test_urgency_is_the_deadline_and_patience_without_one() -> None:
    policy = EarliestDeadlineFirst()
    due, patient = request("due", 5.0, slo_s=2.0), request("patient", 5.0)
    assert policy.urgency_ns(due, False) == 7 * NS_PER_S
    assert policy.urgency_ns(patient, False) == policy.urgency_ns(patient, True) == 65 * NS_PER_S
    assert policy.urgency_ns(due, True) == 605 * NS_PER_S, "whoever is late anyway comes after the patient"


@pytest.mark.parametrize(("slack_ns", "doomed"), [(0, ()), (-1, (0,))])
def test_only_what_would_be_late_even_alone_is_set_aside(slack_ns: int, doomed: tuple[int, ...]) -> None:
    asked = request("a", slo_s=(service_time_ns(request("a"), COSTS) + slack_ns) / NS_PER_S)
    plan = planned(EarliestDeadlineFirst(), [asked])
    assert plan.set_aside == doomed
    assert bool(plan.starts) == (not doomed), "a plan that sets aside starts nothing"


def test_whatever_may_start_now_is_checked_not_only_the_head() -> None:
    requests = [request("first", slo_s=2), request("doomed", steps=30, slo_s=2.1), request("third", slo_s=2.2)]
    plan = planned(EarliestDeadlineFirst(), requests, num_gpus=2)
    assert plan.set_aside == (1,)


def test_what_runs_is_set_aside_when_it_has_become_late() -> None:
    """Its steps took far longer than predicted: the one that can still be on time takes over."""
    control = Controller(ControllerConfig(), table())
    control.handle(GpuJoined(0, 0, ALL_STAGES), 0)
    control.handle(Submitted(request("slow", slo_s=1.5)), 0)
    control.handle(Submitted(request("other", slo_s=4.0)), 0)
    control.handle(StageFinished(1, 10 * NS_PER_MS), 10 * NS_PER_MS)
    actions = control.handle(StepsFinished(2, 200 * NS_PER_MS), 1200 * NS_PER_MS)
    (begun,) = (action.work for action in actions if isinstance(action, RunStage | RunSteps))
    assert (begun.job_ids, begun.why) == ((1,), "goes before job 0; due 4.00 s after arrival")
    assert control.tracker.jobs[0].set_aside


def test_equal_deadlines_are_served_in_order_of_arrival() -> None:
    control = Controller(ControllerConfig(), table())
    control.handle(GpuJoined(0, 0, ALL_STAGES), 0)
    for uid in ("a", "b"):
        control.handle(Submitted(request(uid, slo_s=9)), 0)
    actions = control.handle(StageFinished(1, 10 * NS_PER_MS), 10 * NS_PER_MS)
    assert [action.work.job_ids for action in actions if isinstance(action, RunSteps)] == [(0,)]


@pytest.mark.parametrize(
    ("asked", "set_aside", "why"),
    [
        (request("a"), False, "is most urgent; no deadline"),
        (request("a", slo_s=9), False, "is most urgent; due 9.00 s after arrival"),
        (request("a", slo_s=0.5), True, "is most urgent; it cannot be on time any more"),
    ],
)
def test_every_start_says_why(asked: Request, set_aside: bool, why: str) -> None:
    control = Controller(ControllerConfig(), table())
    control.handle(Submitted(asked), 0)
    actions = control.handle(GpuJoined(0, 0, ALL_STAGES), 0)
    assert [action.work.why for action in actions if isinstance(action, RunStage)] == [why]
    assert control.tracker.jobs[0].set_aside == set_aside


# Admission.


class Backlog:
    """Two devices, busy for one and two seconds; half a second of work is ahead of whoever is less urgent than 50."""

    def num_jobs(self) -> int:
        return 3

    def device_free_ns(self, now_ns: int) -> list[int]:
        return [ns_from_s(2), ns_from_s(1)]

    def ahead_ns(self, urgency_ns: int) -> list[int]:
        return [ns_from_s(0.5)] if urgency_ns > 50 else []


@pytest.mark.parametrize(("urgency_ns", "start_s"), [(99, 1.5), (9, 1.0)])
def test_the_eta_is_the_first_free_device_after_those_ahead(urgency_ns: int, start_s: float) -> None:
    answer = EtaAdmission().admit(request("a"), urgency_ns, Backlog(), COSTS, 0)
    assert answer == Admitted(ns_from_s(start_s + SERVICE_S))


def test_a_promise_is_given_up_to_the_very_deadline() -> None:
    def answer(slo_s: float, on_miss: OnMiss = OnMiss.REJECT) -> Admitted | Refused:
        return EtaAdmission().admit(request("a", slo_s=slo_s, on_miss=on_miss), 99, Backlog(), COSTS, 0)

    eta_ns = ns_from_s(1.5 + SERVICE_S)
    assert answer(eta_ns / NS_PER_S) == Admitted(eta_ns)
    refused = Refused("it would be 0.00 s late behind 3 other requests", eta_ns)
    assert answer((eta_ns - 1) / NS_PER_S) == refused
    assert answer(0.1, OnMiss.BEST_EFFORT) == Admitted(eta_ns)


def test_without_devices_the_eta_counts_from_now() -> None:
    class Nothing(Backlog):
        def device_free_ns(self, now_ns: int) -> list[int]:
            return []

    answer = EtaAdmission().admit(request("a"), 0, Nothing(), COSTS, 7 * NS_PER_S)
    assert answer == Admitted(ns_from_s(7 + SERVICE_S))


def test_up_to_128_jobs_are_placed_exactly() -> None:
    ahead = [900, 10, 10, 10] * 32
    free = [0, 5, 7]
    exact = list(free)
    for job_ns in ahead:
        exact[exact.index(min(exact))] += job_ns
    assert start_ns(free, ahead) == min(exact)


def test_pouring_fills_the_lowest_first() -> None:
    assert start_ns([0, 1000], [2] * 100 + [0] * 128) == 200
    assert start_ns([0, 100], [3] * 100 + [0] * 128) == 200


def test_a_service_time_counts_every_stage() -> None:
    asked = request("a", steps=3)
    assert service_time_ns(asked, COSTS) == ns_from_s(0.01 + 0.3 + 0.05)
    assert COSTS.run_ns(StageId(PIPELINE, DECODE), (asked.shape,), 1) == ns_from_s(0.05)
