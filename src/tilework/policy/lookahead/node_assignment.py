"""The assignment of jobs to nodes, for one plan of `LookaheadPolicy`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from tilework.core.graph.stage import Stage
from tilework.core.policy import ClusterView, DeviceView, JobView
from tilework.core.pools import Within
from tilework.core.request import Request
from tilework.policy.lookahead.arrivals import TightClasses
from tilework.policy.lookahead.forecast import JobForecast
from tilework.policy.lookahead.forecaster import Forecaster, last_steps
from tilework.policy.lookahead.node_jobs import NodeJobs
from tilework.policy.lookahead.node_table import NodeTable
from tilework.policy.lookahead.selection import Selection
from tilework.policy.lookahead.step_sharing import ServiceOrder
from tilework.policy.toolkit.loads import loads_ns

_MOST_TRIED = 4  # Nodes on which a job is tried to find one where it is on time.
_MOST_WEIGHED = 1  # Nodes on which it is found out which others a job makes late.


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node where a job would be on time, with its forecast there and the order of service that includes it."""

    number: int
    forecast: JobForecast
    chosen: ServiceOrder


@dataclass(slots=True)
class NodeAssignment:
    """The nodes at one moment, with the selection of each, made when it is first asked for.

    A new request with a deadline goes to a node where it would be on time and make no other late: to the one with the
    least room that is enough, so that others stay whole for wide groups, or else to one with the least to do. If its
    node has no idle devices for it and others have, a waiting job goes to the node with the fewest that are enough. A
    job that its node defers looks for another node, and keeps the steps that it has done.

    If other jobs would keep the last free device of the cluster for long steps without need, it is left for requests
    that cannot wait so long (`tight`, by the devices that may run them).

    Jobs without deadlines go by priority (`Forecaster`).
    """

    table: NodeTable
    forecaster: Forecaster
    view: ClusterView
    chunk_ns: int
    tight: Mapping[Within, TightClasses]
    _selections: dict[int, Selection] = field(default_factory=dict)
    _loads_ns: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def at(self, number: int) -> Selection:
        """Return the selection of a node: of the jobs that run or wait there."""
        selection = self._selections.get(number)
        if selection is None:
            selection = self._selections[number] = self._new_at(number)
        return selection

    def _new_at(self, number: int) -> Selection:
        selection = Selection(
            NodeJobs(
                devices=self.table.by_node[number],
                now_ns=self.forecaster.now_ns,
                chunk_ns=self.chunk_ns,
                step_time=self._step_time,
                due_arrivals=self.table.due_arrivals[number],
                tight=self._tight_at(number),
                load_ns=self._load_ns if self.view.needs_loads else None,
                margins=self.view.margins,
            )
        )
        for job in (*_running(selection.node.devices, self.view), *self.table.waiting[number].values()):
            self._add(job, selection)
        return selection

    def _tight_at(self, number: int) -> TightClasses | None:
        """Return the tight classes of least slack whose requests may go to this node and to no other idle one."""
        here = (tight for within, tight in self.tight.items() if self.table.only_there(number, within))
        return min(here, key=lambda tight: tight.least_slack_ns, default=None)

    def _within(self, job: JobView) -> Within:
        return self.forecaster.costs.pools.within(job.request.pipeline)

    def _step_time(self, stage: Stage, requests: Sequence[Request]) -> float:
        """Return the time of a step of these requests together on one device; inf if they do not fit into its memory.

        For a batch, the mean error of recent predictions is added.
        """
        costs = self.forecaster.costs
        step_ns = costs.work_ns(stage, requests, 1)
        if len(requests) == 1:
            return step_ns
        if not costs.fits_together(stage, [request.shape for request in requests]):
            return inf
        return step_ns * (1.0 + costs.prediction_error(stage))

    def _load_ns(self, job: JobView, device: DeviceView) -> int:
        """Return how long a device would load before it can run what is left of a job."""
        key = job.request.pipeline, job.left.num_done, device.device_id
        if key not in self._loads_ns:
            self._loads_ns[key] = loads_ns(self.view, device.device_id, job.left)
        return self._loads_ns[key]

    def _add(self, job: JobView, selection: Selection) -> None:
        forecast = self.forecaster.forecast(job, selection.node)
        if forecast is not None:
            selection.add(job, forecast)

    def _assign(self, job: JobView, number: int, place: NodePlace | None = None) -> None:
        """Let a waiting job wait at this node, which `_place` may have found."""
        former = self.table.node_of.get(job.job_id)
        if former == number:
            return
        if former in self._selections:
            self._selections[former].drop(job.job_id)
        self.table.assign(job, number)
        if place is not None and place.number == number:
            self._selections[number].add(job, place.forecast, place.chosen)
        elif number in self._selections:
            self._add(job, self._selections[number])

    def committed(self) -> dict[int, list[JobView]]:
        """Return the changed nodes on which nothing is to be decided, each with its jobs that make steps.

        No job waits there, each device has all works of one job or none, and each of these jobs runs to its end.
        """
        if self.view.needs_loads:
            return {}
        found = ((number, self._if_committed(number)) for number in self.table.changed)
        return {number: jobs for number, jobs in found if jobs is not None}

    def _if_committed(self, number: int) -> list[JobView] | None:
        if self.table.waiting[number]:
            return None
        devices = self.table.by_node[number]
        jobs: list[JobView] = []
        for device in devices:
            if not device.works:
                continue
            last = device.works[-1]
            job = self.view.job(last.job_ids[0])
            if job is None or job.works != device.works or any(len(work.job_ids) > 1 for work in device.works):
                return None
            if len(last.devices) > 1 or job.last_devices != last.devices:
                return None
            if last_steps(job) is None and job.left.stage is None:  # It only ends.
                continue
            if not self.forecaster.runs_to_its_end(job, device, len(devices)):
                return None
            jobs.append(job)
        return jobs

    def assign_waiting(self, waiting: Sequence[JobView]) -> None:
        """Give every waiting job a node; the most urgent may move to nodes where devices are idle."""
        table = self.table
        self.forecaster.by_tenant = len({job.request.tenant for job in waiting}) > 1
        newcomers = table.update(waiting, self.view, self.forecaster.now_ns)
        for job in newcomers:
            number = table.returning(job)
            place = None
            if number is None and (place := self._place(job)) is not None:
                number = place.number
            if number is not None:
                self._assign(job, number, place)
                table.take_room(number, self._width(job))
        for job in waiting:
            if not table.idle:
                break
            number = table.take_idle(table.node_of.get(job.job_id), self._width(job), self._within(job))
            if number is not None:
                self._assign(job, number)
        for job in newcomers:
            if job.job_id not in table.node_of:
                self._assign(job, table.least_loaded(1, self._within(job))[0])

    def choose(self) -> None:
        """Select jobs at every changed node; a job that would be late there may go to another node."""
        for number in sorted(self.table.changed):
            self._choose(number)
        if len(self.table.by_node) == 1:
            return
        for number in sorted(self.table.changed):
            node = self.at(number).node
            for job, forecast in node.deferred():
                if not self.table.may_try(job, self.forecaster.now_ns):
                    continue
                place = self._place(job, forecast)
                if place is None:
                    step_ns = forecast.speeds[forecast.usual].step_ns
                    self.table.try_again(job, self.forecaster.now_ns + step_ns)
                    continue
                if job.works:
                    node.leaving.add(job.job_id)
                    self.table.expect(job, place.number, self._width(job))
                else:
                    self._assign(job, place.number, place)
                    self._choose(place.number)

    def _choose(self, number: int) -> Selection:
        selection = self.at(number)
        self.table.set_need(number, selection.num_needed())
        self.table.set_wake(number, selection.wake_ns)
        if selection.defers:
            self.table.full.add(number)
        else:
            self.table.full.discard(number)
        return selection

    def _place(self, job: JobView, elsewhere: JobForecast | None = None) -> NodePlace | None:
        """Find a place where a job would be on time and make no other late; `elsewhere` is its forecast on its node."""
        if len(self.table.by_node) == 1 or job.request.deadline_ns is None or job.dropped_to_best_effort:
            return None
        tried: set[int] = set()
        for number in self._candidates(job):
            if number in tried or number in self.table.full:
                continue
            tried.add(number)
            selection = self._choose(number)
            if elsewhere is None or not job.works:
                forecast = self.forecaster.forecast(job, selection.node)
            else:
                forecast = self.forecaster.moved(job, elsewhere, self.table.node_with(job), selection.node.devices)
            if forecast is not None and (chosen := selection.with_job(forecast)) is not None:
                return NodePlace(number, forecast, chosen)
        return None

    def num_missed(self, job: JobView, latest: Mapping[int, Selection]) -> int:
        """Return how many others one more job would make late on the node where they are fewest, of those tried.

        `latest` are the selections of the latest plans, of which those of the last moment still stand.
        """
        numbers = list(dict.fromkeys(self._candidates(job)))
        now_ns = self.forecaster.now_ns
        recent = {one: found for one, found in latest.items() if now_ns <= found.node.now_ns + self.chunk_ns}
        for number in numbers:
            selection = recent.get(number) or self.at(number)
            forecast = self.forecaster.forecast(job, selection.node)
            if forecast is None:
                return 0
            forecast.head_ns += now_ns - selection.node.now_ns
            if not selection.defers and selection.with_job(forecast) is not None:
                return 0
        missed = []
        for number in numbers[:_MOST_WEIGHED]:
            trial = self._new_at(number)
            self._add(job, trial)
            before = recent.get(number) or self.at(number)
            missed.append(len(trial.missed() - before.missed() - {job.job_id}))
        return min(missed, default=0)

    def _candidates(self, job: JobView) -> Iterator[int]:
        """Yield the nodes to try for a job, some twice. The second ones are found only when they are asked for."""
        within = self._within(job)
        yield from self.table.with_room(self._width(job), _MOST_TRIED, within)
        yield from self.table.least_loaded(_MOST_TRIED, within)

    def _width(self, job: JobView) -> int:
        return self.forecaster.width(job, self.table.widest_within(self._within(job)))


def _running(devices: Iterable[DeviceView], view: ClusterView) -> Iterable[JobView]:
    """Return the jobs whose steps run or are to run on these devices, and may be stopped.

    Works of a former attempt at a job do not count, nor works that have lost a device: these break off.
    """
    works = {work.work_id: work for device in devices for work in device.works}
    jobs: dict[int, JobView] = {}
    for work in works.values():
        for job_id in work.job_ids:
            job = view.job(job_id)
            if job is None or not job.works or work is not job.works[-1] or work.devices != job.last_devices:
                continue
            if job.left.num_steps_left or last_steps(job) is not None:
                jobs[job_id] = job
    return jobs.values()
