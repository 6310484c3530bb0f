"""The order in which tenants are served, for requests that are not ordered by deadlines."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest

from builders import SERVICE_S, controller, poisson, request, simulate
from tilework.control.controller import Controller
from tilework.core.events import Cancelled, Submitted, WorkFinished
from tilework.core.request import Request
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.sim.trace import Trace

PATIENCE_S = 60


def burst(tenant: str, count: int, at_s: float = 0.0, **more: float) -> list[Request]:
    return [request(f"{tenant}{index}", at_s, tenant=tenant, **more) for index in range(count)]


def trickle(tenant: str, count: int, every_s: float, from_s: float = 0.0) -> list[Request]:
    return [request(f"{tenant}{index}", from_s + index * every_s, tenant=tenant) for index in range(count)]


def fill(control: Controller, requests: list[Request]) -> None:
    for one in requests:
        control.handle(Submitted(one), one.arrival_ns)


def waiting(control: Controller) -> list[str]:
    return [job.request.uid for job in control.tracker.waiting()]


def mean_latency_s(trace: Trace, tenant: str) -> float:
    return fmean(one.latency_ns for one in trace.endings if one.request.tenant == tenant) / NS_PER_S


@pytest.mark.parametrize("policy", ["edf", "tetriserve"])
def test_the_few_requests_of_one_tenant_are_served_between_the_many_of_another(policy: str) -> None:
    """The first tenant's are spread over twice the time that they take; the other tenant's are served in between."""
    control = controller(policy)
    fill(control, burst("a", 40))
    fill(control, burst("b", 3, 0.5 * SERVICE_S))
    order = waiting(control)
    assert [uid for uid in order if uid[0] == "a"] == sorted(
        (uid for uid in order if uid[0] == "a"), key=lambda u: int(u[1:])
    )
    assert [order.index(f"b{index}") for index in range(3)] == pytest.approx([0, 2, 4], abs=1)


def test_first_come_first_served_ignores_tenants() -> None:
    control = controller("fixed-sp1")
    fill(control, burst("a", 40) + burst("b", 3, 1.0))
    assert waiting(control)[-3:] == ["b0", "b1", "b2"]


def test_a_tenant_of_twice_the_weight_is_served_twice_as_often() -> None:
    """A tenant's weight also divides its patience; here all requests have waited longer than that."""
    control = controller()
    fill(control, burst("a", 1, tenant_weight=1.0, weight=1.0) + burst("b", 1, tenant_weight=2.0, weight=1.0))
    heavy = burst("b", 60, 0.1, tenant_weight=2.0, weight=1.0)
    light = burst("a", 60, 0.1, tenant_weight=1.0, weight=1.0)
    fill(control, [one for pair in zip(light, heavy, strict=True) for one in pair])
    head = [uid[0] for uid in waiting(control)][:45]
    assert head.count("b") == pytest.approx(2 * head.count("a"), abs=9)


def test_a_tenant_that_is_alone_is_served_in_order_of_arrival() -> None:
    """Also when some are cancelled, which shortens the delay of later ones."""
    control, rng = controller(num_devices=2), Random(5)
    now_ns = 0
    for index in range(300):
        now_ns += rng.choice([0, 10, 900]) * NS_PER_S // 1000
        control.handle(Submitted(request(str(index), now_ns / NS_PER_S, side=rng.choice([64, 192]))), now_ns)
        if rng.random() < 0.5:
            control.handle(Cancelled(str(rng.randrange(index + 1)), "gone"), now_ns)
        order = list(map(int, waiting(control)))
        assert order == sorted(order)


def test_a_heavier_class_does_not_wait_for_lighter_ones_of_the_same_tenant() -> None:
    control = controller()
    fill(control, burst("batch", 50, weight=0.25) + burst("now", 2, 1.0, weight=4.0))
    assert control.tracker.delay_ns(request("more", 1.0, tenant="now", weight=4.0)) == pytest.approx(
        2 * 2 * SERVICE_S * NS_PER_S, rel=1e-3
    )
    mixed = controller()
    fill(mixed, [request(str(index), tenant="a", weight=0.25) for index in range(50)])
    assert mixed.tracker.delay_ns(request("more", 1.0, tenant="a", weight=4.0)) == 0


def test_the_order_of_a_request_is_bounded_and_stays() -> None:
    """Requests that arrive after its patience and its delay at the tenant's share are served after it."""
    control, rng = controller(num_devices=2), Random(11)
    tracker, urgencies, now_ns = control.tracker, dict[int, int](), 0
    most_waiting_ns = 0
    for index in range(600):
        now_ns += rng.randrange(NS_PER_S // 2)
        tenant = rng.choice("aaaaaabc")
        control.handle(Submitted(request(str(index), now_ns / NS_PER_S, tenant=tenant)), now_ns)
        most_waiting_ns = max([most_waiting_ns, *(tracker.held(name).device_ns for name in "abc")])
        for work in [device.works[0] for device in tracker.devices if device.works and rng.random() < 0.5]:
            control.handle(WorkFinished(work.work_id, ns_from_s(0.1)), now_ns)
        for job in tracker.jobs.values():
            assert urgencies.setdefault(job.job_id, job.urgency_ns) == job.urgency_ns
            bound_ns = PATIENCE_S * NS_PER_S + 3 * most_waiting_ns // 2  # Three tenants, two devices.
            assert job.request.arrival_ns <= job.urgency_ns <= job.request.arrival_ns + bound_ns
    assert most_waiting_ns > 100 * NS_PER_S, "there was little backlog"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["edf", "tetriserve"])
def test_during_a_flood_a_small_tenant_is_served_as_on_half_of_the_devices(policy: str) -> None:
    """The flood takes ten minutes; for five of them the other tenant sends a fifth of what its half can serve."""
    small = trickle("small", 30, 10 * SERVICE_S, from_s=1.0)
    flood = burst("flood", 1200)
    together = simulate([*flood, *small], policy, num_devices=2)
    alone = simulate(small, policy, num_devices=1)
    assert mean_latency_s(together, "small") < 2 * mean_latency_s(alone, "small")
    order = [one.finish_ns for one in together.endings if one.request.tenant == "flood"]
    assert order == sorted(order)


def test_two_floods_share_the_devices() -> None:
    """The second begins when the first has been served alone for some time, and gets its half from then on."""
    first, second = burst("a", 400), burst("b", 100, 100.0)
    trace = simulate([*first, *second], num_devices=2)
    ends_ns = {one.request.uid: one.finish_ns for one in trace.endings}
    last_ns = max(ns for uid, ns in ends_ns.items() if uid[0] == "b")
    meanwhile = [uid[0] for uid, ns in ends_ns.items() if ns_from_s(100) < ns <= last_ns]
    assert 100 / len(meanwhile) > 0.45
    assert meanwhile.count("a") > 0, "earlier service is not charged to a tenant for ever"


def test_late_requests_are_spread_as_well() -> None:
    """A tenant gains nothing by asking for deadlines that cannot be met."""
    flood = [request(f"a{index}", tenant="a", slo_s=0.5) for index in range(900)]
    small = trickle("b", 20, 10 * SERVICE_S, from_s=650.0)
    trace = simulate([*flood, *small], num_devices=1)
    assert mean_latency_s(trace, "b") < 3 * SERVICE_S


def test_requests_with_deadlines_are_not_spread() -> None:
    """Deadlines come first; only requests without one, or late ones, are spread."""
    asked = poisson(200, 2.0, seed=3, best_effort=0.0)
    control = controller()
    fill(control, asked)
    assert all(job.delay_ns == 0 for job in control.tracker.jobs.values() if not job.dropped_to_best_effort)
