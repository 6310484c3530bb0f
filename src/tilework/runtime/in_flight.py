"""Works in in_flight_work, and what their groups' reports amount to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tilework.core.events import Broken, OutOfMemory, StageFinished, StepsFinished, Stopped
from tilework.core.request import Request
from tilework.core.wire import Ended, GroupRef, StateBlob
from tilework.core.work import DIFFUSE, Work
from tilework.runtime.observer import Ending


@dataclass(slots=True, kw_only=True, eq=False)
class InFlightWork:
    """A work that devices have been told to run, for these requests. `group` is None for a device alone.

    `is_broken_off` tells that its group was, though no device was lost, since it had stopped.
    """

    work: Work
    group: GroupRef | None
    requests: tuple[Request, ...]
    predicted_ns: int
    reports: dict[int, Ended] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    is_broken_off: bool = False

    @property
    def awaited(self) -> set[int]:
        """The members that have not reported and are not lost."""
        return set(self.work.devices) - self.reports.keys() - self.lost

    @property
    def is_settled(self) -> bool:
        return not self.awaited

    @property
    def blobs(self) -> set[StateBlob]:
        """What members have put down for it so far."""
        return {blob for ended in self.reports.values() for blob in ended.blobs.values()}


@dataclass(frozen=True, slots=True)
class WorkResult:
    """How a work ended: by its leader's report; or, if it was cut off, by that of the survivor who came farthest.

    `spare` is what others have put down for it.
    """

    in_flight_work: InFlightWork
    ended: Ended
    spare: frozenset[StateBlob] = frozenset()

    @property
    def work(self) -> Work:
        return self.in_flight_work.work

    @property
    def ending(self) -> Ending:
        if self.ended.out_of_memory:
            return Ending.OUT_OF_MEMORY
        if self.ended.broken:
            return Ending.BROKEN
        return Ending.STOPPED if self.ended.stopped else Ending.DONE

    @property
    def event(self) -> Broken | OutOfMemory | Stopped | StepsFinished | StageFinished:
        """What the controller is told of it."""
        work_id, ended = self.work.work_id, self.ended
        match self.ending:
            case Ending.OUT_OF_MEMORY:
                return OutOfMemory(work_id, ended.steps_done)
            case Ending.BROKEN:
                return Broken(work_id, ended.steps_done)
            case Ending.STOPPED:
                return Stopped(work_id, ended.steps_done)
            case _:
                kind = StepsFinished if self.work.stage.name == DIFFUSE else StageFinished
                return kind(work_id, ended.end_ns - ended.start_ns)


class InFlightWorks:
    """The leader, a group's first, speaks for its group.

    When a member is lost or runs out of memory, all survivors are heard.
    """

    def __init__(self) -> None:
        self._in_flight: dict[int, InFlightWork] = {}

    def __contains__(self, work_id: int) -> bool:
        return work_id in self._in_flight

    @property
    def work_ids(self) -> list[int]:
        return list(self._in_flight)

    def begin(self, in_flight_work: InFlightWork) -> None:
        self._in_flight[in_flight_work.work.work_id] = in_flight_work

    def get(self, work_id: int) -> InFlightWork | None:
        return self._in_flight.get(work_id)

    def end(self, work_id: int) -> InFlightWork | None:
        """Take a work out, for instance because it failed; None if it is not in in_flight_work (any more)."""
        return self._in_flight.pop(work_id, None)

    def report(self, device_id: int, ended: Ended) -> WorkResult | None:
        """Take a member's report; None as long as others are to be heard."""
        in_flight_work = self._in_flight[ended.work_id]
        if device_id == in_flight_work.work.devices[0] and not is_cut_off(ended):
            del self._in_flight[ended.work_id]
            return WorkResult(in_flight_work, ended)
        in_flight_work.reports[device_id] = ended
        return self._land_if_settled(in_flight_work)

    def lose(self, device_id: int) -> tuple[list[InFlightWork], list[WorkResult]]:
        """A device is lost: what nobody is left to report on, and what has broken off by it."""
        affected = [
            in_flight_work for in_flight_work in self._in_flight.values() if device_id in in_flight_work.work.devices
        ]
        for in_flight_work in affected:
            in_flight_work.lost.add(device_id)
        orphans = [
            in_flight_work for in_flight_work in affected if in_flight_work.lost == set(in_flight_work.work.devices)
        ]
        for in_flight_work in orphans:
            del self._in_flight[in_flight_work.work.work_id]
        rest = [in_flight_work for in_flight_work in affected if in_flight_work not in orphans]
        results = [self._land_if_settled(in_flight_work) for in_flight_work in rest]
        return orphans, [result for result in results if result is not None]

    def _land_if_settled(self, in_flight_work: InFlightWork) -> WorkResult | None:
        if not in_flight_work.is_settled:
            return None
        work = in_flight_work.work
        del self._in_flight[work.work_id]
        reports = [
            in_flight_work.reports[device_id] for device_id in work.devices if device_id in in_flight_work.reports
        ]
        best, starved = max(reports, key=_steps_kept), any(ended.out_of_memory for ended in reports)
        ended = replace(best, broken=not starved, out_of_memory=starved, steps_done=_steps_kept(best))
        return WorkResult(in_flight_work, ended, frozenset(in_flight_work.blobs.difference(best.blobs.values())))


def is_cut_off(ended: Ended) -> bool:
    """Whether a member could not go on, so that the others cannot, either."""
    return ended.broken or ended.out_of_memory


def _steps_kept(ended: Ended) -> int:
    """Steps whose result can be taken over: a member that was done when the leader was lost has put nothing down."""
    return ended.steps_done if ended.blobs else 0
