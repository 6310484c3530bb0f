"""The predicted end of a job: the jobs before it and then the job itself take the devices that are free first."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.admission.list_schedule import FreeTimes, free_after, place
from tilework.admission.what_if import ready_ns
from tilework.core.interfaces import Backlog, Demand, JobView, Policy
from tilework.core.pools import Pools, Within
from tilework.core.request import Request
from tilework.policy.toolkit.pools import serving


def free_before(request: Request, policy: Policy, pools: Pools, backlog: Backlog) -> list[FreeTimes]:
    """When devices are free after the jobs that the policy serves before a new request, ascending.

    Apart for each part of the devices that serve the request (`Pools.parts`).
    """
    urgency_ns = policy.urgency_ns(request, False, backlog.delay_ns(request))
    return _free_after(request, urgency_ns, None, pools, backlog)


def end_after(free_ns: Sequence[FreeTimes], block: Demand, ready_ns: int = 0) -> int:
    """The end of a block on the part of the devices where it ends first; they stay as they are."""
    return min([place(list(part), block, ready_ns) for part in free_ns])


def end_of(job: JobView, pools: Pools, backlog: Backlog, now_ns: int) -> int:
    """When an accepted job is predicted to end, without correction."""
    if not serving(backlog.devices, pools.within(job.request.pipeline)):
        return now_ns + job.demand.run_ns
    up = {device.device_id: device for device in (*backlog.devices, *backlog.slots)}
    begin_ns = max(now_ns, ready_ns(job, up))
    if job.committed.stage is None:
        return begin_ns
    return end_after(_free_after(job.request, job.urgency_ns, job.job_id, pools, backlog), job.demand, begin_ns)


def _free_after(
    request: Request, urgency_ns: int, job_id: int | None, pools: Pools, backlog: Backlog
) -> list[FreeTimes]:
    parts = pools.parts(request.pipeline, [device.device_id for device in backlog.devices])
    return [_free_in(part, urgency_ns, job_id, backlog) for part in parts]


def _free_in(part: Within, urgency_ns: int, job_id: int | None, backlog: Backlog) -> FreeTimes:
    free_ns = [device.free_ns for device in serving(backlog.devices, part)]
    running = backlog.running_ahead(urgency_ns, job_id, part)
    return free_after(free_ns, running, backlog.waiting_ahead(urgency_ns, job_id, part))
