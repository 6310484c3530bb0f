"""What admission learns from the errors of its predictions."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, median

import pytest

from builders import SERVICE_S, controller, only, poisson, promise, request, simulate, table
from tilework.admission.contract import EtaPrediction
from tilework.admission.eta_correction import EtaCorrection
from tilework.control.controller import Controller
from tilework.core.actions import Accept
from tilework.core.events import Submitted, WorkFinished
from tilework.core.request import Request
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.sim.trace import Trace

PLAIN = request("plain")


def predict(
    eta_correction: EtaCorrection, num_jobs: int, asked: Request = PLAIN, *, is_foreseen: bool = False
) -> EtaPrediction:
    """Of a request that would end after a second."""
    return eta_correction.predict(asked, 0, NS_PER_S, num_jobs, is_foreseen=is_foreseen)


def eta_s(eta_correction: EtaCorrection, num_jobs: int, asked: Request = PLAIN) -> float:
    return predict(eta_correction, num_jobs, asked).eta_ns / NS_PER_S


def p90_s(eta_correction: EtaCorrection, num_jobs: int, asked: Request = PLAIN) -> float:
    return predict(eta_correction, num_jobs, asked).p90_ns / NS_PER_S


def teach(eta_correction: EtaCorrection, ratio: float, num_jobs: int, num_came: int, asked: Request = PLAIN) -> None:
    """Let a request with this ratio of actual to predicted latency finish."""
    told = predict(EtaCorrection(), num_jobs, asked)
    eta_correction.learn(asked, told, round(ratio * NS_PER_S), num_came)


def taught(*ratios: float, num_jobs: int = 4, num_came: int = 0) -> EtaCorrection:
    eta_correction = EtaCorrection()
    for ratio in ratios:
        teach(eta_correction, ratio, num_jobs, num_came)
    return eta_correction


def test_without_observations_nothing_is_corrected() -> None:
    assert eta_s(taught(), 5) == 1.0


def test_the_usual_error_is_corrected() -> None:
    assert eta_s(taught(1.5), 4) == 1.5
    assert eta_s(taught(*[1.2] * 9), 4) == pytest.approx(1.2)
    assert eta_s(taught(*[0.5] * 50, *[2.0] * 50), 4) == pytest.approx(2.0), "the latest count"


def test_a_rare_outlier_hardly_counts() -> None:
    """A request that many others overtook must not change the predictions of all."""
    assert eta_s(taught(*[1.0] * 12, 40.0, *[1.0] * 2), 4) == pytest.approx(1.0)


def test_nothing_is_learned_from_a_prediction_of_no_time() -> None:
    eta_correction = EtaCorrection()
    eta_correction.learn(PLAIN, EtaPrediction(5, 5, 5, 5, 4), 9, 4)
    assert eta_s(eta_correction, 4) == 1.0


@pytest.mark.parametrize("other", [request("a", side=64), request("a", steps=3), request("a")])
def test_each_size_and_number_of_steps_has_its_own_correction(other: Request) -> None:
    assert eta_s(taught(*[2.0] * 5), 4, other) == (2.0 if other == request("a") else 1.0)


def test_without_observations_at_a_load_the_next_lower_load_counts() -> None:
    eta_correction = taught(*[2.0] * 5)
    assert [eta_s(eta_correction, num_jobs) for num_jobs in (0, 3, 4, 7, 8, 100)] == [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]


def test_what_an_overload_teaches_does_not_count_for_an_idle_server() -> None:
    """The first of a burst finds an idle server, and is overtaken by the others."""
    eta_correction = taught(*[10.0] * 5, num_jobs=0, num_came=40)
    assert [eta_s(eta_correction, num_jobs) for num_jobs in (0, 1, 31, 32)] == [1.0, 1.0, 1.0, 10.0]
    assert eta_s(taught(*[0.8] * 5, num_jobs=0), 0) == 0.8, "only requests that met no others teach what it says"


def test_what_the_policy_foresees_has_corrections_of_its_own() -> None:
    eta_correction = taught(*[2.0] * 5)
    assert predict(eta_correction, 4, is_foreseen=True).eta_ns == NS_PER_S


@pytest.mark.parametrize(
    ("ratio", "due_s", "told_s"), [(3.0, 9.0, 3.0), (3.0, 2.0, 2.0), (3.0, 0.5, 3.0), (0.4, 0.5, 1.0)]
)
def test_a_correction_moves_a_foreseen_end_not_across_its_deadline(ratio: float, due_s: float, told_s: float) -> None:
    """A policy that foresees ends keeps deadlines, so what comes later delays no job beyond its own."""
    asked, eta_correction = request("a", slo_s=due_s), EtaCorrection()
    seen = replace(predict(eta_correction, 4, asked), is_foreseen=True)
    for _ in range(5):
        eta_correction.learn(asked, seen, round(ratio * NS_PER_S), 4)
    assert predict(eta_correction, 4, asked, is_foreseen=True).eta_ns == ns_from_s(told_s)


def test_the_type_of_deadline_counts_after_a_few_requests_of_that_type() -> None:
    asked, eta_correction = promise("a", 0, slo_s=9), taught(*[2.0] * 5)
    assert eta_s(eta_correction, 4, asked) == 2.0, "the correction of other types is better than none"
    for _ in range(5):
        teach(eta_correction, 0.5, 4, 0, asked)
    assert eta_s(eta_correction, 4, asked) == 0.5
    assert eta_s(eta_correction, 4) == 2.0


def test_the_number_of_corrections_is_bounded_and_the_least_recently_used_is_forgotten() -> None:
    eta_correction = taught(3.0)
    for steps in range(1, 10_000):
        teach(eta_correction, 2.0, 4, 0, request("other", steps=steps + 100))
        if steps == 1000:
            teach(eta_correction, 2.0, 4, 0, request("kept", steps=101))
    assert len(eta_correction._seen) <= 4096
    assert eta_s(eta_correction, 4) == 1.0
    assert eta_s(eta_correction, 4, request("other", steps=10_099)) == 2.0


# By when nine of ten are done.


def test_nine_of_ten_are_done_by_the_second_value() -> None:
    other = request("other size", side=64)
    assert p90_s(taught(*[1.0] * 40, *[2.0] * 8, *[5.0] * 2), 4, other) == 2.0, "the spread is that of all sizes"


def test_the_second_value_is_never_before_the_first() -> None:
    """All others end in half the time that is told, and these in all of it."""
    eta_correction = taught(*[0.5] * 60)
    other = request("other", side=64)
    assert p90_s(eta_correction, 4, other) == eta_s(eta_correction, 4, other) == 1.0


def test_with_nothing_seen_the_second_value_leaves_room() -> None:
    """More for a request that others may overtake than for one that is to be on time, or that is alone."""
    due = request("due", slo_s=9)
    assert 1.0 < p90_s(taught(), 0) == p90_s(taught(), 9, due) < p90_s(taught(), 9)


def test_a_few_overtaken_requests_do_not_change_the_second_value_of_an_idle_server() -> None:
    assert p90_s(taught(*[1.0] * 40, 10.0, 10.0, num_jobs=0), 0) < 1.5


# In the controller.


def served(control: Controller, uid: str, begin_ns: int, end_ns: int, first_work: int) -> None:
    """Serve a request of two steps on one device, whose reports have the times that were predicted."""
    control.handle(WorkFinished(first_work, 10_000_000), begin_ns + 1)
    control.handle(WorkFinished(first_work + 1, 200_000_000), begin_ns + 2)
    control.handle(WorkFinished(first_work + 2, 50_000_000), end_ns)


def test_the_next_prediction_is_corrected_by_the_error_of_the_last_one() -> None:
    """The device reports the times that were predicted, but everything arrives twice as late; a third one waits."""
    control = controller("fixed-sp1")
    asked = [request(uid, steps=2) for uid in ("a", "b", "c")]
    first, second = (only(Accept, control.handle(Submitted(one), 0))[0] for one in asked[:2])
    served(control, "a", 0, 2 * first.eta_ns, 1)
    served(control, "b", 2 * first.eta_ns, 2 * second.eta_ns, 4)
    begin_ns = 2 * second.eta_ns
    control.handle(Submitted(asked[2]), begin_ns)
    (told,) = only(Accept, control.handle(Submitted(request("d", steps=2)), begin_ns))
    assert told.eta_ns - begin_ns == pytest.approx(2 * second.eta_ns)
    assert control.predict(3, begin_ns).eta_ns == pytest.approx(told.eta_ns, rel=0.01), "and so are later predictions"


@pytest.mark.parametrize("policy", ["edf", "tilework"])
def test_the_first_request_on_an_idle_server_is_told_what_it_takes_after_an_overload(policy: str) -> None:
    """The first of 40 finds an idle server; the others, which are more urgent, overtake it."""
    later = [request(f"{number}", 0.001, slo_s=100 + number) for number in range(40)]
    trace = simulate([request("first", slo_s=900), *later, request("again", 500.0, slo_s=900)], policy, num_devices=1)
    first, again = (one for one in trace.endings if one.request.uid in ("first", "again"))
    assert first.latency_ns > 20 * ns_from_s(SERVICE_S)
    assert again.eta_ns is not None
    assert again.eta_ns - again.request.arrival_ns == pytest.approx(ns_from_s(SERVICE_S), rel=0.01)


def errors(trace: Trace) -> list[float]:
    return [abs(ending.finish_ns - (ending.eta_ns or 0)) / ending.latency_ns for ending in trace.endings]


@pytest.mark.parametrize("rate", [0.5, 1.0, 1.5])
def test_predictions_of_a_policy_that_widens_groups_become_better(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, costs = poisson(200, rate, seed=11, slo_s=30), table(degrees=(1, 2, 4))
    learnt = errors(simulate(requests, "tetriserve", costs=costs))
    monkeypatch.setattr(EtaCorrection, "learn", lambda *one: None)
    plain = errors(simulate(requests, "tetriserve", costs=costs))
    assert median(learnt) < 0.75 * median(plain)
    assert fmean(learnt) < 0.85 * fmean(plain)
