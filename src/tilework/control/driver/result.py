"""How a work ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tilework.core.events import Broken, OutOfMemory, StageFinished, StepsFinished, Stopped, WorkFailed
from tilework.core.wire import Ended, Failed
from tilework.core.work import DIFFUSE, Work


class Ending(StrEnum):
    """How a work ended. `LOST`: with all its devices; `BROKEN`: with some of them.

    `OUT_OF_MEMORY`: it needed more than a device has, and goes on in another way.
    """

    DONE = "done"
    STOPPED = "stopped"
    BROKEN = "broken"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    LOST = "lost"


EndEvent = StepsFinished | StageFinished | Stopped | WorkFailed | OutOfMemory | Broken


@dataclass(frozen=True, slots=True)
class WorkResult:
    """The end of a work.

    `members` are the jobs that it still belongs to, each with the steps that it had before. `report` is what counts of
    its devices' reports; None if the work failed or was lost. `event` is what the controller is told; None if the work
    was lost, which the loss of its devices says.
    """

    work: Work
    ending: Ending
    event: EndEvent | None
    members: Mapping[int, int]
    report: Ended | None = None

    @property
    def steps_done(self) -> int:
        return 0 if self.report is None else self.report.steps_done


def ending_of(report: Ended) -> Ending:
    if report.out_of_memory:
        return Ending.OUT_OF_MEMORY
    if report.broken:
        return Ending.BROKEN
    return Ending.STOPPED if report.stopped else Ending.DONE


def end_event(work: Work, report: Ended | Failed) -> EndEvent:
    """What the controller is told of a work's end."""
    work_id = work.work_id
    if isinstance(report, Failed):
        return WorkFailed(work_id, report.reason, report.state_lost)
    match ending_of(report):
        case Ending.OUT_OF_MEMORY:
            return OutOfMemory(work_id, report.steps_done)
        case Ending.BROKEN:
            return Broken(work_id, report.steps_done)
        case Ending.STOPPED:
            return Stopped(work_id, report.steps_done)
        case _:
            run_ns = report.end_ns - report.start_ns
            return (StepsFinished if work.stage.name == DIFFUSE else StageFinished)(work_id, run_ns)
