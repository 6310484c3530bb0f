"""The rule of admission: when would this request be finished, and is that good enough?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tilework.admission.admission_limits import AdmissionLimits
from tilework.admission.eta_correction import EtaCorrection
from tilework.admission.list_schedule import Levels, levels_after, place
from tilework.admission.reservations import Reservations
from tilework.admission.what_if import ready_ns
from tilework.core.interfaces import (
    Admitted,
    Backlog,
    Block,
    CostModel,
    Demand,
    EtaPrediction,
    JobView,
    Policy,
    Refused,
)
from tilework.core.progress import Cursor
from tilework.core.request import RefusalCode, Request
from tilework.core.time import s_from_ns
from tilework.core.work import DECODE, DIFFUSE, StageId
from tilework.policy.toolkit.buddy_allocator import nodes
from tilework.policy.toolkit.demand import demand_at, usable_degree
from tilework.policy.toolkit.margin import ADMISSION_MARGIN
from tilework.policy.toolkit.order import needs

_TRIALS = 8


@dataclass(slots=True, kw_only=True)
class EtaAdmission:
    """Accept everything but promises that could not be kept, or would break others, and what finds no room to wait.

    The predicted finish lets all jobs that are served before the newcomer take, in order, as many devices as the policy
    would give them, those that are free first; it is corrected by eta_correction (see `admission.eta_correction`). A
    promise (`on_miss: reject`) needs more than a good prediction: a proof that later arrivals cannot take away
    (see `admission.reservations`). Whether there is room to wait, the `door` says.
    """

    door: AdmissionLimits
    _eta_correction: EtaCorrection = field(default_factory=EtaCorrection, init=False)
    _promises: Reservations | None = field(default=None, init=False)

    def admit(
        self, request: Request, policy: Policy, costs: CostModel, backlog: Backlog, now_ns: int
    ) -> Admitted | Refused:
        """Raises UnknownCost."""
        demand = policy.demand(request, Cursor.start(request), costs)
        if (no_room := self.door.refusal(request, backlog, now_ns)) is not None:
            return _with_earliest(no_room, request, demand, policy, backlog, now_ns)
        if not backlog.devices:
            if request.is_promise:
                return Refused("no device is up", None, RefusalCode.NO_DEVICE)
            why = "no device is up; the time counts from now"
            return Admitted(now_ns + demand.run_ns, why, EtaPrediction(demand.run_ns, 0, 1.0))
        if (too_large := _too_large(request, policy, costs, backlog.widest)) is not None:
            return too_large
        before = _levels_before(request, policy, backlog)
        num_jobs = backlog.num_jobs()
        predicted_ns = place([list(node) for node in before], demand) - now_ns
        eta_prediction = EtaPrediction(predicted_ns, num_jobs, self._eta_correction.ratio(request, num_jobs))
        eta_ns = now_ns + int(eta_prediction.ratio * eta_prediction.predicted_ns)
        if not request.is_promise:
            return Admitted(eta_ns, _why(demand, backlog), eta_prediction)
        assert request.deadline_ns is not None
        ask = self._ask(request, before, policy, costs, backlog, now_ns)
        promised = ask.promised(request.deadline_ns)
        if promised is None:
            return _refused(ask, request.deadline_ns)
        why = f"{_why(demand, backlog)}; its deadline is promised"
        return Admitted(min(eta_ns, request.deadline_ns), why, eta_prediction, promised)

    def _ask(
        self, request: Request, before: Levels, policy: Policy, costs: CostModel, backlog: Backlog, now_ns: int
    ) -> _Ask:
        promises = self._promises_at(backlog, now_ns)
        start, stage = Cursor.start(request), StageId(request.pipeline, DIFFUSE)
        widest = max(map(len, promises.nodes))
        degrees = {usable_degree(stage, min(degree, widest), costs) for degree in policy.degrees(request, costs)}
        blocks = [demand_at(request, start, degree, costs) for degree in degrees]
        blocks.sort(key=lambda block: (block.width * block.run_ns, block.width))
        return _Ask(
            request=request,
            policy=policy,
            backlog=backlog,
            promises=promises,
            blocks=blocks,
            ends_ns=[place([list(node) for node in before], block) for block in blocks],
            now_ns=now_ns,
        )

    def _promises_at(self, backlog: Backlog, now_ns: int) -> Reservations:
        """What is promised, which between two changes of works and promises stays the same."""
        levels, blocks, known = (
            {device.device_id: device.free_ns for device in backlog.devices},
            backlog.reserved(),
            self._promises,
        )
        if known is None or known.levels != levels or known.blocks != blocks:
            known = self._promises = Reservations(levels, nodes(backlog.devices), blocks, now_ns)
        known.at(now_ns)
        return known

    def learn(self, request: Request, eta_prediction: EtaPrediction, actual_ns: int) -> None:
        """Correct the predictions for requests of this kind by how one has come out."""
        self._eta_correction.learn(request, eta_prediction.num_jobs, eta_prediction.predicted_ns, actual_ns)

    def eta_ns(self, job: JobView, backlog: Backlog, now_ns: int) -> int:
        """When a job that is in is expected to end, by the same rule."""
        plain_ns = self._plain_ns(job, backlog, now_ns)
        return max(now_ns, now_ns + int(job.eta_prediction.ratio * (plain_ns - now_ns)))

    def _plain_ns(self, job: JobView, backlog: Backlog, now_ns: int) -> int:
        if not backlog.devices:
            return now_ns + job.demand.run_ns
        begin_ns = max(now_ns, ready_ns(job, {device.device_id: device for device in backlog.devices}))
        if job.stage is None:
            return begin_ns
        free_ns = [device.free_ns for device in backlog.devices]
        running = backlog.running_ahead(job.urgency_ns, job.job_id)
        levels = levels_after(free_ns, running, backlog.waiting_ahead(job.urgency_ns, job.job_id))
        return place(levels, job.demand, begin_ns)


def _with_earliest(
    no_room: Refused, request: Request, demand: Demand, policy: Policy, backlog: Backlog, now_ns: int
) -> Refused:
    """With when it could be done that finds no room: as if it were in, since it would then come when others have gone.

    A promise would need room and a place among the promises, of which nobody can say when.
    """
    if request.is_promise or no_room.retry_ns is None:
        return no_room
    end_ns = place(_levels_before(request, policy, backlog), demand)
    return replace(no_room, earliest_ns=max(end_ns, now_ns + no_room.retry_ns + demand.run_ns))


def _too_large(request: Request, policy: Policy, costs: CostModel, widest: int) -> Refused | None:
    """A refusal of what has been seen not to fit into the memory of so many devices as the policy may give it."""
    stage, decode, shape = StageId(request.pipeline, DIFFUSE), StageId(request.pipeline, DECODE), request.shape
    degrees = [degree for degree in policy.degrees(request, costs) if degree <= widest] or [1]
    if any(costs.fits(stage, shape, degree) for degree in degrees) and costs.fits(decode, shape, 1):
        return None
    devices = "one of the GPUs" if max(degrees) == 1 else f"{max(degrees)} of the GPUs"
    return Refused(f"{shape} needs more memory than there is on {devices}", None, RefusalCode.MEMORY)


def _refused(ask: _Ask, deadline_ns: int) -> Refused:
    end_ns = min(ask.ends_ns)
    needed_ns = ADMISSION_MARGIN.due_ns(end_ns, ask.now_ns) - end_ns
    if end_ns > deadline_ns:
        reason = f"it would be {s_from_ns(end_ns - deadline_ns):.2f} s late behind {_others(ask.backlog)}"
    elif end_ns + needed_ns > deadline_ns:
        spare_s, needed_s = s_from_ns(deadline_ns - end_ns), s_from_ns(needed_ns)
        reason = f"it would end {spare_s:.2f} s before its deadline, and a promise needs {needed_s:.2f} s to spare"
    else:
        reason = f"what is promised to others leaves no room for it beside {_others(ask.backlog)}"
    return Refused(reason, ask.earliest_ns(), RefusalCode.DEADLINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """A request that wants a promise, and what is behind the door.

    `blocks` are the ways in which the policy may run it, the cheapest in GPU-time first; `ends_ns` when it would be
    done as each of them, behind those that the policy serves before it.
    """

    request: Request
    policy: Policy
    backlog: Backlog
    promises: Reservations
    blocks: Sequence[Demand]
    ends_ns: Sequence[int]
    now_ns: int

    def promised(self, deadline_ns: int) -> Block | None:
        """The cheapest block with which the deadline can be promised."""
        in_time = (block for block, end_ns in zip(self.blocks, self.ends_ns, strict=True) if end_ns <= deadline_ns)
        placed = (self.promises.place(deadline_ns, block) for block in in_time)
        return next((block for block in placed if block is not None), None)

    def earliest_ns(self) -> int:
        """The earliest deadline with which it would be let in, by its cheapest block or by its quickest."""
        return min(self._earliest_ns(block) for block in {self.blocks[0], min(self.blocks, key=_run_ns)})

    def _earliest_ns(self, block: Demand) -> int:
        """A later deadline may put it further behind others, so that its finish is predicted anew."""
        due_ns = self.now_ns
        for _ in range(_TRIALS):
            due_ns = self.promises.earliest_ns(block, due_ns)
            later = replace(self.request, deadline_ns=due_ns)
            eta_ns = place(_levels_before(later, self.policy, self.backlog), block)
            if eta_ns <= due_ns:
                break
            due_ns = eta_ns
        return due_ns


def _levels_before(request: Request, policy: Policy, backlog: Backlog) -> Levels:
    """When devices are free after those that are served before a newcomer."""
    urgency_ns = policy.urgency_ns(request, False, backlog.delay_ns(request))
    free_ns = [device.free_ns for device in backlog.devices]
    return levels_after(free_ns, backlog.running_ahead(urgency_ns), backlog.waiting_ahead(urgency_ns))


def _run_ns(block: Demand) -> int:
    return block.run_ns


def _why(demand: Demand, backlog: Backlog) -> str:
    return f"it needs {needs(demand)}, beside {_others(backlog)}"


def _others(backlog: Backlog) -> str:
    return "1 other request" if backlog.num_jobs() == 1 else f"{backlog.num_jobs()} other requests"
