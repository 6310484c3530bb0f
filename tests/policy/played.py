"""Devices that a test plays for a controller whose models come and go, and what the controller knows by a name."""

from __future__ import annotations

import gc
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import FunctionType, ModuleType

from tilework.control.controller import Controller
from tilework.core.actions import (
    Accept,
    Action,
    Finish,
    LoadComponents,
    ReadComponents,
    Reject,
    RunWork,
    Stop,
    UseCache,
    WakeAt,
)
from tilework.core.events import (
    Cancelled,
    ComponentsLoaded,
    ComponentsRead,
    DeviceJoined,
    Event,
    ModelRemoved,
    ModelServed,
    OutOfMemory,
    Stopped,
    Submitted,
    Woke,
    WorkFinished,
)
from tilework.core.request import Request, Status
from tilework.core.work import Work
from tilework.cost.table import CostTable
from tilework.cost.table_costs import TableCosts
from tilework.cost.table_file import table_json


def served(part: CostTable) -> ModelServed:
    """The event by which a controller learns of a model, whose table this is."""
    return ModelServed(json.dumps(table_json(part)))


@dataclass(slots=True)
class Devices:
    """Devices of one node. Works take as long as `truth` says, by pipeline, whatever the controller believes.

    The first work with steps of each request of `too_large` does not fit. A work that is to stop ends at once without a
    step; one that runs and has no steps ends when it would. While they `hold`, works that are to stop run on, and no
    load ends. A byte of weights takes a nanosecond.
    """

    controller: Controller
    num: int
    truth: dict[str, TableCosts] = field(default_factory=dict)
    too_large: set[str] = field(default_factory=set)
    hold: bool = False
    now_ns: int = 0
    accepted: dict[str, Accept] = field(default_factory=dict)
    endings: dict[str, list[Status]] = field(default_factory=dict)
    runs: list[Work] = field(default_factory=list)
    _requests: dict[int, Request] = field(default_factory=dict)
    _queues: dict[int, list[Work]] = field(default_factory=dict)
    _running: dict[int, Work] = field(default_factory=dict)
    _truth_of: dict[int, TableCosts] = field(default_factory=dict)
    _loading: list[ComponentsLoaded] = field(default_factory=list)
    _stopping: list[int] = field(default_factory=list)
    _due: list[tuple[int, int, Event]] = field(default_factory=list)
    _num_due: int = 0

    def join(self, components: Sequence[str] = (), memory_bytes: int | None = None) -> None:
        for device_id in range(self.num):
            self._queues[device_id] = []
            self.handle(DeviceJoined(device_id, 0, components=tuple(components), memory_bytes=memory_bytes))

    def serve(self, part: CostTable, truth: CostTable | None = None) -> None:
        self.truth.update(dict.fromkeys(part.pipelines, TableCosts(truth or part)))
        self.handle(served(part))

    def remove(self, pipeline: str) -> None:
        self.handle(ModelRemoved(pipeline))

    def play(self, requests: Sequence[Request], cancels: Mapping[str, int] | None = None) -> None:
        """Submit each at its arrival, cancel some, and go on until all have ended and nothing is left to happen."""
        for request in requests:
            self._at(request.arrival_ns, Submitted(request))
        for uid, at_ns in (cancels or {}).items():
            self._at(at_ns, Cancelled(uid, "the client went away"))
        while any(not isinstance(event, Woke) for _, _, event in self._due) or self.controller.num_jobs:
            at_ns, _, event = heappop(self._due)
            self.now_ns = max(self.now_ns, at_ns)
            if not isinstance(event, WorkFinished | Stopped | OutOfMemory) or self._ends(event.work_id):
                self.handle(event)

    def handle(self, event: Event) -> tuple[Action, ...]:
        actions = self.controller.handle(event, self.now_ns)
        if isinstance(event, Submitted):
            self._note(event.request, actions)
        for action in actions:
            self._perform(action)
        self._begin()
        return actions

    def _note(self, request: Request, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Accept):
                self._requests[action.job_id] = action.accepted(request)

    def _perform(self, action: Action) -> None:
        match action:
            case Accept(_, uid):
                self.accepted[uid] = action
            case UseCache(job_id):
                self._requests[job_id] = self._requests[job_id].with_spare_cache
            case Reject(uid):
                self.endings.setdefault(uid, []).append(Status.REJECTED)
            case Finish(_, uid, status):
                self.endings.setdefault(uid, []).append(status)
            case RunWork(work):
                self._truth_of[work.work_id] = self.truth[work.stage.pipeline]
                for device_id in work.devices:
                    self._queues[device_id].append(work)
            case Stop(work_id):
                self._stop(work_id)
            case LoadComponents(load_id, device_id, _, _, num_bytes):
                self._loaded(ComponentsLoaded(load_id, device_id, num_bytes))
            case ReadComponents(read_id, _, _, _, num_bytes):
                self._at(self.now_ns + num_bytes, ComponentsRead(read_id, True))
            case WakeAt(at_ns):
                self._at(at_ns, Woke())

    @property
    def num_held(self) -> int:
        """How many works run that were to stop."""
        return len(self._stopping)

    def let_go(self) -> None:
        """Let the works end that were to stop, and then the loads."""
        self.hold = False
        for work_id in self._stopping:
            self._at(self.now_ns, Stopped(work_id, 0))
        for loaded in self._loading:
            self._at(self.now_ns, loaded)
        self.play(())

    def _loaded(self, loaded: ComponentsLoaded) -> None:
        if self.hold:
            self._loading.append(loaded)
        else:
            self._at(self.now_ns + loaded.run_ns, loaded)

    def _stop(self, work_id: int) -> None:
        if self.hold:
            self._stopping.append(work_id)
        elif work_id not in self._running or self._running[work_id].stage.has_steps:
            self._at(self.now_ns, Stopped(work_id, 0))

    def _at(self, at_ns: int, event: Event) -> None:
        self._num_due += 1
        heappush(self._due, (at_ns, self._num_due, event))

    def _ends(self, work_id: int) -> bool:
        """Take a work from its devices, unless it has ended or is held; returns whether they had it."""
        if self.hold and work_id in self._stopping:
            return False
        queues = [queue for queue in self._queues.values() if any(work.work_id == work_id for work in queue)]
        for queue in queues:
            queue[:] = [work for work in queue if work.work_id != work_id]
        return bool(queues)

    def _first(self) -> Iterator[Work]:
        """The works that are the first on all their devices, and of their requests."""
        works = {work.work_id: work for queue in self._queues.values() for work in queue}
        busy: set[int] = set()
        for _, work in sorted(works.items()):
            if all(self._queues[one][0] is work for one in work.devices) and busy.isdisjoint(work.job_ids):
                yield work
            busy.update(work.job_ids)

    def _begin(self) -> None:
        for work in self._first():
            if work.work_id not in self._running and work.work_id not in self._stopping:
                self._running[work.work_id] = work
                self.runs.append(work)
                self._run(work, [self._requests[job_id] for job_id in work.job_ids])

    def _run(self, work: Work, requests: Sequence[Request]) -> None:
        uids = {one.uid for one in requests}
        if work.stage.has_steps and self.too_large & uids:
            self.too_large -= uids
            self._at(self.now_ns, OutOfMemory(work.work_id, 0))
            return
        run_ns = self._truth_of[work.work_id].work_ns(work.stage, requests, len(work.devices), work.num_steps)
        self._at(self.now_ns + run_ns, WorkFinished(work.work_id, run_ns))


_Found = dict[int, tuple[object, "int | None"]]
"""Objects by identity, each with the one through which it was found."""


def traces(root: object, name: str) -> list[str]:
    """Where something that `root` holds has this name in a string: the types of what it is reached through."""
    found = _held_by(root)
    return [_path(found, number) for number, (one, _) in found.items() if isinstance(one, str) and name in one]


def num_objects(root: object) -> int:
    """How many objects `root` holds, directly or not. Numbers and tuples do not count: of ended jobs some thousands are
    kept until they are in the way.
    """
    return sum(not isinstance(one, int | float | tuple) for one, _ in _held_by(root).values())


def _held_by(root: object) -> _Found:
    """All that an object holds, directly or not. Classes, modules and functions belong to no object."""
    found: _Found = {id(root): (root, None)}
    queue = deque([root])
    while queue:
        one = queue.popleft()
        keys = one if isinstance(one, dict) else ()  # The collector visits no keys where all are strings.
        for held in (*gc.get_referents(one), *keys):
            if id(held) not in found and not isinstance(held, type | ModuleType | FunctionType):
                found[id(held)] = held, id(one)
                queue.append(held)
    return found


def _path(found: _Found, number: int | None) -> str:
    steps: list[str] = []
    while number is not None:
        one, number = found[number]
        steps.append(repr(one) if isinstance(one, str) else type(one).__name__)
    return " < ".join(steps)
