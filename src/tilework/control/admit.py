"""New requests: accepted with an ETA, or refused. Requests submitted together are accepted all or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tilework.admission.admission import Admission
from tilework.admission.contract import Admitted, EtaPrediction, Promise
from tilework.admission.reservation_guard import ReservationGuard
from tilework.admission.reservations import SearchBudget
from tilework.control.cluster.job import Job
from tilework.control.cluster.tracker import Tracker
from tilework.control.expiry import Expiry
from tilework.core.actions import Accept, Action, Reject, Stop
from tilework.core.block import Block
from tilework.core.policy import Policy
from tilework.core.request import RefusalCode, Request
from tilework.cost.table_costs import TableCosts
from tilework.cost.tabled import UnknownCost

_MOST_ASKED = 24  # Requests in all trials of a search for a deadline with which all of a call are accepted.


class _Entered(NamedTuple):
    """A job that was entered, and the former reservations of other jobs, by job id."""

    job: Job
    former: Mapping[int, Block]


class Admit:
    """Turns requests into jobs if admission accepts them."""

    def __init__(
        self,
        rule: Admission,
        policy: Policy,
        costs: TableCosts,
        tracker: Tracker,
        guard: ReservationGuard,
        expiry: Expiry,
    ) -> None:
        self._expiry = expiry
        self._rule = rule
        self._policy = policy
        self._costs = costs
        self._tracker = tracker
        self._guard = guard
        self._next_job_id = 0

    @property
    def num_accepted(self) -> int:
        """Number of requests that were accepted; their job ids are in order."""
        return self._next_job_id

    def admit(self, begun: Sequence[tuple[Request, int]], now_ns: int) -> list[Action]:
        """Accept all requests, or refuse all; each comes with the position at which it begins."""
        entered: list[_Entered] = []
        accepts: list[Action] = []
        budget = SearchBudget(may_stop=len(begun) == 1)
        for request, position in begun:
            chosen, answer = self._ask(request, now_ns, budget, position)
            if isinstance(answer, Reject):
                self._take_back(entered)
                return self._reject([request for request, _ in begun], len(entered), answer, now_ns, budget)
            entered.append(self._enter(chosen, answer, len(entered), position))
            uses_cache = chosen.cache != request.cache
            accepts.append(_accept(entered[-1].job, answer.why, uses_cache=uses_cache))
            accepts += self._stop(answer.promise)
        self._next_job_id += len(entered)
        for one in entered:  # Not before all are accepted: the heap of times to look cannot take a job back.
            self._expiry.watch(one.job)
        if any(one.job.promised is not None for one in entered):
            self._guard.recheck()
        return accepts

    def _stop(self, promise: Promise | None) -> list[Action]:
        """Stop the works that must stop for a promise."""
        stopped = promise.stops if promise is not None else ()
        sets = [self._tracker.sharing(self._tracker.jobs[job_id]) for job_id in stopped]
        return [Stop(work.work_id) for jobs in sets for work in self._tracker.stop(jobs)]

    def restore(self, request: Request, position: int, now_ns: int) -> list[Action]:
        """Accept a request that was accepted before a restart, even if admission would refuse it now.

        In that case its deadline is not promised. It is refused only if its cost is unknown.
        """
        chosen, answer = self._ask(request, now_ns, SearchBudget(is_restored=True), position)
        if isinstance(answer, Reject) and answer.code is RefusalCode.UNKNOWN_COST:
            return [answer]
        if isinstance(answer, Reject):
            demand = self._policy.demand(chosen, self._costs.start(chosen), self._costs)
            answer = Admitted(answer.reason, EtaPrediction.alone(now_ns, demand), demand)
        if position:
            left = self._costs.start(chosen).itinerary.at[position]
            answer = replace(answer, demand=self._policy.demand(chosen, left, self._costs))
        job = self._enter(chosen, answer, 0, position).job
        self._next_job_id += 1
        self._expiry.watch(job)
        self._guard.recheck()
        why = f"it had been accepted before; {answer.why}"
        return [_accept(job, why, uses_cache=chosen.cache != request.cache)]

    def after_plan(self, actions: Sequence[Action], now_ns: int) -> list[Action]:
        """Return the actions, with the finish of each accepted request as the following plan predicts it, if any."""
        return [self._foreseen(action, now_ns) if isinstance(action, Accept) else action for action in actions]

    def _foreseen(self, accept: Accept, now_ns: int) -> Accept:
        job = self._tracker.jobs.get(accept.job_id)  # None if it has ended already.
        if job is None or (found := self._rule.foreseen(job, self._policy, self._tracker, now_ns)) is None:
            return accept
        job.eta_prediction = found
        return replace(accept, eta_ns=found.eta_ns, eta_p90_ns=found.p90_ns)

    def _ask(
        self, request: Request, now_ns: int, budget: SearchBudget, position: int = 0
    ) -> tuple[Request, Admitted | Reject]:
        """Return the answer to a request, and the request that it is for: the same, or one with its spare cache."""
        answer = self._answer(request, now_ns, budget, position)
        due_ns = request.deadline_ns
        if request.spare_cache is None:
            return request, answer
        if isinstance(answer, Admitted) and (due_ns is None or answer.eta_prediction.eta_ns <= due_ns):
            return request, answer
        cached = self._answer(request.with_spare_cache, now_ns, budget, position)
        if isinstance(cached, Reject):
            return request, answer
        return request.with_spare_cache, replace(
            cached, why=f"{cached.why}; it has a cache, since it would be late without"
        )

    def _answer(self, request: Request, now_ns: int, budget: SearchBudget, position: int) -> Admitted | Reject:
        try:
            left = self._costs.start(request).itinerary.at[position]
            return self._rule.admit(request, left, self._policy, self._costs, self._tracker, now_ns, budget)
        except UnknownCost as error:
            return Reject(request.uid, str(error), None, RefusalCode.UNKNOWN_COST)

    def _enter(self, request: Request, answer: Admitted, index: int, position: int = 0) -> _Entered:
        promise = answer.promise
        former: dict[int, Block] = {}
        if promise is not None:
            for job_id in promise.others:
                block = self._tracker.jobs[job_id].promised
                assert block is not None
                former[job_id] = block
            self._tracker.reserve_all(promise.others)
        delay_ns = self._tracker.delay_ns(request)
        job = Job(
            job_id=self._next_job_id + index,
            request=request,
            urgency_ns=self._policy.urgency_ns(request, False, delay_ns),
            delay_ns=delay_ns,
            promised=None if promise is None else promise.block,
            eta_prediction=answer.eta_prediction,
            demand=answer.demand,
            done=self._costs.start(request).itinerary.at[position],
        )
        self._tracker.add_job(job)
        return _Entered(job, former)

    def _take_back(self, entered: Sequence[_Entered]) -> None:
        for job, former in reversed(entered):
            self._tracker.remove_job(job)
            self._tracker.reserve_all(former)

    def _reject(
        self, requests: Sequence[Request], index: int, answer: Reject, now_ns: int, budget: SearchBudget
    ) -> list[Action]:
        """Refuse all requests, since the request with this index is refused."""
        if len(requests) > 1:
            earliest_ns = answer.earliest_ns
            retry_ns = answer.retry_ns
            due_ns = requests[index].deadline_ns
            if earliest_ns is not None and due_ns is not None and answer.code is RefusalCode.DEADLINE:
                earliest_ns = self._earliest_ns(requests, index, earliest_ns, now_ns, budget)
                if retry_ns is not None:
                    retry_ns = None if earliest_ns is None else max(1, earliest_ns - due_ns)
            reason = f"{answer.reason} (request {index + 1} of {len(requests)} submitted together)"
            answer = replace(answer, reason=reason, earliest_ns=earliest_ns, retry_ns=retry_ns)
        return [replace(answer, uid=request.uid) for request in requests]

    def _earliest_ns(
        self, requests: Sequence[Request], index: int, due_ns: int, now_ns: int, budget: SearchBudget
    ) -> int | None:
        """Return a deadline with which all requests would be accepted together, about the earliest; None if not found.

        The request with this index could be accepted with `due_ns`, the earlier ones before it. In each trial the first
        refused request says which deadline it needs, and the next trial leaves time for the requests after it, too.
        That may be earlier than the deadline just tried, since a later deadline can break a promise that an earlier one
        does not break. In that case the next trial is later by a step that doubles. The last trial is after all
        reservations. The more requests, the fewer trials: together they cost no more than some single requests.
        """
        step_ns = (due_ns - now_ns) // 32
        num_trials = max(2, _MOST_ASKED // len(requests))
        due_ns = self._with_others(requests, index, due_ns)
        for number in range(num_trials):
            if number == num_trials - 1:
                due_ns = max(due_ns, self._rule.after_all_ns(requests, self._policy, self._costs, now_ns))
            trial = [replace(request, deadline_ns=due_ns) for request in requests]
            index, refusal = self._trial(trial, now_ns, budget)
            if refusal is None:
                return due_ns
            if refusal.earliest_ns is None:
                return None  # No deadline helps: a limit, or a share, is in the way.
            if refusal.earliest_ns > due_ns:
                due_ns = self._with_others(requests, index, refusal.earliest_ns)
            else:
                due_ns, step_ns = due_ns + step_ns, 2 * step_ns
        return None

    def _with_others(self, requests: Sequence[Request], index: int, due_ns: int) -> int:
        """Return a deadline for the requests up to this one, and for those after it."""
        return due_ns + self._rule.shared_ns(requests[index + 1 :], self._policy, self._costs, self._tracker)

    def _trial(self, requests: Sequence[Request], now_ns: int, budget: SearchBudget) -> tuple[int, Reject | None]:
        """Return the index of the first of these requests that would be refused, and its refusal or None."""
        entered: list[_Entered] = []
        try:
            for request in requests:
                chosen, answer = self._ask(request, now_ns, budget)
                if isinstance(answer, Reject):
                    return len(entered), answer
                entered.append(self._enter(chosen, answer, len(entered)))
            return len(entered), None
        finally:
            self._take_back(entered)


def _accept(job: Job, why: str, *, uses_cache: bool) -> Accept:
    told = job.eta_prediction
    return Accept(job.job_id, job.request.uid, told.eta_ns, told.p90_ns, why, uses_cache)
