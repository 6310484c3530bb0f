"""The devices and jobs of one node at one time, with a forecast of each job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from tilework.core.graph.stage import Stage
from tilework.core.policy import DeviceView, JobView
from tilework.core.request import Request
from tilework.core.time import START_MARGINS, Margins
from tilework.core.work import NO_JOB, Group, Work
from tilework.cost.demand import Speed
from tilework.policy.lookahead.arrivals import DueArrivals, TightClasses
from tilework.policy.lookahead.forecast import Claim, JobForecast
from tilework.policy.toolkit.order import drop_reason

ONE_DEVICE = Speed(1, 0)
CHUNKS = 2  # Committed to a group at a time, so that it does not wait for the controller.
_LIKELY = 2.0
"""Mean time between two arrivals, in times of a job, up to which an arrival is likely while the job runs."""
_DELAYED_PER_JOB = 4.0
"""Number of jobs that are delayed for each that is here: three come before the devices are idle if the load is 75%."""
StepTime = Callable[[Stage, Sequence[Request]], float]
"""The time of requests in a stage together on one device, of a step if it has steps; inf if they do not fit into its
memory, or the stage cannot be shared by them."""
LoadTime = Callable[[JobView, DeviceView], int]
"""Time that a device would load before it can run the remaining work of a job."""


@dataclass(slots=True)
class NodeJobs:
    """The devices of a node, and the jobs that it serves or may serve, in any order.

    `tight` says how often requests come that cannot wait; None: none matter here. `leaving` are jobs that are to
    stop here and continue on another node. `due_arrivals` are kept from plan to plan. `load_ns` is None where every
    device has all components. `margins` are those of promises.
    """

    devices: Sequence[DeviceView]
    now_ns: int
    chunk_ns: int
    step_time: StepTime
    tight: TightClasses | None = None
    due_arrivals: DueArrivals = field(default_factory=DueArrivals)
    jobs: dict[int, JobView] = field(default_factory=dict)
    forecasts: list[JobForecast] = field(default_factory=list)
    leaving: set[int] = field(default_factory=set)
    load_ns: LoadTime | None = None
    margins: Margins = START_MARGINS

    def add(self, job: JobView, forecast: JobForecast) -> None:
        self.jobs[job.job_id] = job
        self.forecasts.append(forecast)

    def drop(self, job_id: int) -> bool:
        """Forget a job that another node serves; returns whether it was here."""
        if self.jobs.pop(job_id, None) is None:
            return False
        self.forecasts = [forecast for forecast in self.forecasts if forecast.job_id != job_id]
        return True

    def hold_late(self) -> float:
        """Hold late jobs back where a request that can be on time is likely to come while they run.

        A step of theirs could make it late. Held are jobs that take more than half the mean time between two such
        requests: while one is here, and after that until as much time has passed since the last one came as the job
        takes. So a cheap job is served at once, and one that would take the devices for long waits for a gap between
        arrivals. Returns when the first late job is held no longer, if nothing happens; inf without any.

        Where devices lack components, none is held: what is loaded for a late request is there for the next ones of its
        pipeline, which would be late for the same load.
        """
        due = [forecast for forecast in self.forecasts if forecast.claim in (Claim.FEASIBLE, Claim.DEFERRED)]
        self.due_arrivals.add(forecast.arrival_ns for forecast in due)
        last_ns, gap_ns = self.due_arrivals.last_ns, self.due_arrivals.gap_ns
        first_ns = inf
        for forecast in self.forecasts:
            if forecast.claim >= Claim.LATE:
                until_ns = inf if due else last_ns + forecast.usual_ns
                is_likely = gap_ns < _LIKELY * forecast.usual_ns and self.load_ns is None
                is_held = is_likely and self.now_ns < until_ns
                forecast.claim = Claim.HELD if is_held else Claim.LATE
                first_ns = min(first_ns, until_ns) if is_held else first_ns
        return first_ns

    def await_devices(self) -> None:
        """Let jobs wait for a busy device that has their components, if they begin to run there before an idle one has
        loaded these: they end sooner, and no device is taken for the load.

        Jobs that wait for the same device follow each other by deadline, each after the one before has run.
        """
        if self.load_ns is None or not any(map(is_idle, self.devices)):
            return
        busy = [device for device in self.devices if not is_idle(device)]
        ends_ns = {device.device_id: self._end_of_jobs_ns(device) for device in busy}
        for forecast in sorted(self.forecasts, key=JobForecast.place) if busy else ():
            if forecast.claim is Claim.FEASIBLE and forecast.spared_ns > 0:
                job = self.jobs[forecast.job_id]
                begins_ns = [(ends_ns[one.device_id] + self.load_ns(job, one), one.device_id) for one in busy]
                begin_ns, device_id = min(begins_ns)
                if begin_ns < self.now_ns + forecast.load_ns:
                    forecast.claim = Claim.AWAITING
                    ends_ns[device_id] = begin_ns + forecast.usual_ns - forecast.load_ns

    def _end_of_jobs_ns(self, device: DeviceView) -> float:
        """Return when the jobs that run on a device will have ended there, if nothing else gets it."""
        here = {job_id for work in device.works for job_id in work.job_ids}
        runs_ns = [forecast.run_ns for forecast in self.forecasts if forecast.job_id in here]
        return max(float(device.free_ns), self.now_ns + max(runs_ns, default=0.0))

    def share_devices(self) -> None:
        """Narrow the usual degree of the jobs without a deadline while there are many.

        A doubling of the devices of a job ends it sooner, and delays all that come after it by the device time that it
        costs. It pays as long as the job gains more than the others lose: those that are here, and those that come
        before the devices are idle.
        """
        jobs = [forecast for forecast in self.forecasts if forecast.claim is Claim.BEST_EFFORT]
        num_delayed = len(jobs) * _DELAYED_PER_JOB / len(self.devices)
        for forecast in jobs:
            speeds = forecast.speeds
            level = 0
            while level < forecast.usual:
                narrow, wide = speeds[level], speeds[level + 1]
                if narrow.step_ns - wide.step_ns <= num_delayed * (wide.device_ns - narrow.device_ns):
                    break
                level += 1
            forecast.usual = level

    def leave_room(self, forecasts: Iterable[JobForecast]) -> None:
        """Set how long steps of a job may be that keep the last free device.

        A request with less slack than that is late if it comes during such a step. It is left a device if one is
        likely to come while as many jobs run, one after the other, as there are devices: the more there are, the less
        one of them costs. A job that fits on no fewer than all devices leaves none, or it would never begin.
        """
        if self.tight is None or len(self.devices) == 1:
            return
        least_slack_ns = self.tight.least_slack_ns
        num_devices = len(self.devices)
        frequencies: tuple[tuple[int, float], ...] = ()
        for forecast in forecasts:
            narrowest = forecast.speeds[0]
            if narrowest.step_ns > least_slack_ns and narrowest.degree < num_devices:
                too_often = 1.0 / max(1.0, _LIKELY * num_devices * forecast.usual_ns)
                frequencies = frequencies or self.tight.frequencies(self.now_ns)
                forecast.least_slack_ns = next((slack for slack, often in frequencies if often >= too_often), inf)

    def ready_ns(self, job: JobView) -> int:
        """Return when the works of a job have ended; now if it has none."""
        if not job.works:
            return self.now_ns
        return max(self.now_ns, self.end_ns(job.works[-1]))

    def end_ns(self, work: Work) -> int:
        """Return when a work is predicted to end."""
        return max([device.end_ns(work) for device in self.devices if device.device_id in work.devices], default=0)

    def unreachable(self) -> list[tuple[int, str]]:
        """Return the jobs that are late even if they run at the widest degree from now on, with the reason."""
        found = [
            (
                forecast,
                drop_reason(self.jobs[forecast.job_id], self.now_ns + int(forecast.least_ns - forecast.spared_ns)),
            )
            for forecast in self.forecasts
        ]
        return [(forecast.job_id, why) for forecast, why in found if why is not None]

    def deferred(self) -> list[tuple[JobView, JobForecast]]:
        """Return the jobs that are deferred here but may still move to another node."""
        pairs = [
            (self.jobs[forecast.job_id], forecast)
            for forecast in self.forecasts
            if forecast.claim is Claim.DEFERRED and not forecast.is_rationed
        ]
        return [(job, forecast) for job, forecast in pairs if not job.works or job.may_stop]

    def jobs_on(self, device: DeviceView) -> list[JobView]:
        """Return the jobs that works of a device belong to, in order.

        A job that was left out of a work may run elsewhere.
        """
        found = {
            job_id: job
            for work in device.works
            for job_id in work.job_ids
            if (job := self.jobs.get(job_id)) is not None and work in job.works
        }
        return list(found.values())

    def pinned(self) -> Iterator[JobForecast]:
        """Yield forecasts for devices that run no job of this plan: they stay as they are."""
        for device in self.devices:
            if not self.jobs_on(device) and not is_idle(device):
                yield self.busy(device)

    def busy(self, device: DeviceView) -> JobForecast:
        """Return a forecast for a device that is taken until its committed works have ended."""
        head_ns = float(device.free_ns - self.now_ns)
        return JobForecast(
            job_id=NO_JOB,
            claim=Claim.PINNED,
            order_key=0.0,
            speeds=(ONE_DEVICE,),
            usual=0,
            num_steps=0.0,
            head_ns=head_ns,
            tail_ns=0.0,
        )


def is_idle(device: DeviceView) -> bool:
    """Return whether a device has no works.

    What it may load ahead of need is paused for a work that does not need it.
    """
    return not device.works


def num_chunks(job: JobView) -> int:
    """Return the number of chunks of steps that are committed and have not ended."""
    return sum(work.stage.has_steps for work in job.works)


def group_of(job: JobView) -> Group:
    """Return the devices on which a job's latest steps run.

    Earlier ones may be on a group that has lost a device since.
    """
    stepped = [work.devices for work in job.works if work.stage.has_steps]
    return stepped[-1] if stepped else job.works[-1].devices
