"""A rollout ends as soon as it is certain that no job will be late, with the result that it would have had."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from tilework.core.time import NS_PER_MS as MS
from tilework.cost.demand import Speed
from tilework.policy.lookahead import rollout
from tilework.policy.lookahead.allocation import Allocation, allocate
from tilework.policy.lookahead.forecast import Claim, JobForecast
from tilework.policy.lookahead.rollout import ends_ahead, simulate_ahead
from tilework.policy.lookahead.step_sharing import ServiceOrder

SPEEDS = tuple(Speed(degree, step_ms * MS) for degree, step_ms in ((1, 101), (2, 61), (4, 43), (8, 37)))


@st.composite
def forecasts(draw: st.DrawFn, most: int = 9) -> list[JobForecast]:
    """Jobs of one node in order of service. Those that run now hold their devices, of which there are eight."""
    jobs, num_free = [], 8
    claims = st.sampled_from([Claim.FEASIBLE] * 3 + [Claim.OVERDUE] * 2 + [Claim.PINNED, Claim.BEST_EFFORT, Claim.HELD])
    for job_id, claim in enumerate(sorted(draw(st.lists(claims, min_size=2, max_size=most)))):
        levels = [level for level, speed in enumerate(SPEEDS) if speed.degree <= num_free]
        level = draw(st.sampled_from([-1, *levels]))
        num_free -= SPEEDS[level].degree if level >= 0 else 0
        due_ms = draw(st.integers(300, 3000)) + 0.5  # No job is late by a rounding.
        jobs.append(
            JobForecast(
                job_id=job_id,
                claim=claim,
                order_key=due_ms,
                speeds=SPEEDS,
                usual=draw(st.integers(0, 3)),
                num_steps=float(draw(st.integers(1, 30))),
                head_ns=draw(st.integers(0, 90)) * MS,
                tail_ns=draw(st.integers(0, 200)) * MS,
                due_ns=due_ms * MS if claim is Claim.FEASIBLE else inf,
                level=level,
                hold_ns=draw(st.integers(0, SPEEDS[level].step_ns // MS)) * MS if level >= 0 else 0.0,
                tail_factors=draw(st.sampled_from([(), (1.0, 0.6, 0.35, 0.3)])),
                least_slack_ns=draw(st.sampled_from([inf, 50.0 * MS])),
            )
        )
    return sorted(jobs, key=JobForecast.place)


def _to_the_end(*args: object) -> Allocation:
    return allocate(*args)._replace(is_safe=False)  # type: ignore[arg-type]


@settings(max_examples=300)
@given(forecasts())
def test_run_to_the_end_every_job_ends_and_those_that_are_on_time_do_so_then(jobs: list[JobForecast]) -> None:
    ends_ns, result = ends_ahead(jobs, 8, 0), simulate_ahead(jobs, 8, 0)
    assert ends_ns.keys() == set(range(len(jobs)))
    for index, one in enumerate(jobs):
        assert ends_ns[index] >= one.least_ns - len(jobs) * rollout.ROUNDING_NS
        if result.late is None and one.claim is Claim.FEASIBLE:
            assert ends_ns[index] <= one.due_ns + rollout.ROUNDING_NS


@settings(max_examples=300)
@given(forecasts())
def test_ending_early_changes_nothing(jobs: list[JobForecast]) -> None:
    early = simulate_ahead(jobs, 8, 0)
    with patch.object(rollout, "allocate", _to_the_end):
        assert simulate_ahead(jobs, 8, 0) == early


@settings(max_examples=100)
@given(forecasts(most=16), st.integers(1, 12))
def test_one_more_job_after_all_others_is_as_if_it_had_been_there_from_the_start(
    jobs: list[JobForecast], num_last: int
) -> None:
    """One after another, as requests come that wait behind all others; until one would make a job late."""
    known = [job for job in jobs if job.claim <= Claim.FEASIBLE]
    num_last = min(num_last, sum(job.claim is Claim.FEASIBLE for job in known))
    first = known[: len(known) - num_last]
    order = ServiceOrder(first, first, 8, 0)
    for job in known[len(first) :]:
        if order.has_late:
            break
        order = order.with_last(replace(job, level=-1, hold_ns=0.0))
        expected = simulate_ahead(order.order, 8, 0)
        assert order.has_late == (expected.late is not None)
        if job.job_id % 2 and not order.has_late:
            assert order.result == expected


def job(claim: Claim = Claim.FEASIBLE, steps: float = 10, due_ms: float = inf, **more: float) -> JobForecast:
    return JobForecast(
        job_id=0,
        claim=claim,
        order_key=due_ms * MS,
        speeds=SPEEDS,
        usual=int(more.get("usual", 0)),
        num_steps=float(steps),
        head_ns=0.0,
        tail_ns=0.0,
        due_ns=due_ms * MS,
        level=int(more.get("level", -1)),
        hold_ns=more.get("hold_ms", 0.0) * MS,
    )


def test_an_overdue_job_may_still_take_devices_that_a_feasible_one_needs() -> None:
    """Once the two short ones have ended it takes all eight."""
    short, longer = job(Claim.OVERDUE, steps=5), job(Claim.OVERDUE, steps=10)
    wide = job(Claim.OVERDUE, steps=500, usual=3)
    assert simulate_ahead([short, longer, wide, job(steps=20, due_ms=2100)], 8, 0).late == 3


def test_devices_that_are_held_to_the_end_of_a_step_may_make_a_job_late() -> None:
    """It would be in time on all eight, of which it gets two while steps run on the others."""
    ending, urgent = job(Claim.PINNED, steps=0.05, level=0, hold_ms=5), job(steps=10, due_ms=385)
    holding = [job(Claim.BEST_EFFORT, 50, level=level, hold_ms=hold_ms) for level, hold_ms in ((2, 43), (1, 61))]
    assert simulate_ahead([ending, urgent], 8, 0).late is None
    assert simulate_ahead([ending, urgent, *holding], 8, 0).late == 1


def test_a_rollout_without_contention_ends_after_the_first_end() -> None:
    calls = []

    def counted(*args: object) -> Allocation:
        calls.append(args)
        return allocate(*args)  # type: ignore[arg-type]

    with patch.object(rollout, "allocate", counted):
        assert simulate_ahead([job(steps=10 + index, due_ms=9000) for index in range(8)], 8, 0).late is None
    assert len(calls) == 2
