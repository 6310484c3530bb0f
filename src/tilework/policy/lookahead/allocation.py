"""The division of the devices of a node among jobs at one moment of a rollout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from tilework.policy.lookahead.forecast import Claim, JobForecast

ROUNDING_NS = 1000.0
_LEAST_SPEEDUP = 1.3  # A wider group must be this much faster to get devices that jobs without a deadline could use.


@dataclass(slots=True, eq=False)
class RemainingJob:
    """The remaining work of a job at some moment of a rollout.

    `level` is the index of its degree in the forecast's speeds, -1 while it has no devices; `last_level` is the one
    before this moment.
    """

    forecast: JobForecast
    index: int
    num_steps: float
    head_ns: float
    tail_ns: float
    level: int = -1
    last_level: int = -1
    hold_ns: float = 0.0

    @property
    def degree(self) -> int:
        return self.forecast.speeds[self.level].degree

    def anew(self) -> RemainingJob:
        """Return the same job without devices, outside of a step."""
        return RemainingJob(self.forecast, self.index, self.num_steps, self.head_ns, self.tail_ns)

    def run_ns(self) -> float:
        forecast = self.forecast
        level = self.level
        tail_ns = self.tail_ns
        if forecast.tail_factors:
            tail_ns *= forecast.tail_factors[level]
        return self.head_ns + self.num_steps * forecast.speeds[level].step_ns + tail_ns

    def speedup(self) -> float:
        """Return the speedup at the next wider degree: of its steps, or of its tail if no steps are left."""
        speeds = self.forecast.speeds
        factors = self.forecast.tail_factors
        level = self.level
        if self.num_steps:
            return speeds[level].step_ns / speeds[level + 1].step_ns if speeds[level + 1].step_ns else inf
        return factors[level] / factors[level + 1] if factors else 1.0

    def gain_ns(self) -> float:
        """Return how much sooner it ends at the next wider degree."""
        speeds = self.forecast.speeds
        factors = self.forecast.tail_factors
        level = self.level
        gain_ns = self.num_steps * (speeds[level].step_ns - speeds[level + 1].step_ns)
        return gain_ns if self.num_steps or not factors else self.tail_ns * (factors[level] - factors[level + 1])

    def keeps_too_long(self) -> bool:
        """Return whether requests that cannot wait for the end of a step are likely to come while it runs."""
        return self.forecast.speeds[self.level].step_ns > self.forecast.least_slack_ns

    def run(self, span_ns: float) -> None:
        """Take off what it does in this time at its degree."""
        if self.head_ns:
            head_ns = min(self.head_ns, span_ns)
            self.head_ns -= head_ns
            span_ns -= head_ns
        step_ns = self.forecast.speeds[self.level].step_ns
        steps_ns = self.num_steps * step_ns
        if span_ns < steps_ns:
            self.num_steps -= span_ns / step_ns
        else:
            factors = self.forecast.tail_factors
            spent_ns = (span_ns - steps_ns) / factors[self.level] if factors else span_ns - steps_ns
            self.num_steps = 0.0
            self.tail_ns -= spent_ns


class Allocation(NamedTuple):
    """The jobs that get devices at some moment, in order of service.

    It `is_safe` if every pinned and overdue job has its usual group, and every feasible one a group with which it is on
    time. Then none will be late: at later moments, each of them needs at most as many devices as now. `num_spare`
    devices are not needed for that.
    """

    running: list[RemainingJob]
    is_safe: bool
    num_spare: int


def allocate(
    certain: Sequence[RemainingJob],
    feasible: Sequence[RemainingJob],
    others: Sequence[RemainingJob],
    num_free: int,
    now: float,
) -> Allocation:
    """Set the level of each job that gets devices.

    Devices go, in this order:

    1. to each pinned and overdue job, its usual group; to each feasible job, the narrowest group with which it would be
       on time if it kept that, or else the widest for which there is room;
    2. to these jobs again, wider groups where these are `_LEAST_SPEEDUP` times faster;
    3. to the other jobs in order, their usual groups, but not the last device if they would keep it too long;
    4. to the job that gains most by them, as long as one gains.

    No job has devices before the call.
    """
    running: list[RemainingJob] = []
    is_safe = True
    for job in certain:
        if not num_free:
            return Allocation(running, False, 0)
        usual = job.forecast.usual
        job.level = level = _widest(job, usual, num_free)
        is_safe = is_safe and level == usual
        if level >= 0:
            num_free -= job.degree
            running.append(job)
    for job in feasible:
        if not num_free:
            return Allocation(running, False, 0)
        level, is_enough = _narrowest_in_time(job, num_free, now)
        is_safe = is_safe and is_enough
        if level >= 0:
            job.level = level
            num_free -= job.forecast.speeds[level].degree
            running.append(job)
    num_spare = num_free
    if not num_free:
        return Allocation(running, is_safe, 0)
    num_free = _widen(running, num_free, _LEAST_SPEEDUP)
    for job in others:
        if not num_free:
            return Allocation(running, is_safe, num_spare)
        job.level = _widest(job, job.forecast.usual, num_free)
        while job.level >= 0 and job.degree == num_free and job.keeps_too_long():
            job.level -= 1
        if job.level >= 0:
            num_free -= job.degree
            running.append(job)
    _widen(running, num_free, 1.0)
    return Allocation(running, is_safe, num_spare)


def needed_degree(job: RemainingJob, num_free: int, now: float) -> int | None:
    """Return the fewest devices with which a job is on time if it keeps them; None if there are not enough of them."""
    level, is_enough = _narrowest_in_time(job, num_free, now)
    return job.forecast.speeds[level].degree if is_enough else None


def available_now(
    running: Sequence[RemainingJob], in_step: Sequence[RemainingJob], num_free: int
) -> tuple[list[RemainingJob], float]:
    """Reduce an allocation to what is available at once: a job in a step keeps its devices until the step ends.

    Other jobs get what fits beside these. Returns the jobs that have devices, and how long it is until the first step
    ends whose job is to have other devices; inf if all have what they are to have.
    """
    changing = [job for job in in_step if job.level != job.last_level]
    if not changing:
        return list(running), inf
    for job in changing:
        job.level = job.last_level
    num_free -= sum(job.degree for job in in_step)
    available = list(in_step)
    for job in running:
        if job.hold_ns > ROUNDING_NS:
            continue
        job.level = _widest(job, job.level, num_free)
        if job.level >= 0:
            num_free -= job.degree
            available.append(job)
    return available, min(job.hold_ns for job in changing)


def _narrowest_in_time(job: RemainingJob, num_free: int, now: float) -> tuple[int, bool]:
    """Return the narrowest level that is on time, and True; or else the widest that fits, -1 if there is no room."""
    forecast = job.forecast
    num_steps = job.num_steps
    found = -1
    budget_ns = forecast.due_ns - now - job.head_ns - job.tail_ns
    factors = forecast.tail_factors
    for speed in forecast.speeds:
        if speed.degree > num_free:
            break
        found += 1
        spared_ns = job.tail_ns * (1 - factors[found]) if factors else 0.0
        if num_steps * speed.step_ns <= budget_ns + spared_ns:
            return found, True
    return found, False


def _widest(job: RemainingJob, max_level: int, num_free: int) -> int:
    """Return the widest level up to a limit for which there are devices; -1 if there is none."""
    return next((level for level in range(max_level, -1, -1) if job.forecast.speeds[level].degree <= num_free), -1)


def _widen(candidates: Iterable[RemainingJob], num_free: int, least_speedup: float) -> int:
    """Widen, again and again, the group that saves most time per device by it; returns how many devices stay free."""
    growing = [job for job in candidates if job.forecast.claim is not Claim.PINNED]
    while num_free:
        best, best_gain = None, 0.0
        for job in growing:
            speeds = job.forecast.speeds
            level = job.level
            if level + 1 == len(speeds):
                continue
            narrow, wide = speeds[level], speeds[level + 1]
            extra = wide.degree - narrow.degree
            room = num_free - 1 if wide.step_ns > job.forecast.least_slack_ns else num_free
            if extra <= room and job.speedup() >= least_speedup:
                gain = job.gain_ns() / extra
                if gain > best_gain:
                    best, best_gain = job, gain
        if best is None:
            break
        speeds = best.forecast.speeds
        best.level += 1
        num_free -= speeds[best.level].degree - speeds[best.level - 1].degree
    return num_free
