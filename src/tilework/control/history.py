"""What an event log says happened: which work ran when, how each request ended, and what work costs there."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.control.log import Header
from tilework.core.actions import (
    Action,
)
from tilework.core.request import Request, Status
from tilework.core.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class PastWork:
    """One executed work.

    A stopped one tells only when it ended (`run_ns` None): its `start_ns` is then the earliest that it can have been.
    `predicted_ns` is what the controller expected of all its steps when it began them, None where it did not know.
    """

    work: Work
    start_ns: int
    end_ns: int
    steps: int
    run_ns: int | None
    predicted_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWork:
    """A work that failed or whose devices were lost after it had begun; `steps` of it count all the same."""

    work: Work
    start_ns: int
    end_ns: int
    steps: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRequest:
    """One request and its end. `job_id` and `eta_ns` are None if it was rejected; a cut-off log leaves it open.

    `told` are the actions that concern it, each with its time; `control.decisions` puts them into words.
    """

    request: Request
    job_id: int | None = None
    eta_ns: int | None = None
    status: Status | None = None
    finish_ns: int | None = None
    told: tuple[tuple[int, Action], ...] = ()

    @property
    def on_time(self) -> bool | None:
        """Whether it kept its deadline, see `Request.met_deadline`; None also as long as it is open."""
        if self.status is None or self.finish_ns is None:
            return None
        return self.request.met_deadline(self.status, self.finish_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastDevice:
    """A device came up, or was lost (`is_up` False)."""

    at_ns: int
    device_id: int
    node: int
    is_up: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Works in order of their ends, requests in order of arrival, changes of devices in order of time."""

    header: Header
    end_ns: int
    works: tuple[PastWork, ...]
    requests: tuple[PastRequest, ...]
    lost: tuple[LostWork, ...] = ()
    devices: tuple[PastDevice, ...] = ()

    @property
    def num_devices(self) -> int:
        return len({change.device_id for change in self.devices})
