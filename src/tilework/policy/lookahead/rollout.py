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

Requests that come at once are added one after another, as a rule each behind all others. Until these leave devices to
it, such a job changes nothing. So its rollout goes on from there (`Pause`), and if the devices that they leave are
enough for it, no job is late by it, and it needs none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from tilework.policy.lookahead.allocation import ROUNDING_NS, RemainingJob, allocate, available_now, needed_degree
from tilework.policy.lookahead.forecast import Claim, JobForecast

_FEASIBLE, _HELD = Claim.FEASIBLE, Claim.HELD  # The attributes of an enumeration take longer.


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """The result of an order of service: the degree of each job now, and the index of the first job that is late.

    At `next_ns` the first job ends; from then on the jobs have the degrees `then`.
    """

    degrees: list[int]
    late: int | None
    next_ns: float
    then: list[int]


@dataclass(frozen=True, slots=True)
class Pause:
    """A moment of a rollout at which no step runs, and until which a further job, the last, would get no devices.

    `certain` and `feasible` are all jobs that are left. `is_safe`: none of them will be late, and `num_spare` devices
    are not needed for that.
    """

    certain: Sequence[RemainingJob]
    feasible: Sequence[RemainingJob]
    is_safe: bool
    num_spare: int
    now: float
    next_ns: float
    moments: Sequence[list[int]]

    def with_last(self, forecast: JobForecast, index: int) -> Pause:
        """Return the same moment with one more feasible job, which waits, comes last and has this index."""
        assert forecast.level < 0
        job = RemainingJob(forecast, index, forecast.num_steps, forecast.head_ns, forecast.tail_ns)
        degree = needed_degree(job, self.num_spare, self.now)
        is_safe = degree is not None
        num_spare = self.num_spare - (degree or self.num_spare)
        feasible = [*self.feasible, job]
        return Pause(self.certain, feasible, is_safe, num_spare, self.now, self.next_ns, self.moments)

    def state(self, num_jobs: int) -> _RolloutState:
        """Return a rollout of `num_jobs` jobs that goes on from here."""
        certain, feasible = [job.anew() for job in self.certain], [job.anew() for job in self.feasible]
        moments = [degrees + [0] * (num_jobs - len(degrees)) for degrees in self.moments]
        return _RolloutState(certain, feasible, [], [], [], num_jobs, self.now, self.next_ns, moments)


@dataclass(slots=True)
class _RolloutState:
    """The jobs of a rollout at the moment `now`, by claim, and what is known of the result.

    None of the jobs has devices. At `next_ns` the first job has ended; `moments` are the degrees before and after that.
    `ends_ns` has when each job has ended; inf if it has not.
    """

    certain: list[RemainingJob]
    feasible: list[RemainingJob]
    others: list[RemainingJob]
    held: list[RemainingJob]
    in_step: list[RemainingJob]
    num_jobs: int
    now: float
    next_ns: float = inf
    moments: list[list[int]] = field(default_factory=list)
    ends_ns: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def of(forecasts: Sequence[JobForecast], now_ns: int) -> _RolloutState:
        state = _RolloutState([], [], [], [], [], len(forecasts), float(now_ns))
        certain, feasible, others, held = state.certain, state.feasible, state.others, state.held
        for index, one in enumerate(forecasts):
            job = RemainingJob(one, index, one.num_steps, one.head_ns, one.tail_ns, -1, one.level, one.hold_ns)
            claim = one.claim
            if claim is _FEASIBLE:
                feasible.append(job)
            elif claim < _FEASIBLE:
                certain.append(job)
            elif claim < _HELD:
                others.append(job)
            elif claim is _HELD:
                held.append(job)
            if one.hold_ns > ROUNDING_NS:
                state.in_step.append(job)
        return state

    def pause(self, num_spare: int) -> Pause:
        """Return this moment, at which no job will be late, and `num_spare` devices are not needed for that."""
        return Pause(self.certain, self.feasible, True, num_spare, self.now, self.next_ns, self.moments)


def simulate_ahead(
    forecasts: Sequence[JobForecast], num_devices: int, now_ns: int, begin: Pause | None = None
) -> RolloutResult:
    """Simulate jobs in this order of service until no feasible one is left, one is late, or certainly none will be.

    The order goes by claim, and among feasible jobs by deadline. `begin` is a moment of this rollout that is known.
    """
    result = _simulate(_state(forecasts, now_ns, begin), num_devices, may_pause=False)
    assert isinstance(result, RolloutResult)
    return result


def next_pause(
    forecasts: Sequence[JobForecast], num_devices: int, now_ns: int, begin: Pause | None = None
) -> Pause | RolloutResult:
    """Return the first moment, from `begin` on, at which the jobs leave devices to others; the result if there is none.

    It is safe: no job is late.
    """
    state = _state(forecasts, now_ns, begin)
    return _simulate(state, num_devices, may_pause=not (state.others or state.held))


def ends_ahead(forecasts: Sequence[JobForecast], num_devices: int, now_ns: int) -> dict[int, float]:
    """Return when each job ends, by its index in this order of service; without those that never get a device."""
    state = _RolloutState.of(forecasts, now_ns)
    _simulate(state, num_devices, to_the_end=True)
    state.others, state.held = state.held, []
    _simulate(state, num_devices, to_the_end=True)
    return state.ends_ns


def _state(forecasts: Sequence[JobForecast], now_ns: int, begin: Pause | None) -> _RolloutState:
    return _RolloutState.of(forecasts, now_ns) if begin is None else begin.state(len(forecasts))


def _simulate(
    state: _RolloutState, num_devices: int, *, may_pause: bool = False, to_the_end: bool = False
) -> RolloutResult | Pause:
    """Simulate until the result is certain or, if that comes first, up to a pause; or until all jobs have ended.

    This is the inner loop of the policy: each iteration looks at the jobs that have devices, not at all waiting ones.
    """
    certain, feasible, others, moments = state.certain, state.feasible, state.others, state.moments
    while certain or feasible or (others and (to_the_end or len(moments) < 2)):
        in_step = state.in_step
        running, is_safe, num_spare = allocate(certain, feasible, others, num_devices, state.now)
        change_ns = inf
        if may_pause and num_spare:
            if is_safe and not in_step:
                for job in running:
                    job.level = -1
                return state.pause(num_spare)
            may_pause = False
        if not moments or (len(moments) < 2 and state.next_ns < inf):
            moments.append(_degrees(running, state.num_jobs))
        if in_step:
            running, change_ns = available_now(running, in_step, num_devices)
        is_certain = is_safe and len(moments) == 2 and not in_step and not may_pause
        if not running or (is_certain and not to_the_end):
            break
        late = _advance(state, running, change_ns)
        if late is not None and not to_the_end:
            return RolloutResult(moments[0], late, state.next_ns, moments[-1])
    if may_pause and not (certain or feasible or state.in_step):
        return state.pause(num_devices)
    none = [0] * state.num_jobs
    then = moments[1] if len(moments) > 1 else none
    return RolloutResult(moments[0] if moments else none, None, state.next_ns, then)


def _advance(state: _RolloutState, running: Sequence[RemainingJob], change_ns: float) -> int | None:
    """Go on to the next event, in `change_ns` at the latest; returns the index of the first job that is late then."""
    runs_ns = [job.run_ns() for job in running]
    span_ns = min(*runs_ns, change_ns)
    state.now = now = state.now + span_ns
    feasible = state.feasible
    late = None
    for job, run_ns in zip(running, runs_ns, strict=True):
        job.last_level = job.level
        job.hold_ns -= span_ns
        if run_ns - span_ns > ROUNDING_NS:
            job.run(span_ns)
        elif _ends(state, job) and (late is None or job.index < late):
            late = job.index
        job.level = -1
    if state.in_step:
        state.in_step = [job for job in state.in_step if job.hold_ns > ROUNDING_NS]
    if feasible and now > feasible[0].forecast.due_ns and (late is None or feasible[0].index < late):
        late = feasible[0].index
    return late


def _ends(state: _RolloutState, job: RemainingJob) -> bool:
    """Take a job out that has ended now; returns whether it is late."""
    state.next_ns = min(state.next_ns, state.now)
    state.ends_ns[job.index] = state.now
    claim = job.forecast.claim
    if claim is _FEASIBLE:
        state.feasible.remove(job)
        return state.now > job.forecast.due_ns + ROUNDING_NS
    if claim < _FEASIBLE:
        state.certain.remove(job)
    else:
        (state.held if job in state.held else state.others).remove(job)
    return False


def _degrees(running: Iterable[RemainingJob], num_jobs: int) -> list[int]:
    degrees = [0] * num_jobs
    for job in running:
        degrees[job.index] = job.forecast.speeds[job.level].degree
    return degrees
