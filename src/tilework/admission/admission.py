"""Admission of requests: acceptance or refusal, and the predicted finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import TypeGuard

from tilework.admission.admission_limits import AdmissionLimits
from tilework.admission.contract import Admitted, Backlog, EtaPrediction
from tilework.admission.eta import Eta, end_after, serving
from tilework.admission.eta_correction import EtaCorrection
from tilework.admission.free_after import FreeAfterAhead
from tilework.admission.loads import expected_ns, too_large
from tilework.admission.promise_query import PromiseQuery, others_text
from tilework.admission.reservation_book import ReservationBook
from tilework.admission.reservations import Reservations, SearchBudget
from tilework.core.actions import Reject
from tilework.core.block import Block, Demand
from tilework.core.component import bytes_text, num_bytes
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import DeviceKind
from tilework.core.policy import DeviceView, JobView, Policy
from tilework.core.request import EXACT_NEEDS_MORE, RefusalCode, Request, RequestClass, cost_key
from tilework.cost.demand import fastest, fits_at
from tilework.cost.table_costs import TableCosts
from tilework.policy.toolkit.known_demands import ByClass
from tilework.policy.toolkit.starts import needs
from tilework.policy.traits import PredictsEnds, RefusesRequests

PROMISE_PRICE = 1.0
"""Default number of kept deadlines of other jobs that a promise may cost."""
_SILENT = "all nodes that could serve this request have been silent for a second; ask again, or without a promise"


@dataclass(slots=True, kw_only=True)
class Admission:
    """Accepts or refuses requests.
    A request is refused only if the limits leave no room for it, if its promise could not be kept, or if it would be
    late on idle devices and is worthless then (`on_miss: drop`).

    The finish is predicted by the policy if it looks that far ahead (`PredictsEnds`). Otherwise each job that is served
    before the request is placed, in order, on as many devices as the policy would give it, those that are free first
    (`admission.eta`). Both predictions are corrected by the errors of earlier ones (`admission.eta_correction`). A
    promise (`on_miss: reject`) needs more than a good prediction: a proof that later requests cannot invalidate
    (`admission.reservations`). It must not cost other jobs more than `promise_price` deadlines.
    """

    limits: AdmissionLimits
    promise_price: float = PROMISE_PRICE
    book: ReservationBook = field(default_factory=ReservationBook)
    _eta: Eta = field(default_factory=Eta, init=False)
    _eta_correction: EtaCorrection = field(default_factory=EtaCorrection, init=False)
    _fitting: ByClass[RequestClass, tuple[int, int]] = field(default_factory=ByClass, init=False)

    def admit(
        self,
        request: Request,
        left: Cursor,
        policy: Policy,
        costs: TableCosts,
        backlog: Backlog,
        now_ns: int,
        budget: SearchBudget,
    ) -> Admitted | Reject:
        """Accept or refuse a request with this remaining work. Raises UnknownCost.

        A promise needs a proof for the whole of the request. Its refusal has a deadline that could be promised, the
        earliest that the `budget` of its call finds.
        """
        demand = policy.demand(request, costs.start(request), costs)  # Policies learn from it which requests come.
        if left.position:
            demand = policy.demand(request, left, costs)
        no_room = self.limits.refusal(request, backlog)
        if no_room is None and backlog.devices and _may_refuse(policy):
            no_room = policy.refusal(request, costs, now_ns)
        if no_room is not None:
            if request.is_promise or no_room.retry_ns is None:
                return no_room
            return _with_earliest(no_room, demand, self._eta.free_before(request, policy, costs.pools, backlog), now_ns)
        devices = serving(backlog.devices, costs.pools.within(request.pipeline))
        answer = _without_room(request, costs, devices) or _without_devices(request, demand, devices, backlog, now_ns)
        if answer is not None:
            return answer
        if (no_memory := self._without_memory(request, policy, costs, backlog)) is not None:
            return no_memory
        if (too_late := _too_late(request, left, policy, costs, now_ns)) is not None:
            return too_late
        parts = self._eta.free_before(request, policy, costs.pools, backlog)
        num_jobs = backlog.held().num_jobs
        end_ns = end_after(parts, demand)
        if backlog.needs_loads:
            end_ns += expected_ns(left, devices, costs.weights)
        eta_prediction = self._eta_correction.predict(request, now_ns, end_ns, num_jobs)
        encoded = " (prompt already encoded)" if left.position else ""
        why = f"needs {needs(demand)}{encoded}; {others_text(num_jobs)}"
        if not request.is_promise:
            return Admitted(why, eta_prediction, demand)
        assert request.deadline_ns is not None
        self.book.follow_devices(backlog)
        reservations = Reservations(self.book, now_ns, budget, backlog.silent)
        query = PromiseQuery.of(
            request,
            policy,
            costs,
            backlog,
            reservations=reservations,
            left=left if budget.is_restored else costs.start(request),
            eta=self._eta,
            price=inf if budget.is_restored else self.promise_price,
        )
        promise = query.promise()
        if isinstance(promise, Reject):
            return promise
        why += "; its deadline is promised"
        return Admitted(why, self._kept(eta_prediction, promise.block, now_ns), demand, promise)

    def _without_memory(self, request: Request, policy: Policy, costs: TableCosts, backlog: Backlog) -> Reject | None:
        """Return `_too_large`; that a class of requests fits is remembered until costs or devices change."""
        key = cost_key(request)
        state = (costs.version_of(request), backlog.widest(request.pipeline))
        if self._fitting.get(key) == state:
            return None
        refused = _too_large(request, policy, costs, backlog)
        if refused is None:
            self._fitting[key] = state
        return refused

    def after_all_ns(self, requests: Sequence[Request], policy: Policy, costs: TableCosts, now_ns: int) -> int:
        """Return a deadline that leaves time for all these requests, one after another, after all reservations."""
        run_ns = sum(policy.demand(one, costs.start(one), costs).run_ns for one in requests)
        last_ns = max([now_ns, *(due_ns for due_ns, _ in self.book.keys[-1:])])
        return self.book.margins.admission.due_ns(last_ns + run_ns, now_ns)

    def shared_ns(self, requests: Sequence[Request], policy: Policy, costs: TableCosts, backlog: Backlog) -> int:
        """Return by how much a deadline must move for these requests, too, if they share the devices evenly."""
        device_ns = sum(policy.demand(one, costs.start(one), costs).device_ns for one in requests)
        return device_ns * (1000 + backlog.margins.admission.permille) // (1000 * len(backlog.devices))

    def learn(self, request: Request, told: EtaPrediction, now_ns: int, num_came: int) -> None:
        """Correct the predictions for requests like this one, which has just finished and was told this prediction.

        `num_came` other requests were accepted after it.
        """
        self._eta_correction.learn(request, told, now_ns, num_came)

    def forget(self, pipeline: str) -> None:
        """Drop all that is known under a pipeline's name: it is served no more."""
        for known in (self._eta, self._eta_correction, self._fitting):
            known.forget(pipeline)

    def foreseen(self, job: JobView, policy: Policy, backlog: Backlog, now_ns: int) -> EtaPrediction | None:
        """Return the end of an accepted job as the policy predicts it now; None if the policy does not know."""
        end_ns = policy.end_ns(job) if _may_foresee(policy) else None
        if end_ns is None:
            return None
        return self._prediction(job, end_ns, backlog.held().num_jobs - 1, now_ns, is_foreseen=True)

    def predict(self, job: JobView, policy: Policy, costs: TableCosts, backlog: Backlog, now_ns: int) -> EtaPrediction:
        """Return when an accepted job is expected to end, predicted now."""
        num_others = backlog.held().num_jobs - 1
        if job.committed.stage is None:
            num_others = 0  # No other job can delay it.
        elif (foreseen := self.foreseen(job, policy, backlog, now_ns)) is not None:
            return foreseen
        end_ns = self._eta.end_of(job, costs.pools, backlog, now_ns)
        if backlog.needs_loads:
            devices = serving(backlog.devices, costs.pools.within(job.request.pipeline))
            end_ns += expected_ns(job.committed, devices, costs.weights)
        return self._prediction(job, end_ns, num_others, now_ns)

    def _prediction(
        self, job: JobView, end_ns: int, num_others: int, now_ns: int, *, is_foreseen: bool = False
    ) -> EtaPrediction:
        found = self._eta_correction.predict(job.request, now_ns, end_ns, num_others, is_foreseen=is_foreseen)
        return found if job.promised is None else self._kept(found, job.promised, now_ns)

    def _kept(self, found: EtaPrediction, block: Block, now_ns: int) -> EtaPrediction:
        """Return the prediction for a promised job: it ends in time, at the latest when the guard lets it end."""
        return found.by(self.book.margins.guard.latest_ns(block.due_ns, now_ns))


def _may_refuse(policy: Policy) -> TypeGuard[RefusesRequests]:
    return _is_a(type(policy), RefusesRequests)


def _may_foresee(policy: Policy) -> TypeGuard[PredictsEnds]:
    return _is_a(type(policy), PredictsEnds)


@cache
def _is_a(kind: type, protocol: type) -> bool:
    """Return whether `kind` has the protocol. Cached: the check takes longer than all else in most admissions."""
    return issubclass(kind, protocol)


def _with_earliest(no_room: Reject, demand: Demand, parts: Sequence[FreeAfterAhead], now_ns: int) -> Reject:
    """Return the refusal with the earliest finish of the request if it were accepted once other jobs make room.

    That is unknown for a promise, which would also need a place among the reservations at that time.
    """
    assert no_room.retry_ns is not None
    alone_ns = now_ns + no_room.retry_ns + demand.run_ns
    return replace(no_room, earliest_ns=max(end_after(parts, demand), alone_ns) if parts else alone_ns)


def _too_late(request: Request, left: Cursor, policy: Policy, costs: TableCosts, now_ns: int) -> Reject | None:
    """Return the refusal of a request that is worthless when late, and would be late even if nothing else ran."""
    if not request.is_dropped_if_late:
        return None
    assert request.deadline_ns is not None
    least = fastest(request, left, policy.degrees(request, costs), costs)
    end_ns = now_ns + least.run_ns
    if end_ns <= request.deadline_ns:
        return None
    return Reject(request.uid, f"alone it needs {needs(least)}", end_ns, RefusalCode.DEADLINE)


def _without_devices(
    request: Request, demand: Demand, devices: Sequence[DeviceView], backlog: Backlog, now_ns: int
) -> Admitted | Reject | None:
    """Return the answer if no device that serves the request is up, or a promise can rely on none of them."""
    if not devices:
        none_up = f"no device that serves {request.pipeline} is up" if backlog.devices else "no device is up"
        if request.is_promise:
            return Reject(request.uid, none_up, None, RefusalCode.NO_DEVICE)
        why = f"{none_up}; the prediction assumes that one is up now"
        return Admitted(why, EtaPrediction.alone(now_ns, demand), demand)
    if not request.is_promise:
        return None
    silent = backlog.silent
    if silent.issuperset(one.device_id for one in devices):
        return Reject(request.uid, _SILENT, None, RefusalCode.NO_DEVICE)
    if demand.slot is not None and silent.issuperset(one.device_id for one in backlog.slots):
        reason = _SILENT if backlog.slots else "no CPU slot is up"
        return Reject(request.uid, reason, None, RefusalCode.NO_DEVICE)
    return None


def _without_room(request: Request, costs: TableCosts, devices: Sequence[DeviceView]) -> Reject | None:
    """Return the refusal of a request whose weights do not fit onto a device that serves it, also if none is up."""
    if not costs.weights.all or (found := too_large(request, devices, costs)) is None:
        return None
    stage, most = found
    is_of_loras = bool(request.loras) and too_large(replace(request, loras=()), devices, costs) is None
    code = RefusalCode.LORAS if is_of_loras else RefusalCode.WEIGHTS
    taken, had = bytes_text(num_bytes(costs.weights.components(stage))), bytes_text(most)
    reason = f"the weights of {stage} take {taken}, and a device has {had} for them"
    return Reject(request.uid, reason, None, code)


def _too_large(request: Request, policy: Policy, costs: TableCosts, backlog: Backlog) -> Reject | None:
    """Return the refusal of a request that is known not to fit into the memory of the devices that it may get."""
    shape = request.shape
    widest = backlog.widest(request.pipeline)
    degrees = [degree for degree in policy.degrees(request, costs) if degree <= widest] or [1]
    stages = costs.graph(request.pipeline).stages
    at_once = [stage for stage in stages if not stage.has_steps and stage.kind is DeviceKind.ACCELERATOR]
    others_fit = all(
        costs.fits(stage, shape, 1) and not (request.exact and costs.needs_slices(stage, shape)) for stage in at_once
    )
    if others_fit and any(fits_at(request, degree, costs) for degree in degrees):
        return None
    devices = "one of the devices" if max(degrees) == 1 else f"{max(degrees)} of the devices"
    reason = f"{shape} needs more memory than there is on {devices}"
    if request.exact:
        reason += f"; {EXACT_NEEDS_MORE}"
    return Reject(request.uid, reason, None, RefusalCode.MEMORY)
