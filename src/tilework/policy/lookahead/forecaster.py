"""Makes forecasts: the remaining work of each job on a node, works in flight included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from tilework.core.policy import CostModel, DeviceView, JobView
from tilework.core.work import Work
from tilework.policy.lookahead.forecast import Claim, JobForecast
from tilework.policy.lookahead.node_jobs import NodeJobs, is_idle
from tilework.policy.lookahead.request_costs import RequestCosts

_ROUNDING = 1e-6


@dataclass(slots=True)
class Forecaster:
    """Makes forecasts at one time.

    `by_tenant`: jobs of several tenants wait. `grace_ns` is added to the time that each request without a deadline has
    waited: the shorter go first among those that have just come. `keeps`: whether each job is to be on time.
    """

    request_costs: RequestCosts
    costs: CostModel
    now_ns: int
    grace_ns: float = 0.0
    by_tenant: bool = False
    keeps: Mapping[int, bool] = field(default_factory=dict)

    def forecast(self, job: JobView, node: NodeJobs) -> JobForecast | None:
        """Return the forecast of a job on this node; None if no degree that the node can run was profiled.

        Raises UnknownCost.
        """
        left = job.left
        known = self.request_costs.of(job.request, left, len(node.devices), self.costs)
        speeds, usual, tail_factors = known.speeds, known.usual, known.tail_factors
        steps = last_steps(job) if job.works else None
        if steps is None and not left.num_steps_left:
            speeds, usual, tail_factors = known.tail.speeds, known.tail.usual, known.tail.factors
        elif not speeds:
            return None
        is_due = job.request.deadline_ns is not None and not job.dropped_to_best_effort
        forecast = JobForecast(
            job_id=job.job_id,
            claim=Claim.FEASIBLE,
            order_key=float(job.urgency_ns),
            due_ns=float(job.urgency_ns) if is_due else inf,
            speeds=speeds,
            usual=usual,
            num_steps=float(left.num_steps_left),
            head_ns=float(known.heads_ns[left.num_done]),
            tail_ns=float(known.tails_ns[left.num_done] if steps is None or left.num_steps_left else known.last_ns),
            tail_factors=tail_factors,
            weight=job.request.weight,
            shares=known.shares and job.may_share,
            arrival_ns=job.request.arrival_ns,
            is_promised=job.promised is not None,
        )
        if job.works:
            self._add_works(forecast, job, steps, node)
        elif node.load_ns is not None:
            self._add_loads(forecast, job, node)
        if not is_due:
            usual_claim = Claim.BEST_EFFORT if job.request.deadline_ns is None else Claim.LATE
            forecast.claim = Claim.OVERDUE if job.urgency_ns <= self.now_ns else usual_claim
        elif not self.keeps.get(job.job_id, True):
            forecast.claim = Claim.DEFERRED
            forecast.is_rationed = True
        if job.request.deadline_ns is None:
            forecast.order_key = -self._priority(job, forecast)
        return forecast

    def runs_to_its_end(self, job: JobView, device: DeviceView, num_devices: int) -> bool:
        """Return whether nothing is to be decided about a job with steps in flight that has this device to itself.

        All of its work is committed, it is on time, and no degree on a node of `num_devices` is faster.
        """
        is_due = job.request.deadline_ns is not None and not job.dropped_to_best_effort
        if job.left.stage is not None or job.is_stopping or not is_due or not self.keeps.get(job.job_id, True):
            return False
        known = self.request_costs.of(job.request, job.left, num_devices, self.costs)
        steps = last_steps(job)
        if steps is None or len(steps.devices) > 1 or len(known.speeds) != 1:
            return False
        if known.speeds[0].degree > 1 or not known.speeds[0].step_ns:
            return False
        return max(self.now_ns, device.end_ns(steps)) + known.last_ns <= job.urgency_ns

    def _add_loads(self, forecast: JobForecast, job: JobView, node: NodeJobs) -> None:
        """Add what a device loads before a job that waits: the idle one that loads least, or else the busy one."""
        assert node.load_ns is not None
        loads_ns = [(not is_idle(device), node.load_ns(job, device)) for device in node.devices]
        least_ns = min(load_ns for _, load_ns in loads_ns)
        forecast.load_ns = float(min([load_ns for is_busy, load_ns in loads_ns if not is_busy], default=least_ns))
        forecast.spared_ns = forecast.load_ns - least_ns
        forecast.head_ns += forecast.load_ns

    def _add_works(self, forecast: JobForecast, job: JobView, steps: Work | None, node: NodeJobs) -> None:
        """Add the works in flight: as steps at the current degree, or as waiting time if they cannot be continued."""
        speeds = forecast.speeds
        level = next((level for level, speed in enumerate(speeds) if steps and speed.degree == len(steps.devices)), -1)
        if steps is None or job.is_stopping or level < 0 or not speeds[level].step_ns:
            forecast.head_ns += node.ready_ns(job) - self.now_ns
            return
        step_ns = speeds[level].step_ns
        committed_ns = max(0, node.end_ns(steps) - self.now_ns)
        forecast.level = level
        if node.load_ns is not None and (loading_ns := committed_ns - _committed_steps(job) * step_ns) > step_ns:
            forecast.head_ns += loading_ns
            forecast.num_steps += _committed_steps(job)
            forecast.hold_ns = loading_ns
            return
        forecast.num_steps += committed_ns / step_ns
        if job.left.itinerary.num_stepped > 1:  # Then `step_ns` is the mean of several stages.
            step_ns = self.costs.work_ns(steps.stage, (job.request,), len(steps.devices))
        num_committed = committed_ns / step_ns
        forecast.hold_ns = (num_committed - int(num_committed + _ROUNDING)) * step_ns

    def _priority(self, job: JobView, forecast: JobForecast) -> float:
        """Return the priority of a job without a deadline: its waiting time squared, over its remaining device time.

        So short jobs go first, but a job that has waited long goes before those that have not, and one that is nearly
        done is not paused for long between two chunks. Where several tenants wait, the waiting time counts from when
        the request would have arrived if each tenant kept to its share. Until then the priority is negative, below that
        of all other requests.
        """
        waited_ns = self.now_ns - job.request.arrival_ns - (job.delay_ns if self.by_tenant else 0) + self.grace_ns
        if waited_ns <= 0:
            return waited_ns
        return forecast.weight * waited_ns**2 / max(1.0, forecast.least_device_ns)

    def moved(
        self, job: JobView, forecast: JobForecast, origin: int | None, devices: Sequence[DeviceView]
    ) -> JobForecast | None:
        """Return the forecast of a running job after its current step and a move from `origin`, which has its state.

        The devices are those of another node; None: no node has it.
        """
        known = self.request_costs.of(job.request, job.left, len(devices), self.costs)
        if not known.speeds:
            return None
        nodes = None if origin is None else (origin, devices[0].node)
        move_ns = 0 if nodes is None else self.costs.move_ns(job.request, job.committed, nodes)
        return replace(
            forecast,
            claim=Claim.FEASIBLE,
            speeds=known.speeds,
            tail_factors=known.tail_factors,
            usual=known.usual,
            num_steps=float(int(forecast.num_steps + _ROUNDING)),
            head_ns=forecast.head_ns + forecast.hold_ns + move_ns,
            level=-1,
            hold_ns=0.0,
        )

    def width(self, job: JobView, max_degree: int) -> int:
        """Return the fewest devices with which a job is on time from now on, or else its usual number."""
        known = self.request_costs.of(job.request, job.left, max_degree, self.costs)
        if not known.speeds:
            return 1
        if job.request.deadline_ns is not None and not job.dropped_to_best_effort:
            budget_ns = job.request.deadline_ns - self.now_ns - known.rest_ns
            for speed in known.speeds:
                if job.left.num_steps_left * speed.step_ns <= budget_ns:
                    return speed.degree
        return known.speeds[known.usual].degree


def _committed_steps(job: JobView) -> int:
    """Return the steps of the works of a job that have not ended; those that a running work has made count, too."""
    return sum(work.num_steps for work in job.works if work.stage.has_steps)


def last_steps(job: JobView) -> Work | None:
    """Return the last of a job's works that runs steps."""
    return next((work for work in reversed(job.works) if work.stage.has_steps), None)
