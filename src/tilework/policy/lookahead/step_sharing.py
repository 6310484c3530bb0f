"""Decides which jobs of a node share forward passes: running batches, and waiting jobs that may join one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from tilework.core.policy import DeviceView, JobView
from tilework.policy.lookahead.batch import LEAST_SAVED, Batch, BatchMember
from tilework.policy.lookahead.forecast import Claim, JobForecast
from tilework.policy.lookahead.node_jobs import CHUNKS, NodeJobs, group_of, num_chunks
from tilework.policy.lookahead.rollout import Pause, RolloutResult, ends_ahead, next_pause, simulate_ahead

_MOST_TRIED = 6  # Jobs that could join a batch, and batches that a job could join.


@dataclass(slots=True)
class ServiceOrder:
    """An order of service with the result of its rollout, which is made when it is first asked for.

    `served` are the forecasts of all jobs, a batch as one; `order` are these and pinned devices, in order of service.
    """

    served: list[JobForecast]
    order: list[JobForecast]
    num_devices: int
    now_ns: int
    _begin: Pause | None = None  # A moment of its rollout that is known.
    _result: RolloutResult | None = None

    @property
    def result(self) -> RolloutResult:
        if self._result is None:
            self._result = simulate_ahead(self.order, self.num_devices, self.now_ns, self._begin)
        return self._result

    @property
    def has_late(self) -> bool:
        """True if a job is late."""
        is_safe = self._begin is not None and self._begin.is_safe
        return not is_safe and self._pause() is None and self.result.late is not None

    def with_last(self, forecast: JobForecast) -> ServiceOrder:
        """Return the order with one more feasible job, which comes last. No job is late in this one.

        If one is late in the new one, its result says no more than that.
        """
        pause = self._pause()
        begin = None if pause is None else pause.with_last(forecast, len(self.order))
        return ServiceOrder([*self.served, forecast], [*self.order, forecast], self.num_devices, self.now_ns, begin)

    def _pause(self) -> Pause | None:
        """Return a moment from which a rollout with one more job can go on; None if there is none."""
        if self._begin is not None and self._begin.num_spare:
            return self._begin
        found = next_pause(self.order, self.num_devices, self.now_ns, self._begin)
        if isinstance(found, RolloutResult):
            self._result = found
            return None
        self._begin = found
        return found

    @property
    def first_late_ns(self) -> float:
        """The deadline of the first job that is late; inf if none is."""
        return inf if self.result.late is None else self.order[self.result.late].due_ns

    def ends_ns(self) -> dict[JobForecast, float]:
        """Return when each forecast ends if no other request comes."""
        ends_ns = ends_ahead(self.order, self.num_devices, self.now_ns)
        return {self.order[index]: end_ns for index, end_ns in ends_ns.items()}

    def degree_of(self, forecast: JobForecast) -> int:
        return self.result.degrees[self.order.index(forecast)]


@dataclass(slots=True)
class StepSharing:
    """The batches of a node, each by the forecast that stands for it in rollouts."""

    node: NodeJobs
    batches: dict[JobForecast, Batch] = field(default_factory=dict)
    _pinned: list[JobForecast] = field(default_factory=list)
    _num_behind: float = 0.0  # Jobs that wait, for each device.

    def simulate(self, served: list[JobForecast]) -> ServiceOrder:
        return self._simulated(served, self._in_order(served))

    def reordered(self, chosen: ServiceOrder) -> ServiceOrder:
        """Return the order of service after a change of order keys alone; the same order keeps its rollout."""
        order = self._in_order(chosen.served)
        return chosen if order == chosen.order else self._simulated(chosen.served, order)

    def _in_order(self, served: Sequence[JobForecast]) -> list[JobForecast]:
        return sorted([*self._pinned, *served], key=JobForecast.place)

    def _simulated(self, served: list[JobForecast], order: list[JobForecast]) -> ServiceOrder:
        return ServiceOrder(served, order, len(self.node.devices), self.node.now_ns)

    def with_job(self, chosen: ServiceOrder, forecast: JobForecast) -> ServiceOrder:
        """Return the order of service with one more job."""
        is_last = not chosen.order or chosen.order[-1].place() < forecast.place()
        if is_last and forecast.claim is Claim.FEASIBLE:
            return chosen.with_last(forecast)
        return self.simulate([*chosen.served, forecast])

    # Batches that run.

    def gather(self) -> list[JobForecast]:
        """Return the forecasts of all jobs; those that share a device are one, but for members that make others late.

        Such a member ends its committed works and then continues elsewhere.
        """
        node = self.node
        self.batches = {}
        self._pinned = list(node.pinned())
        self._num_behind = sum(not job.works for job in node.jobs.values()) / len(node.devices)
        gathered: set[int] = set()
        served: list[JobForecast] = []
        batches: list[Batch] = []
        by_id = {forecast.job_id: forecast for forecast in node.forecasts}
        for device in node.devices:
            if _serves_one(device):
                continue
            here = [job for job in node.jobs_on(device) if job.job_id in by_id]
            if not _is_shared(device, here, by_id):
                continue
            staying = [job for job in here if not job.is_stopping]
            gathered.update(job.job_id for job in staying)
            margin = node.margins.guard
            staged = [job for job in staying if job.left.stage is not None]
            members = [BatchMember.of(job, by_id[job.job_id], margin, node.now_ns) for job in staged]
            whole = Batch(tuple(members), device.free_ns, node.step_time, self._num_behind)
            batch = _without_unfit(whole).trimmed()
            if batch.members:
                batches.append(batch)
            else:
                served.append(node.busy(device))
            kept = {member.job.job_id for member in batch.members}
            for member in whole.members:
                if member.job.job_id not in kept:
                    served.append(self._left_out(member, device))
        served += (forecast for forecast in node.forecasts if forecast.job_id not in gathered)
        may_split = len(served) + len(batches) < len(node.devices)
        return served + [self._forecast(batch, may_split) for batch in batches]

    def _left_out(self, member: BatchMember, device: DeviceView) -> JobForecast:
        head_ns = device.free_ns - self.node.now_ns + member.head_ns
        return replace(member.forecast, head_ns=head_ns, level=-1, hold_ns=0.0, num_steps=member.num_steps)

    def _member(self, job: JobView, forecast: JobForecast) -> BatchMember:
        return BatchMember.of(job, forecast, self.node.margins.admission, self.node.now_ns)

    def _forecast(self, batch: Batch, may_split: bool = False) -> JobForecast:
        forecast = batch.as_forecast(self.node.now_ns, may_split)
        self.batches[forecast] = batch
        return forecast

    # Jobs that may join.

    def may_join(self, forecast: JobForecast, claim: Claim) -> bool:
        """Return whether a job has this claim, waits, and may save time in a batch."""
        if not forecast.shares or forecast.claim is not claim or forecast in self.batches:
            return False
        job = self.node.jobs.get(forecast.job_id)
        return job is not None and not job.works and bool(job.left.num_steps_left)

    def awaits_steps(self, forecast: JobForecast) -> bool:
        """Return whether its next steps are to be committed now; a later plan decides on the others."""
        batch = self.batches.get(forecast)
        jobs = [self.node.jobs.get(forecast.job_id)] if batch is None else [member.job for member in batch.members]
        return all(job is not None and num_chunks(job) < CHUNKS for job in jobs)

    def make_room(self, chosen: ServiceOrder) -> ServiceOrder | None:
        """Let waiting jobs join batches, so that the first late job is due later; None if that does not help."""
        assert chosen.result.late is not None
        due_ns = chosen.first_late_ns
        up_to_late = chosen.order[: chosen.result.late + 1]
        waiting = [forecast for forecast in up_to_late if self.may_join(forecast, Claim.FEASIBLE)]
        for forecast in waiting[-_MOST_TRIED:]:
            if forecast not in chosen.order:  # It has joined a batch.
                continue
            member = self._member(self.node.jobs[forecast.job_id], forecast)
            hosts = [other for other in chosen.order if other.claim is Claim.FEASIBLE and other is not forecast]
            for after in self._joined(member, chosen, hosts, 0.0, 0.0):
                if after.first_late_ns >= due_ns:
                    chosen = after
                    if after.first_late_ns > due_ns:
                        return after
                    break
        return None

    def join(self, forecast: JobForecast, chosen: ServiceOrder, num_behind: float) -> ServiceOrder | None:
        """Let a waiting job join the batch where it saves most; None if there is none that it may join.

        A deferred job is on time in a batch that it joins. `num_behind` as in `Batch.is_better_with`.
        """
        is_due = forecast.claim in (Claim.DEFERRED, Claim.AWAITING)
        as_feasible = replace(forecast, claim=Claim.FEASIBLE) if is_due else forecast
        member = self._member(self.node.jobs[forecast.job_id], as_feasible)
        pairs = zip(chosen.order, chosen.result.degrees, strict=True)
        hosts = [host for host, degree in pairs if degree == 1 and self.awaits_steps(host)]
        otherwise_ns = chosen.result.next_ns if chosen.result.next_ns < inf else float(self.node.now_ns)
        for after in self._joined(member, chosen, hosts, otherwise_ns, num_behind):
            if after.result.late is None and after.degree_of(after.served[0]) == 1:
                return after
        return None

    def _joined(
        self,
        member: BatchMember,
        chosen: ServiceOrder,
        hosts: Sequence[JobForecast],
        otherwise_ns: float,
        num_behind: float,
    ) -> Iterator[ServiceOrder]:
        """Yield the order of service after a job has joined one of these hosts, those first where it saves most.

        The batch is the first of the forecasts.
        """
        open_batches = [(batch, host) for host in hosts if (batch := self._open_batch(host)) is not None]
        saved = [(batch.saved(member), -index) for index, (batch, _) in enumerate(open_batches)]
        for share, index in sorted(saved, reverse=True)[:_MOST_TRIED]:
            batch, host = open_batches[-index]
            joined = batch.with_(member)
            if share < LEAST_SAVED or joined.slack_ns < 0 or not batch.is_better_with(member, otherwise_ns, num_behind):
                continue
            if not joined.keeps_promises(self.node.chunk_ns):
                continue
            if member.job.dropped_to_best_effort and batch.slack_ns < inf:
                continue
            gone = host.job_id, member.job.job_id
            others = (forecast for forecast in chosen.served if forecast.job_id not in gone)
            yield self.simulate([self._forecast(joined), *others])

    def _open_batch(self, host: JobForecast) -> Batch | None:
        """Return the batch of the jobs on a host's device, which another may join; None if none can."""
        batch = self.batches.get(host)
        if batch is not None:
            return batch if all(member.job.may_share for member in batch.members) else None
        job = self.node.jobs.get(host.job_id)
        if job is None or not host.shares or job.is_stopping or not job.left.num_steps_left:
            return None
        if job.job_id in self.node.leaving or (job.works and len(group_of(job)) > 1):
            return None
        member = self._member(job, host)
        ready_ns = float(self.node.ready_ns(job))
        return Batch((member,), ready_ns, self.node.step_time, self._num_behind)


def _serves_one(device: DeviceView) -> bool:
    """Return whether all works of a device are of the same one job, as nearly always, or it has none."""
    works = device.works
    if not works:
        return True
    first = works[0].job_ids
    return len(first) == 1 and all(work.job_ids == first for work in works)


def _is_shared(device: DeviceView, jobs: Sequence[JobView], forecasts: Mapping[int, JobForecast]) -> bool:
    """Return whether several of these jobs make steps on a device, or are about to."""
    if any(len(work.job_ids) > 1 for work in device.works):
        return True
    return len(jobs) > 1 and all(forecasts[job.job_id].shares and len(job.last_devices) == 1 for job in jobs)


def _without_unfit(batch: Batch) -> Batch:
    """Leave out the members that may not share, or are at another stage; if none may, the first stays alone."""
    if not batch.members:
        return batch
    can_share = batch.stage.spec.batchable  # The stage before it may have been.
    unfit = [
        member for member in batch.members if not (can_share and member.job.may_share) or member.stage != batch.stage
    ]
    return batch.without(unfit if len(unfit) < len(batch.members) else unfit[1:])
