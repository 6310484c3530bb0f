"""Traffic whose mix shifts, on an engine of our own: what ran where, what each run waited for, and what is drawn."""

from __future__ import annotations

import asyncio
import io
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from suite.case import CaseFailed
from suite.waiting_model import ADAPTER
from tilework.control.controller import ControllerConfig
from tilework.control.history import History
from tilework.control.history_recorder import read_history
from tilework.control.log import replay
from tilework.core.actions import RunWork
from tilework.core.model import ModelSource
from tilework.core.request import Shape, Status
from tilework.core.time import ns_from_s, s_from_ns
from tilework.core.wire.spec import Spec
from tilework.core.work import NewPlacement
from tilework.cost.table_costs import TableCosts
from tilework.policy.traits import PlacementStatus
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.runtime.observer import Observer
from tilework.runtime.ticket import Ticket, WorkSegment

MODEL = "waiting"
_SAMPLE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """For `seconds`, requests of this size and number of steps follow each other.

    With `most_s` it goes on until `seconds` after the policy has changed its placement, and no longer than that.
    As many are open as `devices` devices do the stage `short` for in `open_s`: what waits is as much as what these do
    meanwhile, however fast they are.
    """

    seconds: float
    side: int
    steps: int
    short: str
    devices: int
    open_s: float = 50.0
    most_s: float = 0.0

    def end_ns(self, begin_ns: int, placed_ns: int) -> int:
        """When it ends, as far as is known. `placed_ns` is the latest change of the placement."""
        if not self.most_s:
            return begin_ns + ns_from_s(self.seconds)
        most_ns = begin_ns + ns_from_s(self.most_s)
        return most_ns if placed_ns < begin_ns else min(most_ns, placed_ns + ns_from_s(self.seconds))

    def num_open(self, costs: TableCosts) -> int:
        graph = costs.graph(MODEL)
        run_ns = costs.run_ns(graph.stage(self.short), (Shape(self.side, self.side),), 1)
        runs = self.steps if graph.stage(self.short).has_steps else 1
        return max(8, round(ns_from_s(self.open_s) * self.devices / (runs * run_ns)))


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A run that has ended, and since when only its device kept it waiting: the decision, the run of its request before
    it and the run of its device before it had come.
    """

    segment: WorkSegment
    ready_ns: int

    @property
    def gap_ns(self) -> int:
        return self.segment.start_ns - self.ready_ns


class Placements(Observer):
    """How many changes of the placement there were, and when the latest one was."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self.latest_ns = 0

    def on_placed(self, placement: NewPlacement) -> None:
        self.latest_ns = self._now_ns()


@dataclass(slots=True)
class Shift:
    """What one run with one policy showed. Times are on the engine's clock."""

    policy: str
    begin_ns: int = 0
    last_arrival_ns: int = 0
    lengths_s: list[float] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    samples: list[tuple[int, Sequence[PlacementStatus]]] = field(default_factory=list)
    history: History | None = None
    same_again: bool = False

    @property
    def past(self) -> History:
        assert self.history is not None, "the run has ended"
        return self.history

    @property
    def segments(self) -> list[WorkSegment]:
        """In order of their ends."""
        return sorted((one for ticket in self.tickets for one in ticket.segments), key=lambda one: one.end_ns)

    @property
    def num_lost(self) -> int:
        """Requests that are not done, or not exactly once by the log."""
        done = sum(past.status is Status.DONE for past in self.past.requests)
        return len(self.tickets) - min(done, sum(ticket.status is Status.DONE for ticket in self.tickets))

    def dispatches(self) -> list[Dispatch]:
        """All runs, in order of their ends."""
        device_free_ns: dict[int, int] = {}
        # When it was decided, and when the run before it had ended.
        of_request: list[tuple[int, int, WorkSegment]] = []
        for ticket in self.tickets:
            before_ns = 0
            decided = [at_ns for at_ns, action in ticket.history if isinstance(action, RunWork)]
            for at_ns, segment in zip(decided, ticket.segments, strict=True):
                of_request.append((at_ns, before_ns, segment))
                before_ns = segment.end_ns
        found = []
        for at_ns, before_ns, segment in sorted(of_request, key=lambda one: one[2].start_ns):
            (device_id,) = segment.devices
            found.append(Dispatch(segment, max(at_ns, before_ns, device_free_ns.get(device_id, 0))))
            device_free_ns[device_id] = segment.end_ns
        return found

    def typical_gap_ns(self) -> float:
        """Of runs that waited for no load."""
        return median(one.gap_ns for one in self.dispatches() if not one.segment.load_ns)

    def progress(self, window_s: float) -> list[int]:
        """Steps and pictures in each window of this length, while requests came."""
        num = int(s_from_ns(self.last_arrival_ns - self.begin_ns) / window_s)
        counts = [0] * num
        for one in self.segments:
            index = int(s_from_ns(one.end_ns - self.begin_ns) / window_s)
            if index < num:
                counts[index] += max(1, one.num_steps)
        return counts

    def load_share(self) -> float:
        """The share of the time of all devices in which they loaded."""
        loads_ns = sum(past.end_ns - past.start_ns for past in self.past.loads)
        return loads_ns / (self.past.num_devices * (self.segments[-1].end_ns - self.begin_ns))

    def seen_and_measured(self, roles: Mapping[str, str]) -> Iterator[tuple[int, PlacementStatus, int, int]]:
        """Of each type with a window that lies in the run: what the policy saw, and what the workers reported.

        That is how many runs ended there, of the stage that `roles` has for the type, and their time. A run counts for
        the type that its device had when it ended.
        """
        for at_ns, statuses in self.samples:
            for status in statuses:
                from_ns = at_ns - status.window_ns
                if status.name not in roles or from_ns < self.begin_ns:
                    continue
                inside = [
                    one
                    for one in self.segments
                    if from_ns < one.end_ns <= at_ns and self._type_at(one.devices[0], one.start_ns) == status.name
                ]
                ended = sum(one.stage == roles[status.name] for one in inside)
                yield at_ns, status, ended, sum(one.end_ns - one.start_ns for one in inside)

    def _type_at(self, device_id: int, at_ns: int) -> str:
        name = ""
        for past in self.past.placements:
            if past.at_ns <= at_ns:
                name = next((name for group, name in past.placement.groups if device_id in group), "")
        return name


async def serve_shift(policy: str, model: str, num_workers: int, weights_bytes: int, phases: Sequence[Phase]) -> Shift:
    """Serve all phases one after another, and wait until all requests have ended. Raises CaseFailed."""
    source = ModelSource(path=model, name=MODEL, adapter=ADAPTER, previews=False)
    executor = LocalExecutor(LocalConfig(num_workers=num_workers, sources=(source,), weights_bytes=weights_bytes))
    log, shift = io.StringIO(), Shift(policy)
    engine = await EngineStart(
        EngineConfig(controller=ControllerConfig(policy=policy), exact=True), executor, log
    ).start()
    sampling = asyncio.create_task(_sample(engine, shift))
    try:
        await _send(engine, phases, shift)
    finally:
        sampling.cancel()
        await engine.stop()
    lines = log.getvalue().splitlines()
    shift.history, shift.same_again = read_history(lines), replay(lines)[1] is None
    return shift


async def _sample(engine: Engine, shift: Shift) -> None:
    while True:
        await asyncio.sleep(_SAMPLE_S)
        shift.samples.append((engine.now_ns(), engine.status.usage().placements))


async def _send(engine: Engine, phases: Sequence[Phase], shift: Shift) -> None:
    shift.begin_ns, waiting = engine.now_ns(), deque[Ticket]()
    placements = Placements(engine.now_ns)
    engine.observe(placements)
    for phase in phases:
        num_open, begin_ns = phase.num_open(engine._controller.costs), engine.now_ns()
        while (now_ns := engine.now_ns()) < (end_ns := phase.end_ns(begin_ns, placements.latest_ns)):
            waiting = deque(one for one in waiting if not one.outcome.done())
            while len(waiting) < num_open:
                waiting.append(_submitted(engine, phase, len(shift.tickets)))
                shift.tickets.append(waiting[-1])
                shift.last_arrival_ns = now_ns
            futures = [one.outcome for one in waiting]
            await asyncio.wait(futures, timeout=s_from_ns(end_ns - now_ns), return_when=asyncio.FIRST_COMPLETED)
        shift.lengths_s.append(s_from_ns(engine.now_ns() - begin_ns))
    await asyncio.gather(*(one.outcome for one in shift.tickets))


def _submitted(engine: Engine, phase: Phase, number: int) -> Ticket:
    spec = Spec(
        prompt="a red circle",
        height=phase.side,
        width=phase.side,
        steps=phase.steps,
        guidance_scale=4.0,
        seed=number,
        exact=True,
    )
    answer = engine.submit({str(number): spec})
    if not isinstance(answer, tuple):
        raise CaseFailed(answer.reason)
    return answer[0]
