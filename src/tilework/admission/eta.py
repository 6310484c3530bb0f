"""The predicted end of a job: the jobs before it and then the job itself take the devices that are free first."""

from __future__ import annotations

from tilework.admission.list_schedule import FreeTimes, free_after, place
from tilework.admission.what_if import ready_ns
from tilework.core.interfaces import Backlog, JobView, Policy
from tilework.core.request import Request


def free_before(request: Request, policy: Policy, backlog: Backlog) -> FreeTimes:
    """When devices are free after the jobs that the policy serves before a new request, ascending."""
    urgency_ns = policy.urgency_ns(request, False, backlog.delay_ns(request))
    free_ns = [device.free_ns for device in backlog.devices]
    return free_after(free_ns, backlog.running_ahead(urgency_ns), backlog.waiting_ahead(urgency_ns))


def end_of(job: JobView, backlog: Backlog, now_ns: int) -> int:
    """When an accepted job is predicted to end, without correction."""
    if not backlog.devices:
        return now_ns + job.demand.run_ns
    up = {device.device_id: device for device in (*backlog.devices, *backlog.slots)}
    begin_ns = max(now_ns, ready_ns(job, up))
    if job.committed.stage is None:
        return begin_ns
    free_ns = [device.free_ns for device in backlog.devices]
    running = backlog.running_ahead(job.urgency_ns, job.job_id)
    return place(free_after(free_ns, running, backlog.waiting_ahead(job.urgency_ns, job.job_id)), job.demand, begin_ns)
