"""Choosing the jobs that a node serves, and in which order.

Theory of operation. Jobs go by claim and then by deadline (`JobForecast.place`). A rollout (`rollout.simulate_ahead`)
says which feasible job is the first to be late in that order. Then one job is *deferred*: of the feasible jobs up to
the late one, the one that needs the most device time per weight to be on time from now on. It goes behind all feasible
jobs, and the rollout runs again, until no job is late. For one machine this is the rule of Moore and Hodgson, which
keeps the most deadlines there; here device time stands for time. It is not the least device time that counts: on full
devices, jobs that have waited until they need wide groups would displace those that come after them.

On several devices a job may be deferred in vain: a step that runs now may end too late for the job that needed the
room. So each deferred job but the last is tried once more, the cheapest first, and becomes feasible again if no job is
late with it. A deferred job gets what others leave, and is tried again at the next plan.

Jobs that can share forward passes (`step_sharing`) matter at two points: before a job is deferred that cannot join a
batch, waiting jobs that can do so make room for it; and when the order is fixed, jobs without a device join batches. To
a rollout a batch is one job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from tilework.core.policy import JobView
from tilework.policy.lookahead.forecast import Claim, JobForecast
from tilework.policy.lookahead.node_jobs import NodeJobs
from tilework.policy.lookahead.step_sharing import ServiceOrder, StepSharing

_STAYING = (Claim.FEASIBLE, Claim.BEST_EFFORT)
_FIRST = 1e18  # Nanoseconds: before every deadline.
_MOST_REFUSED = 8  # Jobs in a row that could join no batch, after which no further ones are tried.


@dataclass(slots=True)
class Selection:
    """The order of service of a node, chosen on first use and again after jobs were added or dropped.

    From `wake_ns` on, another one may be better although nothing has happened.
    """

    node: NodeJobs
    sharing: StepSharing = field(init=False)
    wake_ns: float = field(default=inf, init=False)
    _chosen: ServiceOrder | None = field(default=None, init=False)
    _num_needed: int | None = field(default=None, init=False)  # Number by `_chosen`, once it was asked for.
    _stays: bool = field(default=False, init=False)  # True if a further job changes no claim and no batch.

    _ends_ns: dict[int, float] | None = field(default=None, init=False)
    _costs: dict[JobForecast, float] = field(default_factory=dict, init=False)  # Each is asked for again and again.

    def __post_init__(self) -> None:
        self.sharing = StepSharing(self.node)

    def add(self, job: JobView, forecast: JobForecast, chosen: ServiceOrder | None = None) -> None:
        """Let a job wait here. `chosen` is what `with_job` has returned for it."""
        self.node.add(job, forecast)
        if chosen is None or not self._stays or forecast.claim not in _STAYING:
            self._forget()
            return
        self._chosen = chosen
        if self._num_needed is not None:
            self._num_needed += forecast.needed_degree(self.node.now_ns)

    def _forget(self) -> None:
        self._chosen = self._num_needed = self._ends_ns = None

    def drop(self, job_id: int) -> None:
        """Forget a job that another node serves."""
        if self.node.drop(job_id):
            self._forget()

    def choose(self) -> ServiceOrder:
        """Put the jobs in order of service, deferring as few as possible."""
        if self._chosen is not None:
            return self._chosen
        for forecast in self.node.forecasts:
            if forecast.claim in (Claim.DEFERRED, Claim.AWAITING) and not forecast.is_rationed:
                forecast.claim = Claim.FEASIBLE
        self.wake_ns = self.node.hold_late()
        self.node.share_devices()
        self.node.leave_room(self.node.forecasts)
        self.node.await_devices()
        chosen = self.sharing.simulate(self.sharing.gather())
        deferred: list[JobForecast] = []
        while chosen.has_late:
            late = chosen.result.late
            assert late is not None
            feasible = [forecast for forecast in chosen.order[: late + 1] if forecast.claim is Claim.FEASIBLE]
            candidates = [forecast for forecast in feasible if not forecast.is_promised]
            if not candidates:
                feasible[-1].serve_first()
                chosen = self.sharing.simulate(chosen.served)
                continue
            dearest = max(reversed(candidates), key=self._cost)
            if not self.sharing.may_join(dearest, Claim.FEASIBLE):
                relieved = self.sharing.make_room(chosen)
                if relieved is not None:
                    chosen = relieved
                    continue
            dearest.claim = Claim.DEFERRED
            deferred.append(dearest)
            chosen = self.sharing.simulate(chosen.served)
        for forecast in sorted(deferred[:-1], key=self._cost):
            forecast.claim = Claim.FEASIBLE
            with_it = self.sharing.simulate(chosen.served)
            if with_it.result.late is None:
                chosen = with_it
            else:
                forecast.claim = Claim.DEFERRED
        if self.node.load_ns is not None:
            chosen = self._with_fewer_loads(chosen)
        self._chosen = chosen
        self._num_needed = None
        self._stays = not self.sharing.batches and all(one.claim in _STAYING for one in self.node.forecasts)
        return chosen

    def _with_fewer_loads(self, chosen: ServiceOrder) -> ServiceOrder:
        """Put those first that run, and then those that load least, as long as no job is late by it; late ones anyway.

        So a device changes to other components only where a deadline needs it. While none must load anything, the order
        stays: devices that are held for a job that runs would be missed by one that waits and has less time.
        """
        late = sorted((one for one in chosen.served if one.claim is Claim.LATE), key=_by_load)
        for index, forecast in enumerate(late):
            forecast.order_key = index
        if len(late) > 1:
            chosen = self.sharing.reordered(chosen)
        feasible = sorted((one for one in chosen.served if one.claim is Claim.FEASIBLE), key=_by_load)
        if not any(one.load_ns for one in feasible):
            return chosen
        num_devices = len(self.node.devices)
        num_first = 0
        for forecast in feasible[: 2 * num_devices] if len(feasible) > 1 else ():
            key, forecast.order_key = forecast.order_key, -_FIRST + num_first
            with_it_first = self.sharing.reordered(chosen)
            if with_it_first.result.late is None:
                chosen = with_it_first
                num_first += 1
            else:
                forecast.order_key = key
            if num_first == num_devices:
                break
        return chosen

    def _cost(self, forecast: JobForecast) -> float:
        cost = self._costs.get(forecast)
        if cost is None:
            cost = self._costs[forecast] = forecast.cost(self.node.now_ns)
        return cost

    def with_job(self, forecast: JobForecast) -> ServiceOrder | None:
        """Return the order with one more job, if it would be on time and make no other job late."""
        chosen = self.choose()
        self.node.leave_room([forecast])
        order = self.sharing.with_job(chosen, forecast)
        return None if order.has_late else order

    def missed(self) -> set[int]:
        """Return the jobs that would be late: those that are deferred. Promised ones never are: they have a proof."""
        self.choose()
        return {one.job_id for one in self.node.forecasts if one.claim is Claim.DEFERRED}

    @property
    def defers(self) -> bool:
        """True if a job could be on time only if another were late."""
        self.choose()
        return any(forecast.claim is Claim.DEFERRED for forecast in self.node.forecasts)

    def ends_ns(self) -> Mapping[int, float]:
        """Return when each job ends if no other request comes, by job id, as the jobs were chosen last."""
        if self._ends_ns is None:
            self._ends_ns = {}
            for forecast, end_ns in self.choose().ends_ns().items():
                batch = self.sharing.batches.get(forecast)
                self._ends_ns.update([(forecast.job_id, end_ns)] if batch is None else batch.ends_if(end_ns))
        return self._ends_ns

    def num_needed(self) -> int:
        """Return the number of devices that the jobs that are on time need now."""
        served = self.choose().served
        if self._num_needed is None:
            self._num_needed = sum([forecast.needed_degree(self.node.now_ns) for forecast in served])
        return min(len(self.node.devices), self._num_needed)

    def share_steps(self) -> ServiceOrder:
        """Let jobs that have no device join batches, if that saves time of the device and makes no job late.

        A deferred job may be on time that way; the cheapest of these is tried first. A job that cannot be on time joins
        none where that would slow one that can. Of jobs that need not be on time, some end later and some earlier: the
        gain must outweigh the loss.
        """
        chosen = self.choose()
        sharing = self.sharing
        if not any(forecast.shares and sharing.awaits_steps(forecast) for forecast in chosen.served):
            return chosen
        joining = [
            forecast
            for forecast, degree in zip(chosen.order, chosen.result.degrees, strict=True)
            if not degree and sharing.may_join(forecast, forecast.claim)
        ]
        joining.sort(
            key=lambda forecast: (forecast.claim, self._cost(forecast) if forecast.claim is Claim.DEFERRED else 0.0)
        )
        num_refused = 0
        for index, forecast in enumerate(joining):
            if forecast not in chosen.order or chosen.degree_of(forecast):  # It has a device by now.
                continue
            after = sharing.join(forecast, chosen, (len(joining) - index - 1) / len(self.node.devices))
            num_refused = num_refused + 1 if after is None else 0
            chosen = self._chosen = after or chosen
            self._num_needed = None
            if num_refused == _MOST_REFUSED:
                break
        return chosen


def _by_load(forecast: JobForecast) -> tuple[bool, float, float, int]:
    """Return the key that lets devices keep what they have: running jobs first, then those with the shortest load."""
    return forecast.level < 0, forecast.load_ns, forecast.order_key, forecast.job_id
