"""A driver core over a fake controller whose beliefs the tests set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from builders import request, table
from stages import DIFFUSE, stage_of
from tilework.control.driver.core import DriverCore
from tilework.control.driver.effects import (
    BreakOff,
    Discard,
    Effect,
    Effects,
    HandleEvent,
    Kill,
    ReportStuck,
    Resolve,
    in_turn,
)
from tilework.control.driver.result import WorkResult
from tilework.control.driver.state_registry import StateMove
from tilework.control.watchdog import WatchdogConfig
from tilework.core.actions import MoveState, RunWork
from tilework.core.checkpoint import Checkpoint
from tilework.core.wire.blobs import SavedState, StateBlob
from tilework.core.wire.reports import Ended, Failed
from tilework.core.work import Group, Member, Work
from tilework.cost.table_costs import TableCosts

STEPS = 20


@dataclass
class FakeJob:
    attempt: int = 1
    steps_done: int = 0
    works: list[Work] = field(default_factory=list)
    last_devices: Group = ()
    request: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(steps=STEPS))

    @property
    def done(self) -> SimpleNamespace:
        return SimpleNamespace(position=1 + self.steps_done)


@dataclass
class FakeTracker:
    jobs: dict[int, FakeJob] = field(default_factory=dict)
    works: dict[int, Work] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)

    def is_busy(self, device_id: int) -> bool:
        return device_id in self.busy


def checkpoint(text: str, state: str = "", steps_done: int = 0) -> Checkpoint:
    """The conditioning, and the state after some steps if it has a name."""
    states = [SavedState(0, 1, blob(text))]
    return Checkpoint((*states, SavedState(1, 1 + steps_done, blob(state))) if state else tuple(states))


def brought_by(move: StateMove) -> tuple[StateBlob | None, StateBlob | None]:
    """The conditioning and the state that a move delivers."""
    by_stage = {state.index: state.blob for state in move.states}
    return by_stage.get(0), by_stage.get(1)


class StuckWorks:
    """A watchdog that returns the works and loads that a test gives it."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.loads: list[tuple[int, int]] = []

    def check(self) -> list[Work]:
        return self.works

    def check_loads(self) -> list[tuple[int, int]]:
        return self.loads

    def limit_ns(self, work: Work) -> int:
        return 7


class Rig:
    """Jobs are encoded. The controller believes what `jobs` say."""

    def __init__(self, *job_ids: int) -> None:
        self.tracker = FakeTracker({job_id: FakeJob() for job_id in job_ids or (1,)})
        controller: Any = SimpleNamespace(tracker=self.tracker, costs=TableCosts(table()))
        self.core = DriverCore(controller, WatchdogConfig())
        self.stuck = self.core._watchdog = StuckWorks()  # type: ignore[assignment]
        for job_id in self.tracker.jobs:
            self.core.begin_job(job_id, request(str(job_id), steps=STEPS), checkpoint(f"text{job_id}"))
        self.num_works = 0

    def run(
        self,
        *devices: int,
        jobs: Sequence[int] = (1,),
        first_step: int = 0,
        num_steps: int = 4,
        stage: str = DIFFUSE,
    ) -> Work:
        self.num_works += 1
        work = Work(
            work_id=self.num_works,
            stage=stage_of("toy", stage),
            members=tuple(Member(one, self.tracker.jobs[one].attempt, 1 + first_step, first_step) for one in jobs),
            devices=devices,
            num_steps=num_steps,
            why="",
        )
        self.tracker.works[work.work_id] = work
        assert self.core.perform(RunWork(work)) == ((devices, work),)
        return work

    def move(self, job_id: int, target: int, *, conditioning: bool = False) -> StateMove:
        ((devices, move),) = self.core.perform(MoveState(job_id, (target,), (0,) if conditioning else ()))
        assert isinstance(move, StateMove)
        assert devices == move.targets == (target,)
        return move

    def report(self, device_id: int, report: Ended | Failed, *, late: bool = False) -> list[Any]:
        """The effects of a report, in short. The controller counts a work's end when it handles it, unless `late`."""
        return list(map(short, self._followed(self.core.on_report(device_id, report), late)))

    def lose(self, device_id: int) -> list[Any]:
        return list(map(short, self._followed(self.core.on_device_lost(device_id, "killed"))))

    def lose_node(self, devices: Group, *gone: str) -> list[Any]:
        """Node 0 is lost, with these blobs."""
        effects = self.core.on_node_lost(0, devices, [blob(name) for name in gone], "no power")
        return list(map(short, self._followed(effects)))

    def check_stuck(self, *works: Work) -> list[Any]:
        self.stuck.works = list(works)
        return list(map(short, self.core.check_stuck()))

    def _followed(self, effects: Effects, held: bool = False) -> Iterator[Effect]:
        for effect in in_turn(effects):
            yield effect
            if isinstance(effect, WorkResult) and not held:
                self.tracker.works.pop(effect.work.work_id, None)
                for job_id, position in effect.members.items():
                    if effect.report is not None:
                        self.tracker.jobs[job_id].steps_done = position + effect.steps_done - 1


def short(effect: Effect) -> Any:
    """An effect as tests compare it: events unchanged, other effects as tuples of a word and its arguments."""
    match effect:
        case HandleEvent(event):
            return event
        case WorkResult():
            return effect.ending.value if effect.event is None else effect.event
        case Resolve(move):
            _, brought = brought_by(move)
            state = brought.name if brought else "no state"
            return "move", move.targets, state if move.delivers else "nothing"
        case BreakOff(work):
            return "break off", work.work_id
        case Discard(blobs):
            return "discard", {one.name for one in blobs}
        case ReportStuck(work):
            return "stuck", work.work_id
        case Kill(device_id):
            return "kill", device_id


def blob(name: str) -> StateBlob:
    return StateBlob(name, 1)


def ended(work: Work, steps: int = 4, state: str = "", **fields: Any) -> Ended:
    """A report; `state` is the blob of the work's only job."""
    blobs = {work.job_ids[0]: blob(state)} if state else {}
    return Ended(work.work_id, 10, 15, steps, **({"blobs": blobs} | fields))
