"""What admission learns from the errors of its predictions."""

from __future__ import annotations

from statistics import fmean, median

import pytest

from builders import controller, only, poisson, promise, request, simulate, table
from tilework.admission.eta_correction import EtaCorrection
from tilework.core.actions import Accept
from tilework.core.events import Submitted, WorkFinished
from tilework.core.time import NS_PER_S
from tilework.sim.trace import Trace

PLAIN = request("plain")


def taught(*ratios: float, num_jobs: int = 0) -> EtaCorrection:
    """A correction that has seen plain requests with these ratios of actual to predicted latency."""
    eta_correction = EtaCorrection()
    for ratio in ratios:
        eta_correction.learn(PLAIN, num_jobs, NS_PER_S, round(ratio * NS_PER_S))
    return eta_correction


def test_without_observations_nothing_is_corrected() -> None:
    assert taught().ratio(PLAIN, 5) == 1.0


def test_the_usual_error_is_corrected() -> None:
    assert taught(1.5).ratio(PLAIN, 0) == 1.5
    assert taught(*[1.2] * 9).ratio(PLAIN, 0) == pytest.approx(1.2)
    assert taught(*[0.5] * 50, *[2.0] * 50).ratio(PLAIN, 0) == pytest.approx(2.0), "the latest count"


def test_a_rare_outlier_hardly_counts() -> None:
    """A request that many others overtook must not change the predictions of all."""
    assert taught(*[1.0] * 12, 40.0, *[1.0] * 2).ratio(PLAIN, 0) == pytest.approx(1.0)


def test_nothing_is_learned_from_a_prediction_of_no_time() -> None:
    eta_correction = EtaCorrection()
    eta_correction.learn(PLAIN, 0, 0, 5)
    assert eta_correction.ratio(PLAIN, 0) == 1.0


@pytest.mark.parametrize("other", [request("a", side=64), request("a", steps=3), request("a")])
def test_each_size_and_number_of_steps_has_its_own_correction(other: object) -> None:
    assert taught(*[2.0] * 5).ratio(other, 0) == (2.0 if other == request("a") else 1.0)  # type: ignore[arg-type]


def test_without_observations_at_a_load_the_next_lower_load_counts() -> None:
    eta_correction = taught(*[2.0] * 5, num_jobs=4)
    assert [eta_correction.ratio(PLAIN, num_jobs) for num_jobs in (0, 3, 4, 7, 8, 100)] == [
        1.0,
        1.0,
        2.0,
        2.0,
        2.0,
        2.0,
    ]


def test_the_type_of_deadline_counts_after_a_few_requests_of_that_type() -> None:
    asked, eta_correction = promise("a", 0, slo_s=9), taught(*[2.0] * 5)
    assert eta_correction.ratio(asked, 0) == 2.0, "the correction of other types is better than none"
    for _ in range(5):
        eta_correction.learn(asked, 0, NS_PER_S, NS_PER_S // 2)
    assert eta_correction.ratio(asked, 0) == 0.5
    assert eta_correction.ratio(PLAIN, 0) == 2.0


def test_the_number_of_corrections_is_bounded_and_the_least_recently_used_is_forgotten() -> None:
    eta_correction = taught(3.0)
    for steps in range(1, 10_000):
        eta_correction.learn(request("other", steps=steps + 100), 0, NS_PER_S, 2 * NS_PER_S)
        if steps == 1000:
            eta_correction.learn(request("kept", steps=101), 0, NS_PER_S, 2 * NS_PER_S)
    assert len(eta_correction._seen) <= 4096
    assert eta_correction.ratio(PLAIN, 0) == 1.0
    assert eta_correction.ratio(request("other", steps=10_099), 0) == 2.0


# In the controller.


def test_the_next_prediction_is_corrected_by_the_error_of_the_last_one() -> None:
    """The device reports the times that were predicted, but everything arrives twice as late."""
    control = controller("fixed-sp1")
    (first,) = only(Accept, control.handle(Submitted(request("a", steps=2)), 0))
    at_ns = first.eta_ns * 2
    control.handle(WorkFinished(1, 10_000_000), 1)
    control.handle(WorkFinished(2, 200_000_000), 2)
    control.handle(WorkFinished(3, 50_000_000), at_ns)
    (second,) = only(Accept, control.handle(Submitted(request("b", steps=2, arrival_s=at_ns / NS_PER_S)), at_ns))
    assert second.eta_ns - at_ns == pytest.approx(2 * first.eta_ns)
    assert control.eta_ns(1, at_ns) == pytest.approx(second.eta_ns, rel=0.01), "and so are later predictions"


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
