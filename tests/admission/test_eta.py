"""Admission, answer by answer; `test_reservations` and `test_reservation_guard` are about promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from builders import SERVICE_S, Idle, controller, only, promise, request, simulate, table
from stages import ENCODE
from tilework.admission.admission import Admission
from tilework.admission.admission_limits import AdmissionLimits
from tilework.admission.contract import (
    Admitted,
    Ahead,
    EtaPrediction,
    Held,
    Moment,
    Promise,
    ReservationChanges,
    Running,
)
from tilework.admission.reservations import SearchBudget
from tilework.control.cluster.device import Device, Now
from tilework.core.actions import Accept, Finish, Reject, RunWork
from tilework.core.block import Block, Demand
from tilework.core.events import Cancelled, Submitted, WorkFinished
from tilework.core.graph.progress import Cursor
from tilework.core.policy import CostModel
from tilework.core.pools import Within
from tilework.core.request import OnMiss, RefusalCode, Request, Status
from tilework.core.time import NS_PER_MS, NS_PER_S, START_MARGINS, ns_from_s
from tilework.cost.table_costs import TableCosts

COSTS = TableCosts(table())


@dataclass
class Wanting(Idle):
    """A policy with this urgency for each request, that wants `width` devices for a second."""

    urgency: int = 99
    width: int = 1

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return self.urgency

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        return Demand(self.width, NS_PER_S)


@dataclass
class Backlog:
    """Three devices, free after 1, 2 and 4 s; a job of two devices for 1 s precedes requests less urgent than 50."""

    free_s: Sequence[float] = (4, 2, 1)
    needs_loads: bool = False
    margins = START_MARGINS
    devices: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        times = enumerate(self.free_s)
        self.slots: list[Device] = []
        self.silent = frozenset[int]()
        self.devices = [
            Device(device_id=device_id, node=0, pool=0, now=Now(ns_from_s(free_s))) for device_id, free_s in times
        ]

    def widest(self, pipeline: str) -> int:
        return 3

    def held(self, tenant: str | None = None) -> Held:
        return Held(3, 0)

    def rivals_weight(self, tenant: str) -> float:
        return 0.0

    def delay_ns(self, request: Request) -> int:
        return 0

    def waiting_ahead(self, urgency_ns: int, job_id: int | None = None, within: Within = None) -> Ahead:
        return Ahead(0, [Demand(2, ns_from_s(1))] if urgency_ns > 50 else [])

    @property
    def moment(self) -> Moment:
        return Moment(0, 0, 0)

    def taken_ns(self) -> int:
        return sum(map(ns_from_s, self.free_s))

    def free_ns(self, within: Within = None) -> list[int]:
        return sorted(map(ns_from_s, self.free_s))

    def running(self, within: Within = None) -> list[Running]:
        return []

    def promised(self) -> list[Any]:
        return []

    def reserved(self, most: int | None = None) -> list[Any]:
        return []

    def begun_reservations(self) -> list[Any]:
        return []

    def reservation_changes(self, since: int) -> ReservationChanges:
        return ReservationChanges(0, (), is_all=False)


def answer(asked: Request, policy: Any = None, backlog: Any = None, now_ns: int = 0) -> Admitted | Reject:
    limits = AdmissionLimits(max_jobs=10, max_backlog_ns=100 * NS_PER_S)
    return Admission(limits=limits).admit(
        asked, COSTS.start(asked), policy or Idle(), COSTS, backlog or Backlog(), now_ns, SearchBudget()
    )


@pytest.mark.parametrize(
    ("urgency_ns", "width", "start_s"), [(99, 1, 3), (9, 1, 1), (9, 2, 2), (99, 2, 3), (9, 3, 4), (99, 3, 4), (9, 8, 4)]
)
def test_the_eta_counts_the_jobs_ahead_and_the_devices_that_each_needs(
    urgency_ns: int, width: int, start_s: float
) -> None:
    admitted = answer(request("a"), Wanting(urgency_ns, width))
    devices = "1 device" if width == 1 else f"{width} devices"
    end_ns = ns_from_s(start_s + 1)
    assert admitted == Admitted(
        f"needs 1.00 s on {devices}; 3 other requests",
        EtaPrediction(0, end_ns, end_ns, 3 * end_ns, 3),
        Demand(width, NS_PER_S),
    )


def test_a_promise_is_given_with_a_margin_before_the_deadline() -> None:
    """The first device is free after 1 s; no job is served before a request with a deadline."""

    class NoneAhead(Backlog):
        def waiting_ahead(self, urgency_ns: int, job_id: int | None = None, within: Within = None) -> Ahead:
            return Ahead(0, [])

    eta_ns = ns_from_s(1 + SERVICE_S)
    due_ns = START_MARGINS.admission.due_ns(eta_ns, 0)

    def asked(due_ns: int, on_miss: OnMiss = OnMiss.REJECT) -> Admitted | Reject:
        return answer(request("a", slo_s=due_ns / NS_PER_S, on_miss=on_miss), backlog=NoneAhead())

    accepted = asked(due_ns)
    assert isinstance(accepted, Admitted)
    block = Block(due_ns, 0, Demand(1, ns_from_s(SERVICE_S)), (2,))
    assert (accepted.eta_prediction.eta_ns, accepted.promise) == (eta_ns, Promise(block))
    assert accepted.why == "needs 1.06 s on 1 device; 3 other requests; its deadline is promised"
    scarce = "reservations leave no room for it, with 3 other requests present"
    assert asked(due_ns - 1) == Reject("a", scarce, due_ns, RefusalCode.DEADLINE, retry_ns=1)
    late = "it would be 0.00 s late, with 3 other requests present"
    assert asked(eta_ns - 1) == Reject("a", late, due_ns, RefusalCode.DEADLINE, retry_ns=due_ns - eta_ns + 1)
    assert isinstance(asked(NS_PER_S, OnMiss.BEST_EFFORT), Admitted)


def test_without_devices_only_a_promise_is_refused() -> None:
    nothing, now_ns = Backlog(()), 7 * NS_PER_S
    why = "no device is up; the prediction assumes that one is up now"
    service_ns = ns_from_s(SERVICE_S)
    assert answer(request("a", slo_s=9), backlog=nothing, now_ns=now_ns) == Admitted(
        why, EtaPrediction.alone(now_ns, Demand(1, service_ns)), Demand(1, service_ns)
    )
    refused = Reject("b", "no device is up", None, RefusalCode.NO_DEVICE)
    assert answer(promise("b", 0, slo_s=9), backlog=nothing, now_ns=now_ns) == refused


def test_a_request_that_cannot_be_on_time_is_refused_with_the_earliest_deadline() -> None:
    others = [request(str(index), 0.0) for index in range(6)]
    trace = simulate([*others, promise("late", 0.0, slo_s=1.4)], "fixed-sp1")
    assert trace.endings[-1].status is Status.REJECTED
    assert "late, with 6 other requests present" in trace.endings[-1].reason
    assert simulate([*others, promise("on time", 0.0, slo_s=4.6)], "fixed-sp1").endings[-1].on_time


def test_a_promise_that_would_break_another_is_refused_for_this_reason() -> None:
    """Both have the same deadline, which is enough for either: the one with the lower id gets it."""
    control = controller()
    control.handle(Submitted(promise("first", 0, slo_s=1.5 * SERVICE_S)), 0)
    (refused,) = only(Reject, control.handle(Submitted(promise("second", 0, slo_s=1.4 * SERVICE_S)), 0))
    assert refused.reason == "reservations leave no room for it, with 1 other request present"


# How many are accepted.


def test_no_more_requests_than_the_limit_are_accepted_until_some_have_ended() -> None:
    control = controller(max_jobs=3)
    answers = [control.handle(Submitted(request(uid)), 0)[0] for uid in "abcd"]
    assert [type(answer) for answer in answers] == [Accept, Accept, Accept, Reject]
    reason = "3 requests are waiting or running; the limit is 3 requests"
    earliest_ns, retry_ns = ns_from_s(4 * SERVICE_S), ns_from_s(SERVICE_S)
    assert answers[-1] == Reject("d", reason, earliest_ns, RefusalCode.QUEUE, retry_ns), "one has ended by then"
    assert only(Finish, control.handle(Cancelled("b", "gone"), 1))
    assert [type(control.handle(Submitted(request(uid)), 2)[0]) for uid in "ef"] == [Accept, Reject]


def test_a_request_that_is_done_makes_room() -> None:
    requests = [request("a"), request("b", 1.0), request("c", 1.1)]
    trace = simulate(requests, num_devices=1, max_jobs=1)
    assert [ending.status for ending in trace.endings] == [Status.DONE, Status.REJECTED, Status.DONE]


def test_a_full_queue_precedes_an_unreachable_deadline_as_the_reason() -> None:
    """Since another deadline would not help."""
    control = controller(max_jobs=1)
    control.handle(Submitted(request("a")), 0)
    (refused,) = only(Reject, control.handle(Submitted(promise("b", 0, slo_s=0.1)), 0))
    assert (refused.code, refused.earliest_ns) == (RefusalCode.QUEUE, None)
    control.handle(WorkFinished(1, 10 * NS_PER_MS), 10 * NS_PER_MS)
    (refused,) = only(Reject, control.handle(Submitted(request("c")), 11 * NS_PER_MS))
    assert refused.code is RefusalCode.QUEUE, "the end of a stage makes no room"


# Several requests that are submitted together.


def together(count: int, slo_s: float, now_s: float = 0.0) -> Submitted:
    first, *others = (promise(f"{index} of {count}", now_s, slo_s=slo_s) for index in range(count))
    return Submitted(first, tuple(others))


def test_requests_submitted_together_are_all_accepted_before_any_starts() -> None:
    control = controller(num_devices=2)
    answers = control.handle(together(3, slo_s=9), 0)
    assert [type(answer) for answer in answers[:3]] == [Accept] * 3
    begun = [action.work for action in only(RunWork, answers[3:])]
    assert [work.job_ids for work in begun if work.stage.name == ENCODE] == [(0,), (1,)]
    assert [answer.job_id for answer in only(Accept, answers)] == [0, 1, 2]
    (accept,) = only(Accept, control.handle(Submitted(request("later")), 1))
    assert accept.job_id == 3


def test_if_one_is_refused_none_is_accepted_and_nothing_starts() -> None:
    """Two devices can serve two of them in time."""
    control = controller(num_devices=2)
    answers = control.handle(together(3, slo_s=1.5 * SERVICE_S), 0)
    assert [(answer.uid, answer.code) for answer in only(Reject, answers)] == [
        (f"{index} of 3", RefusalCode.DEADLINE) for index in range(3)
    ]
    assert len(answers) == 3
    assert "(request 3 of 3 submitted together)" in only(Reject, answers)[0].reason
    assert len(control.tracker.jobs) == len(control.tracker.promised()) == 0
    (accept,) = only(Accept, control.handle(Submitted(promise("alone", 0, slo_s=1.5 * SERVICE_S)), 1))
    assert accept.job_id == 0, "the refused requests have used no place and no job id"


@pytest.mark.parametrize("count", [2, 3, 7])
def test_all_would_be_accepted_with_the_earliest_deadline_of_the_refusal(count: int) -> None:
    control = controller(num_devices=2)
    control.handle(Submitted(promise("first", 0, slo_s=9)), 0)
    told = {answer.earliest_ns for answer in only(Reject, control.handle(together(count, slo_s=0.5), 1))}
    (earliest_ns,) = told
    assert earliest_ns is not None
    sooner = together(count, slo_s=earliest_ns / NS_PER_S - 0.4)
    assert only(Reject, control.handle(sooner, 1)), "it depends on the last request"
    assert len(only(Accept, control.handle(together(count, slo_s=earliest_ns / NS_PER_S), 1))) == count


def test_each_of_the_requests_submitted_together_counts() -> None:
    control = controller(max_jobs=2)
    assert len(only(Reject, control.handle(together(3, slo_s=99), 0))) == 3
    assert len(only(Accept, control.handle(together(2, slo_s=99), 0))) == 2
