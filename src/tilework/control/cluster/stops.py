"""Predicted ends of works that are told to stop: the time and the step of their next step boundary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tilework.control.cluster.device import Device, Now
from tilework.control.cluster.device_set import DeviceSet
from tilework.core.policy import CostModel
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import Work

_BEGUN_NS = NS_PER_MS // 1000
"""Time within which a step's end counts as past, and the next step as begun: durations are rounded."""


class StoppedEnd(NamedTuple):
    """The number of its steps that a work will have made, and the time at which it ends."""

    num_done: int
    end_ns: int


class Stops:
    """Predicts the ends of works that are told to stop now."""

    def __init__(self, costs: CostModel, devices: DeviceSet, now: Now) -> None:
        self._costs = costs
        self._devices = devices
        self._now = now

    def ends_of(self, works: Sequence[Work], requests_of: Callable[[Work], Sequence[Request]]) -> dict[int, StoppedEnd]:
        """Return the end of each of these works, given in order, by its id. A work of ended jobs has no requests.

        A stage without steps runs to its end, and so does a running step, also one that begins just now. A work that
        has not begun, or that waits for a load, is revoked: it ends when the last of its devices has reached it.
        """
        ends: dict[int, StoppedEnd] = {}
        for work in works:
            carriers = [self._devices.by_id[one] for one in work.devices if self._devices.carries(one, work)]
            if any(device.works[0] is not work for device in carriers):
                ends[work.work_id] = StoppedEnd(0, max(self._turn_ns(device, work, ends) for device in carriers))
            else:
                ends[work.work_id] = self._end_of_running(work, requests_of(work), carriers)
        return ends

    def shorten(self, work: Work, ends: Mapping[int, StoppedEnd]) -> None:
        """Lower the predicted end of a work on its devices to this one."""
        for device_id in work.devices:
            if (device := self._devices.by_id.get(device_id)) is not None and device.has(work):
                device.shorten(work, max(0, ends[work.work_id].end_ns - self._turn_ns(device, work, ends)))

    def _turn_ns(self, device: Device, work: Work, ends: Mapping[int, StoppedEnd]) -> int:
        """Return when a device reaches a work: it has ended the work before, and the loads that this one waits for."""
        before = device.before(work)
        if before is None:
            return self._now.ns
        known = ends.get(before.work_id)
        return (device.end_ns(before) if known is None else known.end_ns) + device.load_ns(work.work_id)

    def _end_of_running(self, work: Work, requests: Sequence[Request], carriers: Sequence[Device]) -> StoppedEnd:
        end_ns = max(self._now.ns, self._devices.end_ns(work))
        step_ns = self._costs.work_ns(work.stage, requests, len(work.devices)) if requests else 0
        if any(device.waits_for_load(work.work_id) for device in carriers):
            after_loads_ns = end_ns - step_ns * work.num_steps  # The steps are still to be done.
            return StoppedEnd(0, max(self._now.ns, after_loads_ns))
        if not step_ns or not work.stage.has_steps:
            return StoppedEnd(work.num_steps, end_ns)
        num_after, running_ns = divmod(end_ns - self._now.ns, step_ns)
        if running_ns <= _BEGUN_NS and num_after:
            num_after, running_ns = num_after - 1, running_ns + step_ns
        return StoppedEnd(max(0, work.num_steps - num_after), self._now.ns + running_ns)
