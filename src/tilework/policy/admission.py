"""The rule of admission: when would this request be finished, and is that good enough?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tilework.core.interfaces import Admitted, Backlog, CostModel, Demand, Forecast, JobView, Policy, Refused
from tilework.core.progress import Cursor
from tilework.core.request import RefusalCode, Request
from tilework.core.time import s_from_ns
from tilework.policy.demand import demand_at
from tilework.policy.experience import Experience
from tilework.policy.guard import blocks_of, ready_ns
from tilework.policy.plane import finish_ns, levels_of
from tilework.policy.promises import Promises

_TRIALS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EtaAdmission:
    """Accept everything but promises that could not be kept, or would break others, and what finds no room to wait.

    The predicted finish lets all jobs that are served before the newcomer take, in order, as many devices as the policy
    would give them, those that are free first; it is corrected by experience (see `policy.experience`). A promise
    (`on_miss: reject`) needs more than a good prediction: a certificate that later arrivals cannot take away (see
    `policy.promises`). `max_jobs` is how many jobs may be in the system at a time.
    """

    max_jobs: int
    _experience: Experience = field(default_factory=Experience, init=False)

    def admit(
        self, request: Request, policy: Policy, costs: CostModel, backlog: Backlog, now_ns: int
    ) -> Admitted | Refused:
        """Raises UnknownCost."""
        demand = policy.demand(request, Cursor.start(request), costs)
        if backlog.num_jobs() >= self.max_jobs:
            reason = f"{backlog.num_jobs()} requests are waiting or running, and no more may"
            return Refused(reason, None, RefusalCode.QUEUE)
        if not backlog.gpus:
            if request.is_promise:
                return Refused("no device is up", None, RefusalCode.NO_DEVICE)
            why = "no device is up; the time counts from now"
            return Admitted(now_ns + demand.run_ns, why, Forecast(demand.run_ns, 0, 1.0))
        ask = _Ask.of(request, policy, costs, backlog, now_ns)
        plain_ns = ask.eta_ns(request)
        num_jobs = backlog.num_jobs()
        forecast = Forecast(plain_ns - now_ns, num_jobs, self._experience.ratio(request, num_jobs))
        eta_ns = now_ns + int(forecast.ratio * forecast.predicted_ns)
        if not request.is_promise:
            return Admitted(eta_ns, _why(demand, backlog), forecast)
        assert request.deadline_ns is not None
        promised = ask.promised(request)
        if plain_ns > request.deadline_ns or promised is None:
            return self._refused(ask, plain_ns)
        why = f"{_why(demand, backlog)}; its deadline is promised"
        return Admitted(min(eta_ns, request.deadline_ns), why, forecast, promised)

    def learn(self, request: Request, forecast: Forecast, actual_ns: int) -> None:
        """Correct the predictions for requests of this kind by how one has come out."""
        self._experience.learn(request, forecast.num_jobs, forecast.predicted_ns, actual_ns)

    def eta_ns(self, job: JobView, backlog: Backlog, now_ns: int) -> int:
        """When a job that is in is expected to end, by the same rule."""
        plain_ns = self._plain_ns(job, backlog, now_ns)
        return max(now_ns, now_ns + int(job.forecast.ratio * (plain_ns - now_ns)))

    def _plain_ns(self, job: JobView, backlog: Backlog, now_ns: int) -> int:
        if not backlog.gpus:
            return now_ns + job.demand.run_ns
        begin_ns = max(now_ns, ready_ns(job, {gpu.gpu: gpu for gpu in backlog.gpus}))
        if job.stage is None:
            return begin_ns
        free_ns = [gpu.free_ns for gpu in backlog.gpus]
        return finish_ns(free_ns, backlog.ahead(job.urgency_ns, job.job_id), job.demand, begin_ns)

    def _refused(self, ask: _Ask, eta_ns: int) -> Refused:
        request, earliest_ns = ask.request, ask.earliest_ns()
        assert request.deadline_ns is not None
        if eta_ns > request.deadline_ns:
            late_s = s_from_ns(eta_ns - request.deadline_ns)
            reason = f"it would be {late_s:.2f} s late behind {ask.backlog.num_jobs()} other requests"
        else:
            reason = f"what is promised to {len(ask.backlog.promised())} other requests leaves no room for it"
        return Refused(reason, earliest_ns, RefusalCode.DEADLINE)


@dataclass(frozen=True, slots=True)
class _Ask:
    """A request at the door, and what is behind it."""

    request: Request
    policy: Policy
    costs: CostModel
    backlog: Backlog
    promises: Promises
    now_ns: int

    @staticmethod
    def of(request: Request, policy: Policy, costs: CostModel, backlog: Backlog, now_ns: int) -> _Ask:
        gpus = backlog.gpus
        blocks = blocks_of(gpus, backlog.promised()) if request.is_promise else []
        return _Ask(request, policy, costs, backlog, Promises(levels_of(gpus), blocks, now_ns), now_ns)

    def eta_ns(self, request: Request) -> int:
        """When the policy would be done with it."""
        ahead = self.backlog.ahead(self.policy.urgency_ns(request, False))
        demand = self.policy.demand(request, Cursor.start(request), self.costs)
        return finish_ns([gpu.free_ns for gpu in self.backlog.gpus], ahead, demand)

    def promised(self, request: Request) -> Demand | None:
        """The cheapest block, in GPU-time, with which its deadline can be promised."""
        assert request.deadline_ns is not None
        for block in self._blocks():
            if self.promises.end_ns(request.deadline_ns, block) is not None:
                return block
        return None

    def earliest_ns(self) -> int:
        """The earliest deadline with which it would be let in, by its cheapest block in GPU-time or by its quickest.

        A later deadline may put it further behind others, so that its finish is predicted anew.
        """
        blocks, due_ns = self._blocks(), self.now_ns
        blocks = [blocks[0], min(blocks, key=lambda block: block.run_ns)]
        for _ in range(_TRIALS):
            due_ns = min(self.promises.earliest_ns(block, due_ns) for block in blocks)
            eta_ns = self.eta_ns(replace(self.request, deadline_ns=due_ns))
            if eta_ns <= due_ns:
                break
            due_ns = eta_ns
        return due_ns

    def _blocks(self) -> Sequence[Demand]:
        start = Cursor.start(self.request)
        blocks = [
            demand_at(self.request, start, degree, self.costs)
            for degree in self.policy.degrees(self.request, self.costs)
        ]
        return sorted(blocks, key=lambda block: (block.width * block.run_ns, block.width))


def _why(demand: Demand, backlog: Backlog) -> str:
    gpus = "1 GPU" if demand.width == 1 else f"{demand.width} GPUs"
    return f"it needs {s_from_ns(demand.run_ns):.2f} s of {gpus}, beside {backlog.num_jobs()} other requests"
