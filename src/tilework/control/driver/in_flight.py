"""Works in flight, and how the reports of a group's members are merged into one."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.reports import Ended, Ending
from tilework.core.work import Work


@dataclass(slots=True, eq=False)
class InFlightWork:
    """A work that was sent to its devices and has not ended.

    The leader, a group's first device, reports for its group. When a member is lost, breaks off or runs out of memory,
    the reports of all remaining members are awaited, and the report with the most steps counts.

    `is_broken_off`: its group was told to end it.
    """

    work: Work
    reports: dict[int, Ended] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    is_broken_off: bool = False

    @property
    def awaited(self) -> Set[int]:
        """Devices that have not reported and are not lost."""
        return set(self.work.devices) - self.reports.keys() - self.lost

    @property
    def is_lost(self) -> bool:
        """True if all its devices are lost."""
        return len(self.lost) == len(self.work.devices)

    @property
    def blobs(self) -> set[StateBlob]:
        """Blobs of all its reports so far."""
        return {blob for report in self.reports.values() for blob in report.blobs.values()}

    def blobs_except(self, report: Ended) -> list[StateBlob]:
        """Return the blobs of its reports, without those of one report."""
        return list(self.blobs.difference(report.blobs.values()))

    def take(self, device_id: int, report: Ended) -> Ended | None:
        """Add a device's report; returns the merged report, None while others are awaited."""
        if device_id == self.work.devices[0] and not report.ending.is_cut_off:
            return report
        self.reports[device_id] = report
        return self.merged()

    def merged(self) -> Ended | None:
        """Return the report with the most steps, the first of several; None while others are awaited."""
        if self.awaited or not self.reports:
            return None
        return merge_cut_off([self.reports[one] for one in self.work.devices if one in self.reports])


def merge_cut_off(reports: Sequence[Ended]) -> Ended:
    """Return the report of a work that its devices could not end: the first one with the most steps."""
    farthest = max(reports, key=_steps_kept)
    is_starved = any(report.ending is Ending.OUT_OF_MEMORY for report in reports)
    ending = Ending.OUT_OF_MEMORY if is_starved else Ending.BROKEN
    return replace(farthest, ending=ending, steps_done=_steps_kept(farthest))


def _steps_kept(report: Ended) -> int:
    """Return the steps whose result is serialized. A device that was done when the leader was lost wrote no blob."""
    return report.steps_done if report.blobs or report.images or report.files else 0
