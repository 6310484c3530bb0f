"""The predicted end of a job: the jobs before it and then the job itself take the devices that are free first."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.admission.contract import Backlog, Moment
from tilework.admission.free_after import FreeAfterAhead, FreeAfterRunning
from tilework.admission.what_if import ready_ns
from tilework.core.block import Demand
from tilework.core.policy import DeviceView, JobView, Policy
from tilework.core.pools import Pools, Within
from tilework.core.request import Request


class Eta:
    """Predicts ends. Results that do not depend on the request are kept until something changes."""

    def __init__(self) -> None:
        self._moment: Moment | None = None
        self._after_running: dict[Within, FreeAfterRunning] = {}
        self._divided: tuple[Sequence[DeviceView], Pools] | None = None
        self._parts: dict[str, list[Within]] = {}

    def free_before(self, request: Request, policy: Policy, pools: Pools, backlog: Backlog) -> list[FreeAfterAhead]:
        """Return when devices are free after the jobs that the policy serves before a new request.

        One result for each part of the devices that serve the request (`Pools.parts`).
        """
        # A new request comes after the jobs of the same urgency.
        urgency_ns = policy.urgency_ns(request, False, backlog.delay_ns(request))
        return self._free_after(request, urgency_ns, None, pools, backlog)

    def end_of(self, job: JobView, pools: Pools, backlog: Backlog, now_ns: int) -> int:
        """Return when an accepted job is predicted to end, without correction."""
        if not serving(backlog.devices, pools.within(job.request.pipeline)):
            return now_ns + job.demand.run_ns
        up = {device.device_id: device for device in (*backlog.devices, *backlog.slots)}
        begin_ns = max(now_ns, ready_ns(job, up))
        if job.committed.stage is None:
            return begin_ns
        return end_after(
            self._free_after(job.request, job.urgency_ns, job.job_id, pools, backlog), job.demand, begin_ns
        )

    def forget(self, pipeline: str) -> None:
        """Drop all that is kept for a pipeline."""
        self._parts.pop(pipeline, None)

    def _free_after(
        self, request: Request, urgency_ns: int, job_id: int | None, pools: Pools, backlog: Backlog
    ) -> list[FreeAfterAhead]:
        if self._moment != backlog.moment:
            self._moment = backlog.moment
            self._after_running.clear()
        key = (urgency_ns + 1, -1) if job_id is None else (urgency_ns, job_id)
        return [
            FreeAfterAhead(
                self._after_running_on(part, backlog).before(key), backlog.waiting_ahead(urgency_ns, job_id, part)
            )
            for part in self._parts_of(request, pools, backlog)
        ]

    def _after_running_on(self, part: Within, backlog: Backlog) -> FreeAfterRunning:
        known = self._after_running.get(part)
        if known is None:
            known = self._after_running[part] = FreeAfterRunning(backlog.free_ns(part), backlog.running(part))
        return known

    def _parts_of(self, request: Request, pools: Pools, backlog: Backlog) -> list[Within]:
        devices = backlog.devices
        if self._divided is None or self._divided[0] is not devices or self._divided[1] is not pools:
            self._divided = devices, pools
            self._parts.clear()
        parts = self._parts.get(request.pipeline)
        if parts is None:
            device_ids = [device.device_id for device in devices]
            parts = self._parts[request.pipeline] = pools.parts(request.pipeline, device_ids)
        return parts


def end_after(parts: Sequence[FreeAfterAhead], block: Demand, ready_ns: int = 0) -> int:
    """Return the end of a block on the part of the devices where it ends first."""
    return min([part.end_ns(block, ready_ns) for part in parts])


def serving(devices: Sequence[DeviceView], within: Within) -> Sequence[DeviceView]:
    """Return those of these devices that are `within`."""
    return devices if within is None else [device for device in devices if device.device_id in within]
