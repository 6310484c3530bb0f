"""Which node serves whom, for one plan of `Tilework`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from tilework.core.interfaces import ClusterView, CostModel, DeviceView, JobView
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import DECODE, DIFFUSE, ENCODE, Work, stages_of
from tilework.policy.lookahead.dispatch import Lookahead
from tilework.policy.lookahead.node_table import Nodes
from tilework.policy.lookahead.request_costs import Kinds
from tilework.policy.lookahead.rollout import Claim, Ride
from tilework.policy.lookahead.selection import ONE_DEVICE

_TRIALS = 4  # Nodes that are rolled forward to find one on which a request is on time.
_ROUNDING = 1e-6
_GRACE_NS = 500 * NS_PER_MS  # As if everybody had waited so long when he comes.


@dataclass(slots=True)
class Homing:
    """The nodes at one moment, each looked at once.

    A newcomer with a deadline goes where it would be on time and nobody late for it: to the node with the least room
    that is enough, so that others stay whole for wide groups, or else to one of those with the least to do. If others
    have idle devices for it and this one has not, it goes there, as does everybody who waits: to the node with the
    fewest that are enough. Whoever is spared at home looks for another, and takes along what he has done.

    One device of the cluster is left to those who can wait no longer than `calm_ns`, if others would have it longer
    without need.

    Without deadlines, short ones go first, and those that have waited long: see `_pressure`.
    """

    nodes: Nodes
    kinds: Kinds
    view: ClusterView
    costs: CostModel
    now_ns: int
    chunk_ns: int
    calm_ns: float
    _ahead: dict[int, Lookahead] = field(default_factory=dict)
    _by_tenant: bool = False

    def at(self, number: int) -> Lookahead:
        """A node with what it serves and what waits there."""
        node = self._ahead.get(number)
        if node is None:
            calm_ns = inf if self.nodes.is_idle_beside(number) else self.calm_ns
            node = self._ahead[number] = Lookahead(
                self.nodes.by_node[number], self.now_ns, self.chunk_ns, self._step_time, calm_ns
            )
            for job in (*_running(node.devices, self.view), *self.nodes.waiting[number].values()):
                self._join(job, node)
        return node

    def _step_time(self, requests: Sequence[Request]) -> float:
        """What a step of these takes together, on one device; inf if they do not fit into its memory.

        A batch is held to take as much longer as batches were off from what was foretold lately.
        """
        _, diffuse, _ = stages_of(requests[0].pipeline)
        step_ns = self.costs.work_ns(diffuse, requests, 1)
        if len(requests) == 1:
            return step_ns
        if not self.costs.fits_together(diffuse, [request.shape for request in requests]):
            return inf
        return step_ns * (1.0 + self.costs.prediction_error(diffuse))

    def _join(self, job: JobView, node: Lookahead) -> None:
        ride = self._ride(job, node)
        if ride is not None:
            node.add(job, ride)

    def _settle(self, job: JobView, number: int) -> None:
        """Let a job that waits do so at this node."""
        home = self.nodes.homes.get(job.job_id)
        if home == number:
            return
        if home in self._ahead:
            self._ahead[home].drop(job.job_id)
        self.nodes.settle(job, number)
        if number in self._ahead:
            self._join(job, self._ahead[number])

    # Homes.

    def settle(self, waiting: Sequence[JobView]) -> None:
        """Give every waiting job a home; where devices are idle, the most urgent may move there."""
        nodes = self.nodes
        self._by_tenant = len({job.request.tenant for job in waiting}) > 1
        newcomers = nodes.look(waiting, self.view)
        for job in newcomers:
            number = nodes.welcome(job)
            if number is None:
                number = self._place(job)
            if number is not None:
                self._settle(job, number)
                nodes.take_room(number, self._width(job))
        for job in waiting:
            if not nodes.idle:
                break
            number = nodes.take_idle(nodes.homes.get(job.job_id), self._width(job))
            if number is not None:
                self._settle(job, number)
        for job in newcomers:
            if job.job_id not in nodes.homes:
                self._settle(job, nodes.least_loaded(1)[0])

    def choose(self) -> None:
        """Choose at every stirred node whom to serve; whoever would be late there may go to another."""
        for number in sorted(self.nodes.stirred):
            self._choose(number)
        if len(self.nodes.by_node) == 1:
            return
        for number in sorted(self.nodes.stirred):
            for job, ride in self.at(number).spared():
                other = self._place(job, ride)
                if other is None:
                    continue
                if job.works:
                    self.at(number).leaving.add(job.job_id)
                    self.nodes.expect(job, other, self._width(job))
                else:
                    self._settle(job, other)
                    self._choose(other)

    def _choose(self, number: int) -> Lookahead:
        node = self.at(number)
        node.choose()
        self.nodes.set_need(number, node.need())
        return node

    def _place(self, job: JobView, ride: Ride | None = None) -> int | None:
        """A node with room where it would be on time, and nobody late for it; `ride` is what it is elsewhere."""
        if len(self.nodes.by_node) == 1 or job.request.deadline_ns is None or job.dropped_to_best_effort:
            return None
        numbers = [*self.nodes.roomy(self._width(job), _TRIALS), *self.nodes.least_loaded(_TRIALS)]
        for number in dict.fromkeys(numbers):
            node = self._choose(number)
            guest = self._ride(job, node) if ride is None or not job.works else self._moved(job, ride, node)
            if guest is not None and node.keeps_all_with(guest):
                return number
        return None

    def _width(self, job: JobView) -> int:
        """How many devices it needs now: the fewest with which it is on time, or else as many as it usually takes."""
        kind = self.kinds.of(job.request, self.nodes.widest, self.costs)
        if not kind.speeds:
            return 1
        if job.request.deadline_ns is not None and not job.dropped_to_best_effort:
            budget_ns = job.request.deadline_ns - self.now_ns - kind.encode_ns - kind.decode_ns
            for speed in kind.speeds:
                if job.num_steps_left * speed.step_ns <= budget_ns:
                    return speed.degree
        return kind.speeds[kind.usual].degree

    # What is left of a job.

    def _ride(self, job: JobView, node: Lookahead) -> Ride | None:
        """None if no degree that the node can run was profiled. Raises UnknownCost."""
        kind = self.kinds.of(job.request, len(node.devices), self.costs)
        speeds, usual, num_steps = kind.speeds, kind.usual, float(job.num_steps_left)
        stage = None if job.stage is None else job.stage.name
        head_ns = float(kind.encode_ns) if stage == ENCODE else 0.0
        steps = _last_steps(job) if job.works else None
        if steps is None and stage in (None, DECODE):
            speeds, usual = (ONE_DEVICE,), 0
        elif not speeds:
            return None
        rank, hold_ns = -1, 0.0
        if job.works:
            current = next(
                (rank for rank, speed in enumerate(speeds) if steps and speed.degree == len(steps.devices)), -1
            )
            if steps is None or job.is_stopping or current < 0 or not speeds[current].step_ns:
                head_ns += node.ready_ns(job) - self.now_ns
            else:
                rank, step_ns = current, speeds[current].step_ns
                num_told = max(0, node.end_ns(steps) - self.now_ns) / step_ns
                num_steps += num_told
                hold_ns = (num_told - int(num_told + _ROUNDING)) * step_ns
        ride = Ride(
            job_id=job.job_id,
            claim=Claim.DUE,
            due_ns=float(job.urgency_ns),
            speeds=speeds,
            usual=usual,
            num_steps=num_steps,
            head_ns=head_ns,
            tail_ns=float(kind.decode_ns),
            weight=job.request.weight,
            rank=rank,
            hold_ns=hold_ns,
            shares=kind.shares and job.may_share,
        )
        if job.request.deadline_ns is None or job.dropped_to_best_effort:
            ride.claim = Claim.OVERDUE if job.urgency_ns <= self.now_ns else Claim.PATIENT
        if job.request.deadline_ns is None:
            ride.due_ns = -self._pressure(job, ride)
        return ride

    def _pressure(self, job: JobView, ride: Ride) -> float:
        """The place of one without a deadline: the square of how long it has waited over what is left of it to do.

        So short ones go first, but whoever has waited long before those that have not, and the pause between two
        chunks of one that is nearly done is short. Where several tenants wait, it counts from when it would have come
        if each kept to its share; until then, it is behind those whose time has come.
        """
        waited_ns = self.now_ns - job.request.arrival_ns - (job.delay_ns if self._by_tenant else 0) + _GRACE_NS
        if waited_ns <= 0:
            return waited_ns
        return ride.weight * waited_ns**2 / max(1.0, ride.least_device_ns)

    def _moved(self, job: JobView, ride: Ride, node: Lookahead) -> Ride | None:
        """What is left of one that runs, once it has ended its step and come to another node."""
        kind = self.kinds.of(job.request, len(node.devices), self.costs)
        if not kind.speeds:
            return None
        move_ns = self.costs.move_ns(job.last_devices, tuple(device.device_id for device in node.devices))
        return replace(
            ride,
            claim=Claim.DUE,
            speeds=kind.speeds,
            usual=kind.usual,
            num_steps=float(int(ride.num_steps + _ROUNDING)),
            head_ns=ride.head_ns + ride.hold_ns + move_ns,
            rank=-1,
            hold_ns=0.0,
        )


def _running(devices: Iterable[DeviceView], view: ClusterView) -> Iterable[JobView]:
    """Jobs that are to run steps there, which may be stopped.

    Remnants of former attempts do not count, nor works that have lost a device, which break off.
    """
    works = {work.work_id: work for device in devices for work in device.works}
    jobs: dict[int, JobView] = {}
    for work in works.values():
        for job_id in work.job_ids:
            job = view.job(job_id)
            if job is not None and job.works and work is job.works[-1] and work.devices == job.last_devices:
                has_steps = job.stage is not None and job.stage.name != DECODE
                if has_steps or _last_steps(job) is not None:
                    jobs[job_id] = job
    return jobs.values()


def _last_steps(job: JobView) -> Work | None:
    """The last of its works that runs steps."""
    return next((work for work in reversed(job.works) if work.stage.name == DIFFUSE), None)
