"""The remaining device time of all jobs and of each tenant's, updated as jobs enter, change and leave."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.admission.contract import Held
from tilework.control.cluster.job import Job
from tilework.core.block import Demand
from tilework.core.request import Request


@dataclass(slots=True)
class _Line:
    """Jobs of one tenant and weight in order of arrival: all without deadline, or all dropped to best effort.

    `until_ns` is the arrival plus the delay of the last of them.
    """

    num_jobs: int = 0
    device_ns: int = 0
    until_ns: int = 0


@dataclass(slots=True)
class _TenantLoad:
    """The jobs of one tenant; `lines` are by weight and by whether the jobs were dropped to best effort."""

    weight: float
    num_jobs: int = 0
    device_ns: int = 0
    lines: dict[tuple[float, bool], _Line] = field(default_factory=dict)


class Load:
    """Sums of the remaining work of jobs.

    *Fair delay.* A job that is ordered by arrival is served as if it had arrived later, by the time that its tenant's
    earlier jobs take at the tenant's share of the devices. That share is the tenant's weight among the tenants that
    have jobs, and at most half, since another tenant may arrive at any time. So the many jobs of one tenant are spread
    over the time that they take, and the few jobs of another are served in between. The jobs of one line stay in order.
    As in Virtual Clock (Zhang, 1990) the share is that at the arrival. Unlike there, only jobs that still wait count,
    so a tenant that was served while no other had jobs is not charged for it.
    """

    def __init__(self) -> None:
        self._num_jobs = 0
        self._device_ns = 0
        self._tenants: dict[str, _TenantLoad] = {}

    def held(self, tenant: str | None) -> Held:
        if tenant is None:
            return Held(self._num_jobs, self._device_ns)
        tenant_load = self._tenants.get(tenant)
        return Held(0, 0) if tenant_load is None else Held(tenant_load.num_jobs, tenant_load.device_ns)

    def rivals_weight(self, tenant: str) -> float:
        return sum(tenant_load.weight for name, tenant_load in self._tenants.items() if name != tenant)

    def delay_ns(self, request: Request, dropped_to_best_effort: bool, num_devices: int) -> int:
        """Return the fair delay of a request that is accepted now, or is dropped to best effort now."""
        tenant_load = self._tenants.get(request.tenant)
        if tenant_load is None or not (dropped_to_best_effort or request.deadline_ns is None):
            return 0
        lines = tenant_load.lines
        device_ns = sum(
            line.device_ns
            for (weight, late), line in lines.items()
            if late == dropped_to_best_effort and weight >= request.weight
        )
        all_weights = request.tenant_weight + self.rivals_weight(request.tenant)
        delay_ns = int(device_ns * max(2.0, all_weights / request.tenant_weight) / max(1, num_devices))
        last = lines.get((request.weight, dropped_to_best_effort))
        # Jobs are dropped in any order: the last dropped job may have arrived long after this one.
        if last is None or dropped_to_best_effort:
            return delay_ns
        return max(delay_ns, last.until_ns - request.arrival_ns)

    def enter(self, job: Job) -> None:
        """Count a job that is new, or that was dropped to best effort and left its former line before (`leave`)."""
        request = job.request
        device_ns = job.demand.device_ns
        tenant_load = self._tenants.setdefault(request.tenant, _TenantLoad(request.tenant_weight))
        tenant_load.weight = request.tenant_weight
        tenant_load.num_jobs += 1
        self._num_jobs += 1
        if (key := _line(job)) is not None:
            line = tenant_load.lines.setdefault(key, _Line())
            line.num_jobs += 1
            line.until_ns = max(line.until_ns, request.arrival_ns + job.delay_ns)
        self._add(job, device_ns)

    def change(self, job: Job, demand: Demand) -> None:
        """Change the remaining work of a job from `job.demand` to `demand`."""
        self._add(job, demand.device_ns - job.demand.device_ns)

    def leave(self, job: Job) -> None:
        """Stop counting a job that has ended, or that enters again because it is dropped to best effort."""
        self._add(job, -job.demand.device_ns)
        self._num_jobs -= 1
        tenant_load = self._tenants[job.request.tenant]
        tenant_load.num_jobs -= 1
        if (key := _line(job)) is not None:
            line = tenant_load.lines[key]
            line.num_jobs -= 1
            if not line.num_jobs:
                del tenant_load.lines[key]
        if not tenant_load.num_jobs:
            del self._tenants[job.request.tenant]

    def _add(self, job: Job, device_ns: int) -> None:
        tenant_load = self._tenants[job.request.tenant]
        self._device_ns += device_ns
        tenant_load.device_ns += device_ns
        if (key := _line(job)) is not None:
            tenant_load.lines[key].device_ns += device_ns


def _line(job: Job) -> tuple[float, bool] | None:
    """Return the key of a job's line; None while the job is ordered by its deadline."""
    return (
        None
        if job.request.deadline_ns is not None and not job.dropped_to_best_effort
        else (job.request.weight, job.dropped_to_best_effort)
    )
