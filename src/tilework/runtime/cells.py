"""Cells: accelerators that consist of several workers, for models that exceed one device of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from tilework.control.driver.in_flight import merge_cut_off
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Execute, GroupRef
from tilework.core.wire.reports import Ended, Failed, Report, StartedOver, WeightsLoaded
from tilework.core.work import Group

_Joint = Ended | Failed | WeightsLoaded | StartedOver
"""Reports that each worker of a cell sends, and the cell passes on once."""


@dataclass(slots=True, kw_only=True, eq=False)
class CellReports:
    """Merges the reports of a cell's `workers`: of each work, of each load, and of starting over.

    `group` returns the group of the cell. `break_off` ends a group for all its workers; `discard` removes a blob.
    """

    workers: Group
    group: Callable[[Group], GroupRef]
    break_off: Callable[[GroupRef], None]
    discard: Callable[[StateBlob], None]
    _running: dict[int, GroupRef] = field(default_factory=dict)  # By work that the cell has not ended.
    _reported: dict[tuple[str, int], dict[int, _Joint]] = field(default_factory=dict)  # By subject, by worker.

    def begin(self, work: Execute) -> Execute:
        """Return a work as the workers are told it: they run it as a group."""
        group = self._running[work.work_id] = work.group or self.group(self.workers)
        return replace(work, group=group)

    def add(self, worker: int, report: Report) -> Report | None:
        """Return the cell's report once all workers have sent theirs, merged; None before."""
        if not isinstance(report, _Joint):
            return report
        if isinstance(report, Failed) or (isinstance(report, Ended) and report.ending.is_cut_off):
            self.break_off(self._running[report.work_id])  # The others must not wait for it.
        subject = _subject(report)
        reports = self._reported.setdefault(subject, {})
        reports[worker] = report
        if len(reports) < len(self.workers):
            return None
        del self._reported[subject]
        if isinstance(report, Ended | Failed):
            del self._running[report.work_id]
        return self._merged([reports[one] for one in self.workers])

    def clear(self) -> None:
        """Forget all works and reports, since the cell is lost."""
        self._running.clear()
        for reports in self._reported.values():
            self.drop(reports.values())
        self._reported.clear()

    def drop(self, reports: Iterable[Report], kept: Report | None = None) -> None:
        """Discard the blobs of reports that the kept report does not name."""
        named = set(kept.blobs.values()) if isinstance(kept, Ended) else set()
        for blob in (blob for one in reports if isinstance(one, Ended) for blob in one.blobs.values()):
            if blob not in named:
                self.discard(blob)

    def _merged(self, reports: list[_Joint]) -> _Joint:
        first = reports[0]
        if isinstance(first, WeightsLoaded):
            loads = [one for one in reports if isinstance(one, WeightsLoaded)]
            dropped = {digest for one in loads for digest in one.dropped}
            return WeightsLoaded(first.load_id, max(one.run_ns for one in loads), tuple(sorted(dropped)))
        if isinstance(first, StartedOver):
            return first
        failed = [one for one in reports if isinstance(one, Failed)]
        if isinstance(first, Ended) and not first.ending.is_cut_off:
            merged: Ended | Failed = first
        elif failed:
            merged = failed[0]
        else:
            merged = merge_cut_off([one for one in reports if isinstance(one, Ended)])
        self.drop(reports, merged)
        return merged


def _subject(report: _Joint) -> tuple[str, int]:
    """Return the subject of a report: all workers of a cell report on it."""
    match report:
        case WeightsLoaded():
            return "load", report.load_id
        case StartedOver():
            return "start", 0
        case _:
            return "work", report.work_id
