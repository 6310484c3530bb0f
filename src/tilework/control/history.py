"""What an event log says happened: which work ran when, how each request ended, and what work costs there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean, median

from tilework.control.log import BadLog, Entry, Header, read_log
from tilework.core.actions import Accept, Finish, Reject, RunStage, RunSteps
from tilework.core.events import GpuJoined, StageFinished, StepsFinished, Stopped, Submitted
from tilework.core.request import Request, Status
from tilework.core.time import s_from_ns
from tilework.core.wire import CostRow
from tilework.core.work import Work
from tilework.cost.table import CostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class PastWork:
    """One executed work. A stopped one tells only when it ended: its duration is not in the log."""

    work: Work
    end_ns: int
    steps: int
    run_ns: int | None

    @property
    def start_ns(self) -> int:
        return self.end_ns - (self.run_ns or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRequest:
    """One request and its end. `job_id` and `eta_ns` are None if it was rejected; a cut-off log leaves it open."""

    request: Request
    job_id: int | None = None
    eta_ns: int | None = None
    status: Status | None = None
    finish_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    header: Header
    num_gpus: int
    works: tuple[PastWork, ...]
    requests: tuple[PastRequest, ...]


def read_history(lines: Iterable[str]) -> History:
    """Read a whole log. Raises BadLog."""
    header, entries = read_log(lines)
    try:
        return _history(header, entries)
    except KeyError as error:
        raise BadLog(f"the log speaks of {error}, which no earlier line began; lines are missing or altered") from error


def _history(header: Header, entries: Iterable[Entry]) -> History:
    """Raises KeyError for a work that was not started or a request that was not submitted."""
    requests: dict[str, PastRequest] = {}
    started: dict[int, Work] = {}
    works: list[PastWork] = []
    gpus: set[int] = set()
    for entry in entries:
        match entry.event:
            case Submitted(request):
                requests[request.uid] = PastRequest(request=request)
            case StepsFinished(work_id, run_ns) | StageFinished(work_id, run_ns):
                work = started[work_id]
                works.append(PastWork(work=work, end_ns=entry.now_ns, steps=work.num_steps, run_ns=run_ns))
            case Stopped(work_id, steps):
                works.append(PastWork(work=started[work_id], end_ns=entry.now_ns, steps=steps, run_ns=None))
            case GpuJoined(gpu):
                gpus.add(gpu)
        for action in entry.actions:
            match action:
                case RunStage(work) | RunSteps(work):
                    started[work.work_id] = work
                case Accept(job_id, uid, eta_ns):
                    requests[uid] = replace(requests[uid], job_id=job_id, eta_ns=eta_ns)
                case Reject(uid):
                    requests[uid] = replace(requests[uid], status=Status.REJECTED, finish_ns=entry.now_ns)
                case Finish(_, uid, status):
                    requests[uid] = replace(requests[uid], status=status, finish_ns=entry.now_ns)
    return History(header=header, num_gpus=len(gpus), works=tuple(works), requests=tuple(requests.values()))


def profiled_table(history: History) -> CostTable:
    """The cost table that this very run measured: median seconds per stage, shape and degree, guided requests that ran
    alone only.

    Stages and shapes that did not run keep the row that the run started from.
    """
    requests = {past.job_id: past.request for past in history.requests}
    seconds: dict[tuple[str, str, int, int, int, int], list[float]] = {}
    for past in history.works:
        request = requests.get(past.work.job_ids[0])
        if request is not None and request.guided and past.run_ns is not None and len(past.work.job_ids) == 1:
            shape, degree = request.shape, len(past.work.gpus)
            key = (request.pipeline, past.work.stage.name, shape.height, shape.width, shape.frames, degree)
            seconds.setdefault(key, []).append(s_from_ns(past.run_ns) / past.steps)
    rows = tuple(
        CostRow(
            pipeline=pipeline,
            stage=stage,
            height=height,
            width=width,
            frames=frames,
            degree=degree,
            seconds=median(values),
        )
        for (pipeline, stage, height, width, frames, degree), values in sorted(seconds.items())
    )
    measured = {_profiled(row) for row in rows}
    kept = tuple(row for row in history.header.table.rows if _profiled(row) not in measured)
    return replace(history.header.table, rows=rows + kept)


def _profiled(row: CostRow) -> tuple[str, str, int, int, int]:
    """What a table tells apart; rows that agree in it would be averaged."""
    return row.pipeline, row.stage, row.height * row.width * row.frames, row.degree, row.batch


def dispatch_ns(history: History) -> dict[int, int]:
    """Mean gap, by degree, between the last of the works that another was queued behind and that one.

    The largest hundredth of each degree's gaps is left out: a moment in which the machine did something else. Degrees
    without such works are not listed.
    """
    ends = {past.work.work_id: past.end_ns for past in history.works}
    gaps: dict[int, list[int]] = {}
    for past in history.works:
        if past.work.after and past.run_ns is not None and ends.keys() >= set(past.work.after):
            gap_ns = past.start_ns - max(ends[before] for before in past.work.after)
            gaps.setdefault(len(past.work.gpus), []).append(gap_ns)
    return {degree: max(0, round(_trimmed_mean(values))) for degree, values in sorted(gaps.items())}


def _trimmed_mean(values: list[int]) -> float:
    """The mean of all but the largest hundredth; of fewer than a hundred values, of all."""
    return fmean(sorted(values)[: len(values) - len(values) // 100])
