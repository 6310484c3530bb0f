"""The history of a run: the times of works, the ends of requests, and the devices that were up."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.control.log import LogHeader
from tilework.core.actions import Action, LoadComponents, ReadComponents
from tilework.core.graph.stage import DeviceKind
from tilework.core.request import Request, Status
from tilework.core.work import NewPlacement, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class PastWork:
    """One executed work.

    Of a stopped work only the end is known (`run_ns` None): `start_ns` is then the earliest possible start.
    `predicted_ns` is the time that the controller predicted for all its steps when it began; None if it was unknown.
    """

    work: Work
    start_ns: int
    end_ns: int
    steps: int
    run_ns: int | None
    predicted_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWork:
    """A work that failed or lost its devices after it had begun; `steps` of it are kept."""

    work: Work
    start_ns: int
    end_ns: int
    steps: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRequest:
    """One request and its end. `job_id` and `eta_ns` are None if it was rejected; a cut-off log leaves it open.

    `actions` are the controller's actions about it, each with its time; `control.decisions` describes them in words.
    """

    request: Request
    job_id: int | None = None
    eta_ns: int | None = None
    status: Status | None = None
    finish_ns: int | None = None
    actions: tuple[tuple[int, Action], ...] = ()

    @property
    def on_time(self) -> bool | None:
        """True if it met its deadline, see `Request.met_deadline`; None also while it is open."""
        if self.status is None or self.finish_ns is None:
            return None
        return self.request.met_deadline(self.status, self.finish_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastDevice:
    """A device that joined, or was lost (`is_up` False)."""

    at_ns: int
    device_id: int
    node: int
    is_up: bool
    kind: DeviceKind = DeviceKind.ACCELERATOR
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastLoad:
    """A load of components that a device has done, none of which it was told to drop meanwhile.

    It ended at `end_ns`. `end_ns - start_ns` is its time without other things that the device did meanwhile.
    """

    load: LoadComponents
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRead:
    """A read ahead of need that a host has done."""

    read: ReadComponents
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PastPlacement:
    """A change of the stages that devices are for."""

    at_ns: int
    placement: NewPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A whole run: works, loads and reads in order of their ends, requests in order of arrival, changes of devices and
    placements in order of time.
    """

    header: LogHeader
    end_ns: int
    works: tuple[PastWork, ...]
    requests: tuple[PastRequest, ...]
    lost: tuple[LostWork, ...] = ()
    devices: tuple[PastDevice, ...] = ()
    loads: tuple[PastLoad, ...] = ()
    reads: tuple[PastRead, ...] = ()
    placements: tuple[PastPlacement, ...] = ()

    @property
    def num_devices(self) -> int:
        return len({change.device_id for change in self.devices})
