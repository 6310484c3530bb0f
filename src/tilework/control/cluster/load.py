"""What the jobs in the system will take, all together and by tenant, kept as they come, go on and leave."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.control.cluster.job import Job
from tilework.core.interfaces import Demand, Held
from tilework.core.request import Request


@dataclass(slots=True)
class _Line:
    """Jobs of one tenant and weight that go by their arrivals: all without a deadline, or all that were dropped to best
    effort.

    `until_ns` is the arrival and the delay of the last of them together.
    """

    num_jobs: int = 0
    device_ns: int = 0
    until_ns: int = 0


@dataclass(slots=True)
class _Holding:
    """What one tenant has in the system; `lines` are by weight and by whether its jobs were dropped."""

    weight: float
    num_jobs: int = 0
    device_ns: int = 0
    lines: dict[tuple[float, bool], _Line] = field(default_factory=dict)


class Load:
    """Sums of what is left of jobs, as their demands say.

    *Fair delay.* A job that goes by its arrival is served as if it had arrived later by the time that its tenant's own
    jobs before it take at the tenant's share of the devices: its weight among the tenants that have something in the
    system, and at most half, since another may come at any time. So the many of one tenant are spread over the time
    that they take, and the few of another go in between. The jobs of one line stay in order. As in Virtual Clock
    (Zhang, 1990) the share is that at the arrival; unlike there, it is what still waits that counts, so that a tenant
    that was served while no other came does not pay for it.
    """

    def __init__(self) -> None:
        self._num_jobs = 0
        self._device_ns = 0
        self._tenants: dict[str, _Holding] = {}

    def held(self, tenant: str | None) -> Held:
        if tenant is None:
            return Held(self._num_jobs, self._device_ns)
        holding = self._tenants.get(tenant)
        return Held(0, 0) if holding is None else Held(holding.num_jobs, holding.device_ns)

    def rivals_weight(self, tenant: str) -> float:
        return sum(holding.weight for name, holding in self._tenants.items() if name != tenant)

    def delay_ns(self, request: Request, dropped_to_best_effort: bool, num_devices: int) -> int:
        """The fair delay of a request that comes in now, or is dropped to best effort now."""
        holding = self._tenants.get(request.tenant)
        if holding is None or not (dropped_to_best_effort or request.deadline_ns is None):
            return 0
        lines = holding.lines
        device_ns = sum(
            line.device_ns
            for (weight, late), line in lines.items()
            if late == dropped_to_best_effort and weight >= request.weight
        )
        all_weights = request.tenant_weight + self.rivals_weight(request.tenant)
        delay_ns = int(device_ns * max(2.0, all_weights / request.tenant_weight) / max(1, num_devices))
        last = lines.get((request.weight, dropped_to_best_effort))
        if (
            last is None or dropped_to_best_effort
        ):  # Jobs are dropped in any order: the last one may have arrived long after this.
            return delay_ns
        return max(delay_ns, last.until_ns - request.arrival_ns)

    def enter(self, job: Job) -> None:
        """A job has come in, or goes by its arrival from now on: see `leave`."""
        request, device_ns = job.request, _device_ns(job.demand)
        holding = self._tenants.setdefault(request.tenant, _Holding(request.tenant_weight))
        holding.weight = request.tenant_weight
        holding.num_jobs += 1
        self._num_jobs += 1
        if (key := _line(job)) is not None:
            line = holding.lines.setdefault(key, _Line())
            line.num_jobs += 1
            line.until_ns = max(line.until_ns, request.arrival_ns + job.delay_ns)
        self._add(job, device_ns)

    def change(self, job: Job, demand: Demand) -> None:
        """What is left of a job is going to be this."""
        self._add(job, _device_ns(demand) - _device_ns(job.demand))

    def leave(self, job: Job) -> None:
        """A job has come to its end, or will be dropped, whereupon it enters again."""
        self._add(job, -_device_ns(job.demand))
        self._num_jobs -= 1
        holding = self._tenants[job.request.tenant]
        holding.num_jobs -= 1
        if (key := _line(job)) is not None:
            line = holding.lines[key]
            line.num_jobs -= 1
            if not line.num_jobs:
                del holding.lines[key]
        if not holding.num_jobs:
            del self._tenants[job.request.tenant]

    def _add(self, job: Job, device_ns: int) -> None:
        holding = self._tenants[job.request.tenant]
        self._device_ns += device_ns
        holding.device_ns += device_ns
        if (key := _line(job)) is not None:
            holding.lines[key].device_ns += device_ns


def _line(job: Job) -> tuple[float, bool] | None:
    """The line of a job; None while it goes by its deadline."""
    return (
        None
        if job.request.deadline_ns is not None and not job.dropped_to_best_effort
        else (job.request.weight, job.dropped_to_best_effort)
    )


def _device_ns(demand: Demand) -> int:
    return demand.width * demand.run_ns
