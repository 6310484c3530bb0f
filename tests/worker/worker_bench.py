"""A worker in this process, which executes commands one by one and keeps its reports."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from pathlib import Path

from commands import MODEL
from tilework.comm.groups import Groups
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import STATES_BYTES, Command, Execute, LoadWeights
from tilework.core.wire.reports import Ended, Report
from tilework.pipelines.family import Family
from tilework.worker.models.loras import WorkerLoras
from tilework.worker.models.models import Models
from tilework.worker.state_blobs import StateBlobs
from tilework.worker.worker import Worker
from tilework.worker.works import OpenWorks


class WorkerBench:
    """A worker and its reports; `on_report` may react to a report at once, as a receiver would."""

    def __init__(
        self,
        family: Family,
        directory: Path,
        on_report: Callable[[Report], None] = lambda report: None,
        loras: WorkerLoras | None = None,
        states_bytes: int = STATES_BYTES,
        models: Models | None = None,
        loads_ahead: Callable[[], Sequence[LoadWeights]] = tuple,
        emit_made: Callable[[Callable[[], Report]], None] | None = None,
    ) -> None:
        self.family = family
        self.works = OpenWorks()
        self.reports: list[Report] = []
        self.on_report = on_report
        self.blobs = StateBlobs(directory, 0)
        models = models or Models({MODEL: family}, family.device, loras=loras)
        groups = Groups(0, "")
        self.worker = Worker(
            models,
            self.works,
            groups,
            self.blobs,
            self._emit,
            states_bytes=states_bytes,
            loads_ahead=loads_ahead,
            emit_made=emit_made,
        )

    def run(self, *commands: Command) -> list[Report]:
        """Receive all commands, then execute them; returns the reports that they made."""
        known = len(self.reports)
        for command in commands:
            if isinstance(command, Execute):
                self.works.open(command.work_id, dict(command.members))
        for command in commands:
            self.worker.execute(command)
        return self.reports[known:]

    def latest(self, work_ids: Container[int]) -> StateBlob | None:
        """What the latest of these works has put down; None if none of them has run."""
        ended = [report for report in self.reports if isinstance(report, Ended) and report.work_id in work_ids]
        return next(iter(ended[-1].blobs.values()), None) if ended else None

    def _emit(self, report: Report) -> None:
        self.reports.append(report)
        self.on_report(report)
