"""Builds a history from an event log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from tilework.control.history import (
    History,
    LostWork,
    PastDevice,
    PastLoad,
    PastPlacement,
    PastRead,
    PastRequest,
    PastWork,
)
from tilework.control.log import BadLog, LogHeader, ignore, read_log, served_table
from tilework.core.actions import (
    Accept,
    Action,
    DropToBestEffort,
    Finish,
    HoldBack,
    LoadComponents,
    MoveState,
    Place,
    ReadComponents,
    Reject,
    RunWork,
    Stop,
    UseCache,
)
from tilework.core.events import (
    Broken,
    ComponentsLoaded,
    ComponentsRead,
    DeviceJoined,
    DeviceLost,
    Event,
    LeftOut,
    ModelRemoved,
    ModelServed,
    NodeLost,
    OutOfMemory,
    Restored,
    Stopped,
    Submitted,
    WorkFailed,
    WorkFinished,
)
from tilework.core.request import Request, Status
from tilework.core.work import Work
from tilework.cost.table import BadCostTable, CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.tabled import UnknownCost

T = TypeVar("T")


def read_history(lines: Iterable[str], warn: Callable[[str], None] = ignore) -> History:
    """Read a whole log, or its remaining segments; `warn` is as in `read_log`. Raises BadLog."""
    header, entries = read_log(lines, warn)
    if header.is_continued:
        warn(f"the log begins with segment {header.segment}: what happened before is not known")
    recorder = HistoryRecorder(header)
    try:
        for entry in entries:
            recorder.add(entry.event, entry.actions, entry.now_ns)
    except KeyError as error:
        raise BadLog(f"the log names {error}, which no earlier line began; lines are missing or altered") from error
    except BadCostTable as error:
        raise BadLog(f"the log serves a model whose costs cannot be used: {error}") from error
    return recorder.history()


@dataclass(slots=True, kw_only=True, eq=False)
class _InFlight:
    """A work that has not ended; `carriers` are the devices that still have it."""

    work: Work
    issued_ns: int
    predicted_ns: int | None
    carriers: set[int]


class HistoryRecorder:
    """Builds a history from the events and actions of a controller, call by call."""

    def __init__(self, header: LogHeader) -> None:
        self._header = header
        self._costs = TableCosts(header.table)
        self._now_ns = 0
        self._requests: dict[str, PastRequest] = {}
        self._actions: dict[str, list[tuple[int, Action]]] = {}
        self._jobs: dict[int, Request] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._begun: dict[int, Work] = {}
        self._free_ns: dict[int, int] = {}
        self._nodes: dict[int, int] = {}
        self._works: list[PastWork] = []
        self._lost: list[LostWork] = []
        self._devices: list[PastDevice] = []
        self._loading: dict[int, LoadComponents] = {}
        self._loads: list[PastLoad] = []
        self._reading: dict[int, tuple[int, ReadComponents]] = {}  # Start time, and the read.
        self._reads: list[PastRead] = []
        self._placements: list[PastPlacement] = []
        self._removed: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        """Record the devices that are up and the requests that are open, where the log begins in the middle."""
        for device in self._header.devices:
            self._on_event(DeviceJoined(device.device_id, device.node, device.kind))
        for one in self._header.open:
            uid = one.request.uid
            self._requests[uid] = PastRequest(request=one.request, job_id=one.job_id, eta_ns=one.eta_ns)
            self._actions[uid] = []
            self._jobs[one.job_id] = one.request

    def add(self, event: Event, actions: Iterable[Action], now_ns: int) -> None:
        """Add one `handle` call. In a log that begins in the middle, what refers to earlier lines is left out.

        Raises:
            KeyError: a work was not begun before, or a request was not submitted.
        """
        self._now_ns = now_ns
        self._add(self._on_event, event)
        for action in actions:
            self._add(self._on_action, action)

    def _add(self, handle: Callable[[T], None], one: T) -> None:
        try:
            handle(one)
        except KeyError:
            if not self._header.is_continued:
                raise

    def history(self) -> History:
        """Return the history of all calls so far. The table of its header has all models that were served."""
        requests = (replace(past, actions=tuple(self._actions[uid])) for uid, past in self._requests.items())
        return History(
            header=replace(self._header, table=self._costs.table),
            end_ns=self._now_ns,
            works=tuple(self._works),
            requests=tuple(requests),
            lost=tuple(self._lost),
            devices=tuple(self._devices),
            loads=tuple(self._loads),
            reads=tuple(self._reads),
            placements=tuple(self._placements),
        )

    def _on_event(self, event: Event) -> None:
        match event:
            case Submitted() | Restored():
                for request in event.requests if isinstance(event, Submitted) else (event.request,):
                    self._requests[request.uid] = PastRequest(request=request)
                    self._actions[request.uid] = []
            case WorkFinished(work_id, run_ns):
                self._finish_work(work_id, run_ns)
            case Stopped(work_id, steps):
                self._stop_work(work_id, steps)
            case LeftOut(work_id, job_id, reason):
                self._leave_out(work_id, job_id, reason)
            case WorkFailed() | Broken() | OutOfMemory():
                self._fail_work(event)
            case DeviceJoined(device_id, node):
                self._nodes[device_id] = node
                joined = PastDevice(at_ns=self._now_ns, device_id=device_id, node=node, is_up=True, kind=event.kind)
                self._devices.append(joined)
            case DeviceLost() | NodeLost():
                for device_id in event.device_ids:
                    self._lose_device(device_id, event)
            case ComponentsLoaded() | ComponentsRead():
                self._end_load(event)
            case ModelServed() | ModelRemoved():
                self._change_models(event)

    def _change_models(self, event: ModelServed | ModelRemoved) -> None:
        if isinstance(event, ModelRemoved):
            self._removed.add(event.pipeline)
        else:
            self._serve(served_table(event))

    def _serve(self, part: CostTable) -> None:
        """Record the costs of a model. A removed model stays in the table until another model takes its name."""
        for pipeline in self._removed & set(part.pipelines):
            self._removed.remove(pipeline)
            if len(self._costs.table.pipelines) > 1:
                self._costs.remove(pipeline)
        self._costs.serve(part)

    def _end_load(self, event: ComponentsLoaded | ComponentsRead) -> None:
        if isinstance(event, ComponentsRead):
            start_ns, read = self._reading.pop(event.read_id)
            self._reads.append(PastRead(read=read, start_ns=start_ns, end_ns=self._now_ns))
            return
        load = self._loading.pop(event.load_id, None)
        if load is not None and load.device_id == event.device_id and not event.dropped:
            start_ns = self._now_ns - event.run_ns
            self._loads.append(PastLoad(load=load, start_ns=start_ns, end_ns=self._now_ns))

    def _on_action(self, action: Action) -> None:
        match action:
            case Accept(job_id, uid, eta_ns):
                request = action.accepted(self._requests[uid].request)
                self._requests[uid] = replace(self._requests[uid], request=request, job_id=job_id, eta_ns=eta_ns)
                self._jobs[job_id] = self._requests[uid].request
                self._add_action(uid, action)
            case Reject(uid):
                self._end_request(uid, Status.REJECTED, action)
            case Finish(_, uid, status):
                self._end_request(uid, status, action)
            case RunWork(work):
                self._begin_work(work)
                self._add_for_jobs(work.job_ids, action)
            case LoadComponents(load_id):
                self._loading[load_id] = action
            case ReadComponents(read_id):
                self._reading[read_id] = self._now_ns, action
            case Place(placement):
                self._placements.append(PastPlacement(at_ns=self._now_ns, placement=placement))
            case Stop(work_id):
                self._add_for_jobs(self._begun[work_id].job_ids, action)
            case UseCache(job_id, uid):
                request = self._requests[uid].request.with_spare_cache
                self._requests[uid] = replace(self._requests[uid], request=request)
                self._jobs[job_id] = request
                self._add_action(uid, action)
            case MoveState(job_id) | DropToBestEffort(job_id) | HoldBack(job_id):
                self._add_for_jobs((job_id,), action)

    def _add_for_jobs(self, job_ids: Iterable[int], action: Action) -> None:
        for job_id in job_ids:
            self._add_action(self._jobs[job_id].uid, action)

    def _add_action(self, uid: str, action: Action) -> None:
        self._actions[uid].append((self._now_ns, action))

    def _end_request(self, uid: str, status: Status, action: Action) -> None:
        self._requests[uid] = replace(self._requests[uid], status=status, finish_ns=self._now_ns)
        self._add_action(uid, action)

    def _begin_work(self, work: Work) -> None:
        requests = [self._jobs[job_id] for job_id in work.job_ids]
        try:
            predicted_ns = self._costs.work_ns(work.stage, requests, len(work.devices), work.num_steps)
        except UnknownCost:
            predicted_ns = None
        self._begun[work.work_id] = work
        self._in_flight[work.work_id] = _InFlight(
            work=work, issued_ns=self._now_ns, predicted_ns=predicted_ns, carriers=set(work.devices)
        )

    def _end_work(self, work_id: int) -> tuple[_InFlight, int] | None:
        """End a work now; returns it and the earliest time at which it can have begun. None if it has ended before."""
        one = self._in_flight.pop(work_id, None)
        if one is None:
            _ = self._begun[work_id]
            return None
        start_ns = max(one.issued_ns, *(self._free_ns.get(device_id, 0) for device_id in one.work.devices))
        self._free_ns.update(dict.fromkeys(one.work.devices, self._now_ns))
        return one, start_ns

    def _finish_work(self, work_id: int, run_ns: int) -> None:
        ended = self._end_work(work_id)
        if ended is None:
            return
        one, _ = ended
        work = one.work
        requests = [self._jobs[job_id] for job_id in work.job_ids]
        if all(self._requests[request.uid].status is None for request in requests):
            self._costs.observe(work.stage, requests, len(work.devices), work.num_steps, run_ns)
        self._works.append(
            PastWork(
                work=work,
                start_ns=self._now_ns - run_ns,
                end_ns=self._now_ns,
                steps=work.num_steps,
                run_ns=run_ns,
                predicted_ns=one.predicted_ns,
            )
        )

    def _stop_work(self, work_id: int, steps: int) -> None:
        ended = self._end_work(work_id)
        if ended is None:
            return
        one, start_ns = ended
        self._works.append(
            PastWork(
                work=one.work,
                start_ns=start_ns if steps else self._now_ns,
                end_ns=self._now_ns,
                steps=steps,
                run_ns=None,
                predicted_ns=one.predicted_ns,
            )
        )

    def _leave_out(self, work_id: int, job_id: int, reason: str) -> None:
        """Let a work continue without a member; for the member the work is lost."""
        one = self._in_flight.get(work_id)
        if one is not None and len(one.work.job_ids) > 1 and job_id in one.work.job_ids:
            others = [other for other in one.work.job_ids if other != job_id]
            lost, one.work = one.work.without(others), one.work.without((job_id,))
            self._lost.append(LostWork(work=lost, start_ns=self._now_ns, end_ns=self._now_ns, steps=0, reason=reason))

    def _fail_work(self, event: WorkFailed | Broken | OutOfMemory) -> None:
        if isinstance(event, WorkFailed):
            self._lose_work(event.work_id, 0, event.reason)
        else:
            self._lose_work(event.work_id, event.steps_done, event.why)

    def _lose_work(self, work_id: int, steps: int, reason: str) -> None:
        ended = self._end_work(work_id)
        if ended is not None:
            one, start_ns = ended
            self._lost.append(
                LostWork(work=one.work, start_ns=start_ns, end_ns=self._now_ns, steps=steps, reason=reason)
            )

    def _lose_device(self, device_id: int, lost: DeviceLost | NodeLost) -> None:
        """Lose the works that no device has any more; works that other devices have end by `Broken`."""
        node = self._nodes.get(device_id, 0)
        self._devices.append(
            PastDevice(at_ns=self._now_ns, device_id=device_id, node=node, is_up=False, reason=lost.reason)
        )
        for work_id, one in list(self._in_flight.items()):
            one.carriers.discard(device_id)
            if not one.carriers:
                self._lose_work(work_id, 0, lost.why)
