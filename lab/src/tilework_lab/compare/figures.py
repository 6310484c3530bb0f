"""The figures of one run: a trace in numbers that can be kept and compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilework.core.request import Status
from tilework.core.time import s_from_ns
from tilework.sim.runs import Run
from tilework.sim.trace import Trace, TraceEnding

NUM_QUANTILES = 100
_NEAR = 0.2  # Share of the latency by which a predicted finish may be off.


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFigures:
    """The requests of one size: all, those with a deadline, those of them on time; and the mean latency of all."""

    num_requests: int
    num_due: int
    num_on_time: int
    mean_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The ends of the requests of one run. Latency counts from the arrival; without an image it is infinite.

    `num_on_time` are those of the `num_due` with a deadline that were done by it, `num_good` these and what was done
    without a deadline, `num_unserved` those that were refused, dropped or failed. `device_s` is device time in works,
    times the width of each. `num_preempted`: see `preemptions`; `num_moved` of these went on on other devices.
    `fairness` is Jain's index of the shares on time of tenants, or of sizes if there is one tenant; None without
    deadlines, and if there are fewer than two. `quantiles_s` are the latencies that 1, 2, ... 100% do not exceed.
    """

    num_requests: int
    num_due: int
    num_on_time: int
    num_good: int
    num_unserved: int
    mean_s: float
    p95_s: float
    p99_s: float
    device_s: float
    num_preempted: int
    num_moved: int
    fairness: float | None
    num_events: int
    by_size: Mapping[str, SizeFigures]
    quantiles_s: tuple[float, ...]

    @property
    def attainment(self) -> float | None:
        """The share of requests with a deadline that were on time; None without deadlines."""
        return self.num_on_time / self.num_due if self.num_due else None

    @property
    def device_s_each(self) -> float:
        """Device time of all per request that was good; infinite if none was."""
        return self.device_s / self.num_good if self.num_good else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class EtaFigures:
    """Accuracy of the finishes that admission predicted, over accepted requests that were done.

    `num_near` of these `num_done` had a latency within 20% of the predicted one. Of those with a deadline,
    `num_said_late` were predicted to be late, `num_late` were, and `num_rightly` are both.
    """

    num_done: int = 0
    num_near: int = 0
    num_said_late: int = 0
    num_late: int = 0
    num_rightly: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseFigures:
    """Ends of the requests with a deadline, some of which asked for a promise.

    `asked`, `accepted` of these, and `on_time` of all `num_due` are places of requests in the order of the workload.
    """

    num_requests: int
    num_due: int
    asked: tuple[int, ...]
    accepted: tuple[int, ...]
    on_time: tuple[int, ...]
    eta: EtaFigures


def promise_figures_of(trace: Trace) -> PromiseFigures:
    """Return the figures of a trace."""
    due = [(place, one) for place, one in enumerate(trace.endings) if one.request.deadline_ns is not None]
    asked = [(place, one) for place, one in due if one.request.is_promise]
    return PromiseFigures(
        num_requests=len(trace.endings),
        num_due=len(due),
        asked=tuple(place for place, _ in asked),
        accepted=tuple(place for place, one in asked if one.job_id is not None),
        on_time=tuple(place for place, one in due if one.on_time),
        eta=eta_figures_of(trace.endings),
    )


def eta_figures_of(endings: Iterable[TraceEnding]) -> EtaFigures:
    """Return the accuracy of the predicted finishes."""
    done = [(one, one.eta_ns) for one in endings if one.eta_ns is not None and one.status is Status.DONE]
    due = [(one, eta_ns > one.request.deadline_ns) for one, eta_ns in done if one.request.deadline_ns is not None]
    return EtaFigures(
        num_done=len(done),
        num_near=sum(abs(eta_ns - one.finish_ns) <= _NEAR * one.latency_ns for one, eta_ns in done),
        num_said_late=sum(is_said for _, is_said in due),
        num_late=sum(not one.on_time for one, _ in due),
        num_rightly=sum(is_said and not one.on_time for one, is_said in due),
    )


def figures_of(trace: Trace, dispatch_ns: int = 0) -> Figures:
    """Return the figures of a trace. `dispatch_ns` is lost before every work, and does not count as an interruption."""
    endings = trace.endings
    latencies_s = sorted(map(_latency_s, endings))
    num_preempted, num_moved = preemptions(trace.runs, dispatch_ns)
    due = [one for one in endings if one.request.deadline_ns is not None]
    return Figures(
        num_requests=len(endings),
        num_due=len(due),
        num_on_time=sum(one.on_time for one in due),
        num_good=sum(one.on_time for one in endings),
        num_unserved=sum(one.status is not Status.DONE for one in endings),
        mean_s=_mean(latencies_s),
        p95_s=nearest_rank(latencies_s, 95),
        p99_s=nearest_rank(latencies_s, 99),
        device_s=s_from_ns(sum((run.end_ns - run.start_ns) * len(run.devices) for run in trace.runs)),
        num_preempted=num_preempted,
        num_moved=num_moved,
        fairness=_fairness(due),
        num_events=trace.num_events,
        by_size=_by_size(endings),
        quantiles_s=tuple(nearest_rank(latencies_s, percent) for percent in range(1, NUM_QUANTILES + 1)),
    )


def preemptions(runs: Iterable[Run], dispatch_ns: int = 0) -> tuple[int, int]:
    """Count how often jobs were interrupted between two steps, and how often they then went on on other devices.

    Take the works of one job that did steps, in order of their starts. It is interrupted between two of them if the
    later one runs on another set of devices than the earlier, or begins more than `dispatch_ns` after its end. So a job
    that is cut in chunks, but never waits and never moves, is not interrupted; the wait before its first step and
    that for its decode do not count.
    """
    latest: dict[int, Run] = {}
    num_all = num_moved = 0
    for run in sorted(runs, key=lambda run: (run.start_ns, run.work.work_id)):
        if not run.work.stage.has_steps or not run.steps:
            continue
        for job_id in run.work.job_ids:
            before = latest.get(job_id)
            if before is not None:
                has_moved = set(before.devices) != set(run.devices)
                num_moved += has_moved
                num_all += has_moved or run.start_ns - before.end_ns > dispatch_ns
            latest[job_id] = run
    return num_all, num_moved


def jain(values: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 if all are equal (also all 0), 1/n if one has everything."""
    squares = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else 1.0


def nearest_rank(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest of ascending values that at least `percent` per cent of them do not exceed."""
    return ordered[math.ceil(percent * len(ordered) / 100) - 1]


def _latency_s(ending: TraceEnding) -> float:
    return s_from_ns(ending.latency_ns) if ending.status is Status.DONE else math.inf


def _mean(values: Sequence[float]) -> float:
    return math.inf if math.inf in values else math.fsum(values) / len(values)


def _fairness(due: Sequence[TraceEnding]) -> float | None:
    groups: dict[str, list[bool]] = {}
    several = len({one.request.tenant for one in due}) > 1
    for one in due:
        groups.setdefault(one.request.tenant if several else str(one.request.shape), []).append(one.on_time)
    return jain([sum(group) / len(group) for group in groups.values()]) if len(groups) > 1 else None


def _by_size(endings: Sequence[TraceEnding]) -> dict[str, SizeFigures]:
    """Return the figures by size, smallest first."""
    groups: dict[str, list[TraceEnding]] = {}
    for one in sorted(endings, key=lambda one: (one.request.shape.pixels, one.request.shape)):
        groups.setdefault(str(one.request.shape), []).append(one)
    return {
        size: SizeFigures(
            num_requests=len(group),
            num_due=sum(one.request.deadline_ns is not None for one in group),
            num_on_time=sum(one.on_time for one in group if one.request.deadline_ns is not None),
            mean_s=_mean([_latency_s(one) for one in group]),
        )
        for size, group in groups.items()
    }
