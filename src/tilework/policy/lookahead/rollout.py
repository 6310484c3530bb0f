"""Simulating a node ahead: which jobs would be on time, and at which degrees, if no other request came.

Theory of operation. A rollout starts with the jobs of a node in an order of service and goes from event to event, as a
simulator does. At each event all devices are divided again among the jobs that are left (`allocation.allocate`): each
feasible job gets the narrowest group with which it is on time if it keeps that group, and what is left makes jobs wider
or goes to jobs without a deadline. The next event is the first end of a job, or the first end of a step for which
another job waits. The rollout ends when no feasible job is left, when one is late, or when it is certain that none will
be (`allocate`). A held job gets no devices, and keeps those that it has to the end of its step.

It is an estimate in one respect: a step that runs now holds its devices to its end, but later steps are not counted one
by one. From then on, a job makes progress at the speed of its degree and can change it at any time.

The policy acts on the first two moments of the result only: the degrees now, and the degrees after the first end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from tilework.policy.lookahead.allocation import ROUNDING_NS, RemainingJob, allocate, available_now
from tilework.policy.lookahead.forecast import Claim, JobForecast


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """The result of an order of service: the degree of each job now, and the index of the first job that is late.

    At `next_ns` the first job ends; from then on the jobs have the degrees `then`.
    """

    degrees: list[int]
    late: int | None
    next_ns: float
    then: list[int]


def simulate_ahead(forecasts: Sequence[JobForecast], num_devices: int, now_ns: int) -> RolloutResult:
    """Simulate jobs in this order of service until no feasible one is left, one is late, or certainly none will be.

    The order goes by claim, and among feasible jobs by deadline.

    This is the inner loop of the policy: each iteration looks at the jobs that have devices, not at all waiting ones.
    """
    remaining = [
        RemainingJob(job, index, job.num_steps, job.head_ns, job.tail_ns, last_rank=job.rank, hold_ns=job.hold_ns)
        for index, job in enumerate(forecasts)
    ]
    certain = [job for job in remaining if job.forecast.claim < Claim.FEASIBLE]
    feasible = [job for job in remaining if job.forecast.claim is Claim.FEASIBLE]
    others = [job for job in remaining if Claim.FEASIBLE < job.forecast.claim < Claim.HELD]
    held = [job for job in remaining if job.forecast.claim is Claim.HELD]
    in_step = [job for job in remaining if job.hold_ns > ROUNDING_NS]
    now, next_ns = float(now_ns), inf
    moments: list[list[int]] = []
    while certain or feasible or (others and len(moments) < 2):
        (running, is_safe), change_ns = allocate(certain, feasible, others, num_devices, now), inf
        if not moments or (len(moments) < 2 and next_ns < inf):
            moments.append(_degrees(running, len(forecasts)))
        if in_step:
            running, change_ns = available_now(running, in_step, num_devices)
        if not running or (is_safe and len(moments) == 2 and not in_step):
            break
        runs_ns = [job.run_ns() for job in running]
        span_ns = min(*runs_ns, change_ns)
        now += span_ns
        late: list[int] = []
        for job, run_ns in zip(running, runs_ns, strict=True):
            job.last_rank, job.hold_ns = job.rank, job.hold_ns - span_ns
            if run_ns - span_ns > ROUNDING_NS:
                job.run(span_ns)
                job.rank = -1
                continue
            next_ns = min(next_ns, now)
            job.rank = -1
            if job.forecast.claim is Claim.FEASIBLE:
                feasible.remove(job)
                if now > job.forecast.due_ns + ROUNDING_NS:
                    late.append(job.index)
            elif job.forecast.claim < Claim.FEASIBLE:
                certain.remove(job)
            else:
                (held if job.forecast.claim is Claim.HELD else others).remove(job)
        in_step = [job for job in in_step if job.hold_ns > ROUNDING_NS]
        if feasible and now > feasible[0].forecast.due_ns:
            late.append(feasible[0].index)
        if late:
            return RolloutResult(moments[0], min(late), next_ns, moments[-1])
    none = [0] * len(forecasts)
    return RolloutResult(moments[0] if moments else none, None, next_ns, moments[1] if len(moments) > 1 else none)


def _degrees(running: Iterable[RemainingJob], num_jobs: int) -> list[int]:
    degrees = [0] * num_jobs
    for job in running:
        degrees[job.index] = job.degree
    return degrees
