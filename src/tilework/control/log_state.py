"""State of a log where one of its segments begins: devices that are up, and requests that are open."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilework.core.actions import Accept, Action, Finish, UseCache
from tilework.core.events import DeviceJoined, DeviceLost, Event, NodeLost, Restored, Submitted
from tilework.core.graph.stage import DeviceKind
from tilework.core.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedDevice:
    """A device that is up."""

    device_id: int
    node: int
    kind: DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """A request that was accepted and has not ended."""

    job_id: int
    eta_ns: int
    request: Request


class LogState:
    """Follows a log, and has the devices that are up and the requests that are open after the calls so far."""

    def __init__(self) -> None:
        self._devices: dict[int, LoggedDevice] = {}
        self._open: dict[int, OpenRequest] = {}

    @property
    def devices(self) -> tuple[LoggedDevice, ...]:
        return tuple(self._devices.values())

    @property
    def open(self) -> tuple[OpenRequest, ...]:
        return tuple(self._open.values())

    def add(self, event: Event, actions: Iterable[Action]) -> None:
        """Add one `handle` call."""
        submitted: dict[str, Request] = {}
        match event:
            case Submitted():
                submitted = {one.uid: one for one in event.requests}
            case Restored(request):
                submitted = {request.uid: request}
            case DeviceJoined(device_id, node, kind):
                self._devices[device_id] = LoggedDevice(device_id=device_id, node=node, kind=kind)
            case DeviceLost() | NodeLost():
                for device_id in event.device_ids:
                    self._devices.pop(device_id, None)
        for action in actions:
            match action:
                case Accept(job_id, uid, eta_ns):
                    accepted = action.accepted(submitted[uid])
                    self._open[job_id] = OpenRequest(job_id=job_id, eta_ns=eta_ns, request=accepted)
                case UseCache(job_id):
                    one = self._open[job_id]
                    cached = one.request.with_spare_cache
                    self._open[job_id] = OpenRequest(job_id=job_id, eta_ns=one.eta_ns, request=cached)
                case Finish(job_id):
                    self._open.pop(job_id, None)
