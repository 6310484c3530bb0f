"""Limits of admission: bounds by number and by predicted work, classes, and tenants' shares."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import SERVICE_S, controller, only, promise, request, table
from tilework.admission.admission_limits import AdmissionLimits
from tilework.admission.contract import Held
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Accept, Action, Reject
from tilework.core.events import Cancelled, DeviceLost, Submitted
from tilework.core.priority import DEFAULT_CLASSES, room
from tilework.core.request import RefusalCode, Request, Status
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation

ROOMS = {name: room(weight, 4.0) for name, weight in DEFAULT_CLASSES.items()}


def of_class(uid: str, priority: str, arrival_s: float = 0.0, **more: Any) -> Request:
    weight = DEFAULT_CLASSES[priority]
    return request(uid, arrival_s, priority=priority, weight=weight, room=ROOMS[priority], **more)


def of_tenant(uid: str, tenant: str, weight: float = 1.0, **more: Any) -> Request:
    return request(uid, tenant=tenant, weight=weight, tenant_weight=weight, **more)


def submit(control: Controller, *asked: Request, now_ns: int = 0) -> Accept | Reject:
    answers: tuple[Action, ...] = ()
    for one in asked:
        answers = control.handle(Submitted(one), now_ns)
    assert isinstance(answers[0], Accept | Reject)
    return answers[0]


def num_accepted(control: Controller, asked: list[Request]) -> int:
    """How many are accepted until one is refused."""
    return next((index for index, one in enumerate(asked) if isinstance(submit(control, one), Reject)), len(asked))


# Bounds on waiting and running requests.


@given(
    num_jobs=st.integers(0, 12),
    own=st.tuples(st.integers(0, 12), st.integers(0, 90)),
    backlog_ns=st.integers(0, 90),
    num_devices=st.integers(0, 3),
    rivals=st.sampled_from([0.0, 1.0, 9.0]),
    share=st.sampled_from([1.0, 0.4]),
)
def test_while_less_than_half_of_each_bound_is_in_use_none_refuses_anything(
    num_jobs: int, own: tuple[int, int], backlog_ns: int, num_devices: int, rivals: float, share: float
) -> None:
    """So no bound is looked at then; the refusals are the same."""
    held, of_tenant = Held(num_jobs, backlog_ns), Held(*own)
    backlog: Any = SimpleNamespace(
        held=lambda tenant=None: held if tenant is None else of_tenant,
        devices=[None] * num_devices,
        taken_ns=lambda: 7,
        rivals_weight=lambda _tenant: rivals,
    )
    limits, one = AdmissionLimits(max_jobs=9, max_backlog_ns=50), request("a", room=share)
    answer = limits.refusal(one, backlog)
    with patch.object(AdmissionLimits, "_is_half_empty", lambda *_: False):
        assert limits.refusal(one, backlog) == answer


@pytest.mark.parametrize(
    "bounds", [{"max_jobs": 4}, {"max_backlog_ns": ns_from_s(2 * SERVICE_S)}], ids=["jobs", "time"]
)
def test_a_refusal_stands_exactly_while_a_tenant_that_is_new_would_be_refused(bounds: dict[str, int]) -> None:
    control = controller(num_devices=2, **bounds)
    accepted = []
    for number in range(20):
        stands = control.standing_refusal(0)
        one = of_tenant(str(number), str(number))
        answer = submit(control, one)
        assert (stands is not None) == isinstance(answer, Reject), number
        if isinstance(answer, Accept):
            accepted.append(one)
        else:
            assert stands is not None
            assert (stands.code, stands.reason) == (RefusalCode.QUEUE, answer.reason)
    control.handle(Cancelled(accepted[-1].uid, "room"), 0)
    control.handle(Cancelled(accepted[-2].uid, "room"), 0)
    assert control.standing_refusal(0) is None


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_a_request_is_accepted_while_the_devices_need_no_longer_than_the_bound(num_devices: int) -> None:
    """Each request counts by its predicted time; the last one may exceed the bound."""
    control = controller(num_devices=num_devices, max_backlog_ns=ns_from_s(9.9 * SERVICE_S))
    tenants = [of_tenant(str(index), str(index)) for index in range(99)]
    assert num_accepted(control, tenants) == 10 * num_devices
    control = controller(num_devices=num_devices, max_backlog_ns=ns_from_s(9.9 * SERVICE_S))
    large = [of_tenant(str(index), str(index), steps=100) for index in range(99)]
    assert num_accepted(control, large) == num_devices + 1, (
        "one such request takes 9.5 times as long, which is within the bound"
    )


def test_a_refusal_says_when_there_will_be_room() -> None:
    """Ten requests exceed the bound by a tenth of one; when that has been served, one more is accepted."""
    control = controller(max_backlog_ns=ns_from_s(9.9 * SERVICE_S))
    submit(control, *(of_tenant(str(index), str(index)) for index in range(10)))
    refused = submit(control, request("late"))
    assert isinstance(refused, Reject)
    assert (refused.code, refused.reason) == (
        RefusalCode.QUEUE,
        "waiting and running requests take 11 s; the limit is 10 s",
    )
    assert refused.retry_ns == pytest.approx(0.1 * SERVICE_S * NS_PER_S)
    assert refused.earliest_ns == ns_from_s(11 * SERVICE_S), "it would be the eleventh"
    (sooner,) = only(Reject, control.handle(Submitted(request("sooner")), refused.retry_ns // 2))
    assert sooner.retry_ns is not None


def test_ended_and_cancelled_requests_make_room_and_a_lost_device_takes_it() -> None:
    control = controller(num_devices=2, max_backlog_ns=ns_from_s(4.9 * SERVICE_S))
    assert num_accepted(control, [of_tenant(str(index), str(index)) for index in range(99)]) == 10
    control.handle(Cancelled("9", "gone"), 0)
    assert isinstance(submit(control, request("a")), Accept)
    control.handle(Cancelled("8", "gone"), 0)
    control.handle(DeviceLost(1, "gone"), 0)
    assert isinstance(submit(control, request("b")), Reject)


def test_without_devices_only_the_number_is_bounded() -> None:
    control = controller(num_devices=0, max_backlog_ns=1, max_jobs=5)
    assert num_accepted(control, [of_tenant(str(index), str(index)) for index in range(9)]) == 5
    refused = submit(control, request("more"))
    assert isinstance(refused, Reject)
    assert (refused.retry_ns, refused.earliest_ns) == (None, None), "unknown without devices"


def test_held_work_is_the_remaining_work_of_all_jobs() -> None:
    """The sums are updated as jobs enter, advance, are dropped to best effort and leave."""
    rng = Random(3)
    requests = [
        replace(
            request(str(index), rng.uniform(0, 20), slo_s=rng.choice([None, 1.0, 5.0]), weight=rng.choice([1.0, 4.0])),
            tenant=rng.choice("abc"),
        )
        for index in range(150)
    ]
    cancels = [(ns_from_s(rng.uniform(0, 30)), str(index)) for index in range(0, 150, 7)]
    simulation = Simulation(ControllerConfig(), table(), SimConfig(num_devices=2))
    tracker = simulation.controller.tracker

    def check(*_: object) -> None:
        for tenant in ("a", "b", "c"):
            own = [job for job in tracker.jobs.values() if job.request.tenant == tenant]
            held = tracker.held(tenant)
            assert (held.num_jobs, held.device_ns) == (
                len(own),
                sum(job.demand.width * job.demand.run_ns for job in own),
            )

    trace = simulation.run(requests, cancels, observe=check)
    assert {ending.status for ending in trace.endings} == {Status.DONE, Status.CANCELLED}
    assert (tracker.held().num_jobs, tracker.held().device_ns, tracker.rivals_weight("x")) == (0, 0, 0)


# Classes.


def test_the_lighter_a_class_the_earlier_it_is_refused() -> None:
    assert pytest.approx({"interactive": 1.0, "standard": 0.707, "batch": 0.5}, abs=1e-3) == ROOMS
    for bounds in ({"max_jobs": 100}, {"max_backlog_ns": ns_from_s(99.5 * SERVICE_S)}):
        for priority, most in (("batch", 50), ("standard", 71), ("interactive", 100)):
            control = controller(**bounds)
            asked = [replace(of_class(str(index), priority), tenant=str(index)) for index in range(120)]
            assert num_accepted(control, asked) == most, (bounds, priority)
            refused = submit(control, of_class("more", priority))
            assert isinstance(refused, Reject)
            assert (f"the limit for class {priority} is" in refused.reason) == (priority != "interactive")


def test_a_promise_that_can_be_kept_needs_no_room_in_the_queue() -> None:
    """But it counts as a request, and the number of requests is bounded for all."""
    control = controller(max_backlog_ns=ns_from_s(9.9 * SERVICE_S), max_jobs=12)
    submit(control, *(of_tenant(str(index), str(index)) for index in range(10)))
    first = promise("first", 0, slo_s=5 * SERVICE_S, room=0.5)
    assert isinstance(submit(control, first, replace(first, uid="second", tenant="second")), Accept)
    refused = submit(control, replace(first, uid="third", tenant="third"))
    assert isinstance(refused, Reject)
    assert refused.reason == "12 requests are waiting or running; the limit is 12 requests"


def test_at_three_times_the_load_light_classes_are_refused_and_the_heavy_class_is_accepted() -> None:
    """The heavy class has a load of 0.6, each of the others 1.2."""
    requests, arrival_s, rng = [], 0.0, Random(7)
    for index in range(900):
        arrival_s += rng.expovariate(3 * 2 / SERVICE_S)
        requests.append(of_class(str(index), rng.choices(list(DEFAULT_CLASSES), (1, 2, 2))[0], arrival_s))
    config = ControllerConfig(max_backlog_ns=ns_from_s(20 * SERVICE_S))
    trace = Simulation(config, table(), SimConfig(num_devices=2)).run(requests)
    counts = {name: [0, 0] for name in DEFAULT_CLASSES}
    first: dict[str, str] = {}
    for ending in trace.endings:
        is_refused = ending.status is Status.REJECTED
        counts[ending.request.priority][is_refused] += 1
        if is_refused:
            first.setdefault(ending.request.priority, ending.reason)
    shares = {name: accepted / (accepted + refused) for name, (accepted, refused) in counts.items()}
    assert next(iter(first)) == "batch"
    assert shares["interactive"] > 0.97
    assert shares["batch"] < 0.1
    assert 0.25 < shares["standard"] < 0.5, "the devices' capacity without the other classes"
    assert all(ending.status in (Status.DONE, Status.REJECTED) for ending in trace.endings), "what came in is done"


# Tenants.


def test_a_tenant_that_is_alone_may_fill_nine_tenths() -> None:
    control = controller(max_jobs=100)
    assert num_accepted(control, [of_tenant(f"a{index}", "a") for index in range(120)]) == 90
    refused = submit(control, of_tenant("more", "a"))
    assert isinstance(refused, Reject)
    assert refused.code is RefusalCode.TENANT
    assert refused.reason == "you have 90 requests waiting or running; your share is 90 requests"
    assert isinstance(submit(control, of_tenant("b", "b")), Accept)


def test_beyond_half_of_a_bound_no_tenant_has_more_than_its_share_by_weight() -> None:
    control = controller(max_backlog_ns=ns_from_s(99.5 * SERVICE_S))
    submit(control, of_tenant("b0", "b", 3.0))
    assert num_accepted(control, [of_tenant(f"a{index}", "a") for index in range(120)]) == 49, "up to half is free"
    assert num_accepted(control, [of_tenant(f"b{index}", "b", 3.0) for index in range(1, 120)]) == 50, "it is full"
    control.handle(Cancelled("b1", "gone"), 0)
    refused = submit(control, of_tenant("more", "a"))
    assert isinstance(refused, Reject)
    assert refused.code is RefusalCode.TENANT
    assert refused.retry_ns is not None
    assert refused.retry_ns > 4 * (49 - 25) * SERVICE_S * NS_PER_S, "its own requests are served at its share"
    assert isinstance(submit(control, of_tenant("more", "b", 3.0)), Accept)


def test_a_promise_counts_for_its_tenant() -> None:
    control = controller(max_jobs=10)
    submit(control, of_tenant("b", "b"), *(of_tenant(f"a{index}", "a") for index in range(5)))
    refused = submit(control, replace(promise("more", 0, slo_s=99), tenant="a"))
    assert isinstance(refused, Reject)
    assert refused.code is RefusalCode.TENANT


# Shares of promises.


def promised_to(uid: str, tenant: str, share: float = 0.25, **more: Any) -> Request:
    return replace(promise(uid, 0, slo_s=5000, **more), tenant=tenant, promise_share=share)


def test_a_tenant_beside_others_may_hold_a_quarter_of_the_promises_though_no_other_has_any() -> None:
    control = controller(max_jobs=40)
    assert num_accepted(control, [promised_to(f"a{index}", "a") for index in range(40)]) == 10
    refused = submit(control, promised_to("more", "a"))
    assert isinstance(refused, Reject)
    assert (refused.code, refused.reason) == (
        RefusalCode.TENANT,
        "you have 10 promised requests; your share is 10 requests; ask without on_miss reject, or when some of them"
        " have ended",
    )
    assert refused.retry_ns == pytest.approx(SERVICE_S * NS_PER_S, rel=0.05), "then one of the ten has ended"
    assert isinstance(submit(control, promised_to("b", "b")), Accept)
    assert isinstance(submit(control, of_tenant("without", "a")), Accept)
    control.handle(Cancelled("a3", "gone"), 0)
    assert isinstance(submit(control, promised_to("again", "a")), Accept)


def test_a_tenant_beside_others_may_hold_a_quarter_of_the_time_that_may_be_promised() -> None:
    control = controller(num_devices=2, max_backlog_ns=ns_from_s(40 * SERVICE_S))
    accepted = num_accepted(control, [promised_to(f"a{index}", "a") for index in range(80)])
    assert accepted in (20, 21), "ten of the 40 on each of both devices; the last may exceed it"
    refused = submit(control, promised_to("more", "a"))
    assert isinstance(refused, Reject)
    assert refused.code is RefusalCode.TENANT
    assert refused.reason.startswith("you have 11 s of promised requests; your share is 11 s; ask without")
    assert isinstance(submit(control, promised_to("b", "b")), Accept)


def test_a_tenant_that_shares_with_none_may_hold_all_promises() -> None:
    """But for the tenth of all requests that it leaves to tenants who come later."""
    control = controller(max_jobs=40)
    assert num_accepted(control, [promised_to(f"a{index}", "a", share=1.0) for index in range(40)]) == 36


def test_images_of_one_call_count_one_by_one() -> None:
    control = controller(max_jobs=40)
    call = [promised_to(str(index), "a") for index in range(11)]
    answers = control.handle(Submitted(call[0], tuple(call[1:])), 0)
    assert [one.code for one in only(Reject, answers)] == [RefusalCode.TENANT] * 11
    assert len(only(Accept, control.handle(Submitted(call[0], tuple(call[1:10])), 0))) == 10
