"""Ends of works: the ways in which a work ends, and its merged report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tilework.core.events import Broken, OutOfMemory, Stopped, WorkFailed, WorkFinished
from tilework.core.wire.reports import Ended
from tilework.core.work import Work


class Ending(StrEnum):
    """Way in which a work ended. `LOST`: all its devices were lost. `BROKEN`: some of its devices were lost.

    `OUT_OF_MEMORY`: it needed more memory than a device has; its jobs are retried in another way.
    """

    DONE = "done"
    STOPPED = "stopped"
    BROKEN = "broken"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    LOST = "lost"


EndEvent = WorkFinished | Stopped | WorkFailed | OutOfMemory | Broken


@dataclass(slots=True)
class WorkResult:
    """The end of a work.

    `members` are the jobs that it still belongs to, each with its position before it. `report` is merged from its
    devices' reports; None if the work failed or was lost. `event` is for the controller; None if the work was lost,
    which follows from `DeviceLost`. Not frozen, since simulations make one per work.
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
    """Return the way in which a work ended, by its merged report."""
    if report.out_of_memory:
        return Ending.OUT_OF_MEMORY
    if report.broken:
        return Ending.BROKEN
    return Ending.STOPPED if report.stopped else Ending.DONE


def end_event(work: Work, ending: Ending, report: Ended) -> EndEvent:
    """Return the event that tells the controller how a work ended."""
    if ending is Ending.DONE:
        return WorkFinished(work.work_id, report.end_ns - report.start_ns)
    early: type[OutOfMemory | Broken | Stopped] = Stopped
    if ending is not Ending.STOPPED:
        early = Broken if ending is Ending.BROKEN else OutOfMemory
    return early(work.work_id, report.steps_done)
