"""Works in flight, and what their groups' reports amount to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tilework.core.events import Broken, OutOfMemory, StageFinished, StepsFinished, Stopped
from tilework.core.request import Request
from tilework.core.wire import Ended, GroupRef, Parcel
from tilework.core.work import DIFFUSE, Work
from tilework.runtime.observer import Ending


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
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
    def parcels(self) -> set[Parcel]:
        """What members have put down for it so far."""
        return {parcel for ended in self.reports.values() for parcel in ended.parcels.values()}


@dataclass(frozen=True, slots=True)
class Landing:
    """How a work ended: by its leader's report; or, if it was cut off, by that of the survivor who came farthest.

    `spare` is what others have put down for it.
    """

    flight: Flight
    ended: Ended
    spare: frozenset[Parcel] = frozenset()

    @property
    def work(self) -> Work:
        return self.flight.work

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


class Flights:
    """The leader, a group's first, speaks for its group.

    When a member is lost or runs out of memory, all survivors are heard.
    """

    def __init__(self) -> None:
        self._flights: dict[int, Flight] = {}

    def __contains__(self, work_id: int) -> bool:
        return work_id in self._flights

    @property
    def work_ids(self) -> list[int]:
        return list(self._flights)

    def begin(self, flight: Flight) -> None:
        self._flights[flight.work.work_id] = flight

    def get(self, work_id: int) -> Flight | None:
        return self._flights.get(work_id)

    def end(self, work_id: int) -> Flight | None:
        """Take a work out, for instance because it failed; None if it is not in flight (any more)."""
        return self._flights.pop(work_id, None)

    def report(self, device_id: int, ended: Ended) -> Landing | None:
        """Take a member's report; None as long as others are to be heard."""
        flight = self._flights[ended.work_id]
        if device_id == flight.work.devices[0] and not is_cut_off(ended):
            del self._flights[ended.work_id]
            return Landing(flight, ended)
        flight.reports[device_id] = ended
        return self._land_if_settled(flight)

    def lose(self, device_id: int) -> tuple[list[Flight], list[Landing]]:
        """A device is lost: what nobody is left to report on, and what has broken off by it."""
        affected = [flight for flight in self._flights.values() if device_id in flight.work.devices]
        for flight in affected:
            flight.lost.add(device_id)
        orphans = [flight for flight in affected if flight.lost == set(flight.work.devices)]
        for flight in orphans:
            del self._flights[flight.work.work_id]
        rest = [flight for flight in affected if flight not in orphans]
        landings = [self._land_if_settled(flight) for flight in rest]
        return orphans, [landing for landing in landings if landing is not None]

    def _land_if_settled(self, flight: Flight) -> Landing | None:
        if not flight.is_settled:
            return None
        work = flight.work
        del self._flights[work.work_id]
        reports = [flight.reports[device_id] for device_id in work.devices if device_id in flight.reports]
        best, starved = max(reports, key=_steps_kept), any(ended.out_of_memory for ended in reports)
        ended = replace(best, broken=not starved, out_of_memory=starved, steps_done=_steps_kept(best))
        return Landing(flight, ended, frozenset(flight.parcels.difference(best.parcels.values())))


def is_cut_off(ended: Ended) -> bool:
    """Whether a member could not go on, so that the others cannot, either."""
    return ended.broken or ended.out_of_memory


def _steps_kept(ended: Ended) -> int:
    """Steps whose result can be taken over: a member that was done when the leader was lost has put nothing down."""
    return ended.steps_done if ended.parcels else 0
