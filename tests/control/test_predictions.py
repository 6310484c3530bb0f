"""Predictions of the controller: corrected costs, free devices, the queue, and the ends of jobs."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import PIPELINE, SERVICE_S, controller, job, only, poisson, promise, request, simulate, table
from stages import ENCODE, stage_of
from tilework.admission.contract import Ahead
from tilework.control.cluster.job import Job
from tilework.control.cluster.queue import WaitingQueue
from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Accept, Action, Reject
from tilework.core.block import Demand
from tilework.core.events import Cancelled, DeviceJoined, Event, Stopped, Submitted, Woke, WorkFinished
from tilework.core.request import RefusalCode, Request
from tilework.core.time import NS_PER_MS, START_MARGINS, ns_from_s
from tilework.sim.config import SimConfig
from tilework.sim.simulation import Simulation


def learned(event: Event, asked: Request) -> float:
    """The controller's prediction after a first measured encode, relative to the table."""
    control = controller()
    control.handle(Submitted(asked), 0)
    control.handle(event, 1)
    return control.costs.run_ns(stage_of(PIPELINE, ENCODE), (asked.shape,), 1) / (10 * NS_PER_MS)


def test_measurements_correct_the_costs() -> None:
    slow = WorkFinished(1, 20 * NS_PER_MS)
    assert learned(slow, request("a")) == 2.0
    assert learned(slow, request("a", guided=False)) == 2.0, "guidance affects steps only"
    assert learned(Stopped(1, 0), request("a")) == 1.0


def test_nothing_is_learned_from_a_work_of_a_cancelled_request() -> None:
    control = controller()
    control.handle(Submitted(request("a")), 0)
    control.handle(Cancelled("a", "gone"), 1)
    control.handle(WorkFinished(1, 20 * NS_PER_MS), 2)
    assert control.costs.version == 0


def test_a_device_is_expected_to_be_free_when_its_works_end_and_never_in_the_past() -> None:
    control = controller()
    control.handle(Submitted(request("a")), 0)
    (device,) = control.tracker.devices

    def free_ms(now_ms: int) -> float:
        control.handle(Woke(), now_ms * NS_PER_MS)
        return device.free_ns / NS_PER_MS

    assert free_ms(4) == 10 + 200
    assert free_ms(50) == 50 + 200, "the encode is late: it may end now at the earliest"
    control.handle(WorkFinished(1, 10 * NS_PER_MS), 60 * NS_PER_MS)
    assert free_ms(100) == 60 + 200 + 200
    control.handle(Cancelled("a", "gone"), 110 * NS_PER_MS)
    control.handle(Stopped(3, 0), 120 * NS_PER_MS)
    assert free_ms(130) == 60 + 200, "a revoked work is not counted any more"
    control.handle(Stopped(2, 1), 140 * NS_PER_MS)
    assert free_ms(150) == 150
    control.handle(Submitted(request("b", steps=1)), 300 * NS_PER_MS)
    assert free_ms(301) == 300 + 10 + 100
    control.handle(WorkFinished(4, 10 * NS_PER_MS), 310 * NS_PER_MS)
    control.handle(WorkFinished(5, 100 * NS_PER_MS), 410 * NS_PER_MS)
    control.handle(Submitted(request("c")), 430 * NS_PER_MS)
    assert free_ms(431) == 410 + 50 + 10, "a queued work does not delay the predicted end of the running one"


def test_a_device_is_not_expected_to_begin_before_it_joins() -> None:
    control = controller(num_devices=0)
    control.handle(Submitted(request("a")), 0)
    control.handle(DeviceJoined(0, 0), 5000 * NS_PER_MS)
    (device,) = control.tracker.devices
    assert device.free_ns == (5000 + 10 + 200) * NS_PER_MS


@given(changes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 100), st.booleans()), max_size=30))
def test_the_queue_knows_the_work_ahead_of_each_place(changes: list[tuple[int, int, bool]]) -> None:
    """Against a plain list: jobs of some urgency and remaining time enter, and the first of an urgency leaves."""
    queue, model = WaitingQueue(), list[Job]()
    for job_id, (urgency_ns, run_ns, comes) in enumerate(changes):
        same = [one for one in model if one.urgency_ns == urgency_ns]
        if comes or not same:
            one = job(job_id, request(str(job_id)), urgency_ns, demand=Demand(1, run_ns))
            assert one not in queue
            queue.add(one)
            model.append(one)
        else:
            queue.remove(same[0])
            model.remove(same[0])
            assert same[0] not in queue
        model.sort(key=lambda one: (one.urgency_ns, one.job_id))
        assert list(queue) == model
        assert len(queue) == len(model)
        assert all(one in queue for one in model)
        for place in product(range(-1, 7), range(-1, 31, 4)):
            ahead = [one.demand for one in model if (one.urgency_ns, one.job_id) < place]
            assert queue.ahead(place) == Ahead(0, ahead)


def test_the_last_128_jobs_ahead_are_listed_and_the_others_summed() -> None:
    queue, demands = WaitingQueue(), [Demand(1 + index % 3, index) for index in range(200)]
    for index, demand in enumerate(demands):
        queue.add(job(index, request(str(index)), index, demand=demand))
    ahead = queue.ahead((150, -1))
    assert ahead == Ahead(sum(one.width * one.run_ns for one in demands[:22]), demands[22:150])


def eta_ns(actions: tuple[Action, ...]) -> int:
    (accepted,) = only(Accept, actions)
    return accepted.eta_ns


def test_the_eta_counts_what_runs_and_what_waits_ahead() -> None:
    control = controller("fixed-sp1")
    etas = [eta_ns(control.handle(Submitted(request(uid, 0.0)), 0)) for uid in "abc"]
    assert etas == [ns_from_s(count * SERVICE_S) for count in (1, 2, 3)]
    control.handle(WorkFinished(1, 10 * NS_PER_MS), 10 * NS_PER_MS)
    assert eta_ns(control.handle(Submitted(request("d", 0.01)), 10 * NS_PER_MS)) == ns_from_s(4 * SERVICE_S)
    assert [control.predict(job_id, 10 * NS_PER_MS).eta_ns for job_id in (0, 3)] == [etas[0], 4 * etas[0]], (
        "as they stand now"
    )


def test_the_default_policy_tells_when_its_own_plan_ends_a_promised_request() -> None:
    """One device would be enough for its deadline. It gets all four, since no other request wants them."""
    trace = simulate([promise("a", 0, slo_s=30)], "tilework", num_devices=4, costs=table(degrees=(1, 2, 4)))
    (ending,) = trace.endings
    assert ending.latency_ns < ns_from_s(0.7 * SERVICE_S)
    assert ending.eta_ns == pytest.approx(ending.finish_ns, rel=0.01)


def test_without_later_requests_all_end_about_when_the_default_policy_predicts_now() -> None:
    """Some run, on several devices, and some wait; some have no deadline. What was learned is left out."""
    errors = [error for seed in range(6) for error in errors_of_latest(poisson(20, 20.0, seed=seed, slo_s=6.0))]
    assert len(errors) > 80
    assert max(errors) < 0.1


def errors_of_latest(requests: list[Request]) -> list[float]:
    """By how much the prediction that each open request has after the last arrival is off, relative to its latency."""
    config = ControllerConfig(policy="tilework")
    costs, devices = table(degrees=(1, 2, 4)), SimConfig(num_devices=4)
    simulation = Simulation(config, costs, devices, make_controller=Predicting)
    trace, control = simulation.run(tuple(requests)), simulation.controller
    assert isinstance(control, Predicting)
    open_ones = [ending for ending in trace.endings if ending.request.uid in control.latest_ns]
    return [abs(control.latest_ns[one.request.uid] - one.finish_ns) / one.latency_ns for one in open_ones]


class Predicting(Controller):
    """Notes when each open request is predicted to end, as of the latest arrival, without correction."""

    def handle(self, event: Event, now_ns: int) -> tuple[Action, ...]:
        actions = super().handle(event, now_ns)
        if isinstance(event, Submitted):
            jobs = self.tracker.jobs.values()
            self.latest_ns = {job.request.uid: self.predict(job.job_id, now_ns).end_ns for job in jobs}
        return actions


def test_the_eta_of_an_urgent_request_ignores_less_urgent_ones() -> None:
    """It begins after the committed works, an encode and two steps."""
    control = controller("edf")
    for uid in ("a", "b", "c"):
        control.handle(Submitted(request(uid, slo_s=60)), 0)
    first_ns = ns_from_s(0.01 + 0.2 + SERVICE_S)
    assert eta_ns(control.handle(Submitted(request("urgent", slo_s=5)), 0)) == first_ns
    assert eta_ns(control.handle(Submitted(promise("strict", 0, slo_s=2.2)), 0)) == first_ns, "more urgent than that"
    (refused,) = only(Reject, control.handle(Submitted(promise("late", 0, slo_s=1.25)), 0))
    earliest_ns = START_MARGINS.admission.due_ns(first_ns + ns_from_s(SERVICE_S), 0)
    reason, retry_ns = "it would be 0.02 s late, with 5 other requests present", earliest_ns - ns_from_s(1.25)
    assert refused == Reject("late", reason, earliest_ns, RefusalCode.DEADLINE, retry_ns), "after the promised request"
