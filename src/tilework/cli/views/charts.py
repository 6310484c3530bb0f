"""Charts for `report`, from event logs, and their files in each format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tilework.cli.console import UserError, user_errors
from tilework.control.decisions import describe_all, steps_of
from tilework.control.history import History, LostWork, PastLoad, PastPlacement, PastRead, PastRequest, PastWork
from tilework.core.graph.stage import DeviceKind
from tilework.core.request import Request, Status
from tilework.core.time import s_from_ns
from tilework.formats.json_lines import RequestId
from tilework.formats.schedule import DROPPED
from tilework.report.chart import (
    OPEN,
    Chart,
    ChartDecision,
    ChartLoad,
    ChartPlacement,
    ChartRequest,
    ChartWork,
    Outage,
    by_arrival,
)
from tilework.report.pages.timeline_page import write_page
from tilework.report.perfetto import write_trace
from tilework.report.timeline import draw_timeline

_WRITERS: dict[str, Callable[..., None]] = {".html": write_page, ".png": draw_timeline, ".json": write_trace}


def check_timeline_files(paths: Iterable[Path]) -> list[Path]:
    """Return the same paths, checked before anything is read or run. Raises UserError for an unknown suffix."""
    paths = list(paths)
    for path in paths:
        if path.suffix.lower() not in _WRITERS:
            raise UserError(f"{path} ends in {path.suffix!r}; a timeline is one of {', '.join(_WRITERS)}")
    return paths


def draw_chart(path: Path, chart: Chart, *, title: str) -> None:
    """Write the chart in the format of the suffix. Raises UserError."""
    with user_errors(OSError, ValueError):
        _WRITERS[path.suffix.lower()](path, chart, title=title)


def chart_of_history(history: History, ids: Mapping[str, RequestId] | None = None) -> Chart:
    """Return all that a log records, on its own clock; `ids` names the requests to show, by uid, instead of all."""
    names = {past.request.uid: past.request.uid for past in history.requests} if ids is None else ids
    requests = [past for past in history.requests if past.request.uid in names]
    jobs = {past.job_id: past.request for past in requests if past.job_id is not None}
    ended: list[PastWork | LostWork] = [*history.works, *history.lost]
    nodes = {change.device_id: change.node for change in history.devices}
    shown = (past for past in ended if past.end_ns > past.start_ns and jobs.keys() >= set(past.work.job_ids))
    works = [_work(past, jobs, names) for past in shown]
    return Chart(
        works=tuple(sorted(works, key=lambda work: (work.start_s, work.work))),
        requests=by_arrival(_request(past, names[past.request.uid]) for past in requests),
        outages=_outages(history),
        loads=(*map(_load, history.loads), *(_read(past, nodes) for past in history.reads)),
        placements=tuple(map(_placement, history.placements)),
        nodes=nodes,
        slots=frozenset(change.device_id for change in history.devices if change.kind is DeviceKind.CPU),
    )


def _work(past: PastWork | LostWork, jobs: Mapping[int, Request], names: Mapping[str, RequestId]) -> ChartWork:
    work = past.work
    steps = steps_of(work) if len(work.job_ids) == 1 else None
    predicted_ns = past.predicted_ns if isinstance(past, PastWork) and past.run_ns is not None else None
    return ChartWork(
        work=work.work_id,
        stage=work.stage.name,
        requests=tuple(names[jobs[job_id].uid] for job_id in work.job_ids),
        devices=work.devices,
        start_s=s_from_ns(past.start_ns),
        end_s=s_from_ns(past.end_ns),
        steps=past.steps if work.stage.has_steps else 0,
        first_step=None if steps is None else steps[0],
        why=work.why,
        predicted_s=_seconds(predicted_ns),
        lost="" if isinstance(past, PastWork) else past.reason,
    )


def _request(past: PastRequest, name: RequestId) -> ChartRequest:
    request = past.request
    decisions = describe_all(past.actions, request, past.job_id)
    status = OPEN if past.status is None else DROPPED if past.status is Status.REJECTED else past.status.value
    return ChartRequest(
        id=name,
        arrival_s=s_from_ns(request.arrival_ns),
        finish_s=_seconds(past.finish_ns),
        status=status,
        shape=request.shape,
        steps=request.steps,
        pipeline=request.pipeline,
        tenant=request.tenant,
        priority=request.priority,
        deadline_s=_seconds(request.deadline_ns),
        eta_s=_seconds(past.eta_ns),
        on_time=past.on_time,
        decisions=tuple(ChartDecision(at_s=s_from_ns(d.at_ns), kind=d.kind.value, text=d.text) for d in decisions),
    )


def _load(past: PastLoad) -> ChartLoad:
    return ChartLoad(
        device_id=past.load.device_id,
        stage=past.load.stage.name,
        start_s=s_from_ns(past.start_ns),
        end_s=s_from_ns(past.end_ns),
        source=past.load.source.value,
    )


def _read(past: PastRead, nodes: Mapping[int, int]) -> ChartLoad:
    """Return the load as a part of the chart, at the first device of its node."""
    return ChartLoad(
        device_id=min(device_id for device_id, node in nodes.items() if node == past.read.node),
        stage=past.read.stage.name,
        start_s=s_from_ns(past.start_ns),
        end_s=s_from_ns(past.end_ns),
        is_read_ahead=True,
    )


def _placement(past: PastPlacement) -> ChartPlacement:
    names = {device_id: name for group, name in past.placement.groups for device_id in group}
    return ChartPlacement(at_s=s_from_ns(past.at_ns), names=names, why=past.placement.why)


def _outages(history: History) -> tuple[Outage, ...]:
    away: dict[int, tuple[int, str]] = {}
    outages = []
    for change in history.devices:
        if not change.is_up:
            away[change.device_id] = (change.at_ns, change.reason)
        elif change.device_id in away:
            outages.append(_outage(change.device_id, away.pop(change.device_id), change.at_ns))
    outages += [_outage(device_id, lost, history.end_ns) for device_id, lost in away.items()]
    return tuple(sorted(outages, key=lambda outage: (outage.start_s, outage.device_id)))


def _outage(device_id: int, lost: tuple[int, str], end_ns: int) -> Outage:
    return Outage(device_id=device_id, start_s=s_from_ns(lost[0]), end_s=s_from_ns(end_ns), reason=lost[1])


def _seconds(time_ns: int | None) -> float | None:
    return None if time_ns is None else s_from_ns(time_ns)
