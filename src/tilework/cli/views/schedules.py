"""Schedules, served requests and stage times for `report`, from simulations and event logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tilework.control.history import History
from tilework.core.request import Request, Shape, Status
from tilework.core.time import s_from_ns
from tilework.core.work import Work
from tilework.cost.corrections import deviation
from tilework.cost.table_costs import TableCosts
from tilework.formats.json_lines import RequestId
from tilework.formats.schedule import DROPPED, RequestLine, Schedule, WeightsLine, WorkLine
from tilework.report.pages.demo_page import StageTime
from tilework.sim.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """A request that was served, live or simulated, as `report.tables` reads it."""

    request: Request
    status: str
    finish_ns: int | None

    @property
    def shape(self) -> Shape:
        return self.request.shape

    @property
    def arrival_s(self) -> float:
        return s_from_ns(self.request.arrival_ns)

    @property
    def slo_s(self) -> float | None:
        deadline_ns = self.request.deadline_ns
        return None if deadline_ns is None else s_from_ns(deadline_ns - self.request.arrival_ns)

    @property
    def latency_s(self) -> float | None:
        return None if self.finish_ns is None else s_from_ns(self.finish_ns - self.request.arrival_ns)

    @property
    def on_time(self) -> bool | None:
        if self.slo_s is None:
            return None
        return self.status == Status.DONE and self.latency_s is not None and self.latency_s <= self.slo_s


def served_in(trace: Trace) -> list[ServedRequest]:
    return [ServedRequest(request=e.request, status=e.status, finish_ns=e.finish_ns) for e in trace.endings]


def served_live(history: History) -> list[ServedRequest]:
    """Return the requests that ended, without those that a cut-off log leaves open."""
    ended = [past for past in history.requests if past.status is not None]
    return [ServedRequest(request=p.request, status=str(p.status), finish_ns=p.finish_ns) for p in ended]


def schedule_of_trace(trace: Trace, ids: Mapping[str, RequestId]) -> Schedule:
    """Return the schedule of a trace; `ids` names the requests as their workload does, by uid."""
    jobs = _job_ids(trace)
    works = tuple(
        _work_line(run.work, [ids[jobs[job_id]] for job_id in run.work.job_ids], run.start_ns, run.end_ns, run.steps)
        for run in trace.runs
    )
    loads = tuple(
        WeightsLine(
            change="load",
            device_id=done.load.device_id,
            pipeline=done.load.stage.pipeline,
            stage=done.load.stage.name,
            start_s=s_from_ns(done.start_ns),
            end_s=s_from_ns(done.end_ns),
        )
        for done in trace.loads
    )
    return Schedule(works=works, requests=tuple(_line(served, ids) for served in served_in(trace)), weights=loads)


def _job_ids(trace: Trace) -> dict[int, str]:
    return {ending.job_id: ending.request.uid for ending in trace.endings if ending.job_id is not None}


def schedule_of_history(history: History, ids: Mapping[str, RequestId], shift_s: float = 0.0) -> Schedule:
    """Return the part of a live run that belongs to the requests in `ids`, with `shift_s` added to its clock."""
    jobs = {past.job_id: past.request.uid for past in history.requests if past.request.uid in ids}
    works = tuple(
        _work_line(
            past.work,
            [ids[jobs[job_id]] for job_id in past.work.job_ids],
            past.start_ns,
            past.end_ns,
            past.steps,
            shift_s,
        )
        for past in history.works
        if past.run_ns is not None and all(job_id in jobs for job_id in past.work.job_ids)
    )
    served = [one for one in served_live(history) if one.request.uid in ids]
    return Schedule(works=works, requests=tuple(_line(one, ids, shift_s) for one in served))


def _work_line(
    work: Work, requests: Sequence[RequestId], start_ns: int, end_ns: int, steps: int, shift_s: float = 0.0
) -> WorkLine:
    return WorkLine(
        work=work.work_id,
        stage=work.stage.name,
        requests=tuple(requests),
        devices=work.devices,
        start_s=s_from_ns(start_ns) + shift_s,
        end_s=s_from_ns(end_ns) + shift_s,
        steps=steps if work.stage.has_steps else 0,
    )


def _line(served: ServedRequest, ids: Mapping[str, RequestId], shift_s: float = 0.0) -> RequestLine:
    assert served.finish_ns is not None
    return RequestLine(
        request=ids[served.request.uid],
        finish_s=s_from_ns(served.finish_ns) + shift_s,
        status=DROPPED if served.status == Status.REJECTED else str(served.status),
        on_time=served.on_time,
    )


def stage_times(history: History) -> tuple[StageTime, ...]:
    """Return the stage times by model and stage, from runs of one request.

    Leaves out runs with previews or further passes, which take longer than their steps.
    """
    costs = TableCosts(history.header.table)
    requests = {past.job_id: past.request for past in history.requests}
    ratios: dict[tuple[str, str], list[float]] = {}
    for past in history.works:
        stage = past.work.stage
        request = requests[past.work.job_ids[0]]
        if past.run_ns is None or past.predicted_ns is None or len(past.work.job_ids) > 1:
            continue
        if request.preview_every or request.passes != 1:
            continue
        expected_ns = costs.work_ns(stage, (request,), len(past.work.devices), past.steps)
        if expected_ns:
            ratios.setdefault((stage.pipeline, stage.name), []).append(past.run_ns / expected_ns)
    return tuple(
        StageTime(
            model=model, stage=stage, num_runs=len(found), ratio=median(found), is_off=deviation(found) is not None
        )
        for (model, stage), found in ratios.items()
    )
