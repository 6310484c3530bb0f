"""Ends of works: the merged report of a work, and the event that tells the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilework.core.events import Broken, OutOfMemory, Stopped, WorkFailed, WorkFinished
from tilework.core.wire.reports import Ended, Ending
from tilework.core.work import Work

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


def end_event(work: Work, ending: Ending, report: Ended) -> EndEvent:
    """Return the event that tells the controller how a work ended."""
    if ending is Ending.DONE:
        return WorkFinished(work.work_id, report.end_ns - report.start_ns)
    early: type[OutOfMemory | Broken | Stopped] = Stopped
    if ending is not Ending.STOPPED:
        early = Broken if ending is Ending.BROKEN else OutOfMemory
    return early(work.work_id, report.steps_done)
