"""Queries for promises: whether the deadline of a new request can be promised, and the earliest that could be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import NamedTuple

from tilework.admission.contract import Backlog, Boundary, EtaPrediction, Promise
from tilework.admission.eta import Eta, end_after
from tilework.admission.loads import load_bound_ns
from tilework.admission.proof_search import ProofSearch
from tilework.admission.reservation_timeline import nodes_within
from tilework.admission.reservations import Reservations
from tilework.admission.what_if import WhatIf
from tilework.core.actions import Reject
from tilework.core.block import Block, Demand
from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import Stage
from tilework.core.policy import Policy
from tilework.core.pools import Within
from tilework.core.request import RefusalCode, Request
from tilework.core.time import s_from_ns
from tilework.core.work import Group, Work
from tilework.cost.demand import demand_at, usable_degree
from tilework.cost.table_costs import TableCosts
from tilework.policy.traits import WeighsJobs

_MOST_TRIED = 6  # Deadlines that are tried until one is late enough.
_MANY = 64  # Reservations, beyond which groups are not chosen anew for a new request.
_MOST_PLACES = 4  # Other places in the order that are searched.


class _Against(NamedTuple):
    """An objection to a promise by some deadline, apart from reservations; and the next deadline to try."""

    why: str
    later_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseQuery:
    """A request that asks for a promise.

    `blocks` are the ways in which the policy may run it, the cheapest in device time first. `price` is the number of
    deadlines of other jobs that a promise may cost; inf: every promise with a proof is made.
    """

    request: Request
    policy: Policy
    costs: TableCosts
    backlog: Backlog
    reservations: Reservations
    left: Cursor
    blocks: Sequence[Demand]
    eta: Eta
    price: float

    @staticmethod
    def of(
        request: Request,
        policy: Policy,
        costs: TableCosts,
        backlog: Backlog,
        *,
        reservations: Reservations,
        left: Cursor,
        eta: Eta,
        price: float,
    ) -> PromiseQuery:
        """Prepare a query for a request with this remaining work; a device that serves it is up. Raises UnknownCost."""
        widest = max(map(len, nodes_within(reservations.places.nodes, costs.pools.within(request.pipeline))))
        degrees = {usable_degree(request, min(degree, widest), costs) for degree in policy.degrees(request, costs)}
        loads_ns = partial(load_bound_ns, weights=costs.weights) if backlog.needs_loads else None
        blocks = [demand_at(request, left, degree, costs, loads_ns) for degree in degrees]
        blocks.sort(key=lambda block: (block.device_ns, block.width))
        return PromiseQuery(
            request=request,
            policy=policy,
            costs=costs,
            backlog=backlog,
            reservations=reservations,
            left=left,
            blocks=blocks,
            eta=eta,
            price=price,
        )

    @property
    def now_ns(self) -> int:
        return self.reservations.now_ns

    @property
    def _within(self) -> Within:
        return self.costs.pools.within(self.request.pipeline)

    def promise(self) -> Promise | Reject:
        """Return how the deadline can be promised, or a refusal with an earliest deadline that could be.

        First the promise must be worth its price. Then there must be a proof: beside the other reservations as they
        are, in the width that takes the least device time; or with their groups and widths chosen anew; or if works are
        stopped, too; or any of these as for an earlier deadline, so that a later deadline is not refused where an
        earlier one is promised.
        """
        deadline_ns = self.request.deadline_ns
        assert deadline_ns is not None
        idle_ns = self.reservations.margin.due_ns(self.now_ns + min(map(_run_ns, self.blocks)), self.now_ns)
        if idle_ns > deadline_ns:
            needed = f"even if nothing else runs, a promise needs {s_from_ns(idle_ns - self.now_ns):.2f} s"
            reason = f"{needed}, and there are {others_text(self.backlog.held().num_jobs)}"
            return Reject(self.request.uid, reason, self._earliest_ns(idle_ns), RefusalCode.DEADLINE)
        against = self._against(deadline_ns)
        promise = None
        if against is None:
            promise = self._beside_others(deadline_ns) or self._anew(deadline_ns)
        if promise is None:
            promise = self._as_if_earlier(idle_ns, deadline_ns)
        if promise is not None:
            return promise
        earliest_ns = self._earliest_ns(deadline_ns + 1)
        later_ns = self.reservations.looser_places(deadline_ns, earliest_ns)[:_MOST_PLACES]
        earliest_ns = next((due_ns for due_ns in later_ns if self._at_place(due_ns) is not None), earliest_ns)
        why = "reservations leave no room for it" if against is None else against.why
        reason = f"{why}, with {others_text(self.backlog.held().num_jobs)} present"
        return Reject(self.request.uid, reason, earliest_ns, RefusalCode.DEADLINE, earliest_ns - deadline_ns)

    def _as_if_earlier(self, idle_ns: int, deadline_ns: int) -> Promise | None:
        earlier_ns = self.reservations.looser_places(idle_ns, deadline_ns)[-_MOST_PLACES:]
        promise = next((one for one in map(self._at_place, reversed(earlier_ns)) if one is not None), None)
        if promise is not None:
            return promise
        earliest_ns = self._earliest_ns(self.now_ns)
        return self._beside_others(earliest_ns) if earliest_ns <= deadline_ns else None

    def _at_place(self, due_ns: int) -> Promise | None:
        """Return the promise by another deadline; None also if there are many reservations, since this is a search."""
        if len(self.backlog.promised()) > _MANY or self._against(due_ns) is not None:
            return None
        return self._beside_others(due_ns) or self._anew(due_ns)

    def _earliest_ns(self, at_least_ns: int) -> int:
        """Return the earliest deadline that could be promised, with the cheapest or the fastest block, beside others.

        After six deadlines that are not worth their price, the next one is returned without that check.
        """
        due_ns = at_least_ns
        blocks = dict.fromkeys((self.blocks[0], min(self.blocks, key=_run_ns)))  # A set would decide their order anew.
        for _ in range(_MOST_TRIED):
            due_ns = min(self.reservations.earliest_ns(block, due_ns, self._within) for block in blocks)
            against = self._against(due_ns)
            if against is None:
                break
            due_ns = against.later_ns
        return due_ns

    def _against(self, due_ns: int) -> _Against | None:
        """Return the objection to this deadline: more other jobs would be late than it is worth, or it would be itself.

        The second objection is only raised if the policy cannot predict more: what has a proof is in time.
        """
        if self.price == inf:
            return None
        newcomer = self._newcomer(due_ns)
        if not isinstance(self.policy, WeighsJobs):
            parts = self.eta.free_before(newcomer.request, self.policy, self.costs.pools, self.backlog)
            end_ns = min(end_after(parts, block) for block in self.blocks)
            late_s = s_from_ns(end_ns - due_ns)
            return _Against(f"it would be {late_s:.2f} s late", end_ns) if end_ns > due_ns else None
        num_missed = self.policy.num_missed(newcomer, self.backlog, self.costs, self.now_ns)
        if num_missed <= self.price:
            return None
        why = f"{others_text(num_missed)} would be late because of it"
        return _Against(why, due_ns + (due_ns - self.now_ns) // 2)

    def _newcomer(self, due_ns: int) -> Newcomer:
        """Return the request as a job with this deadline."""
        request = replace(self.request, deadline_ns=due_ns)
        delay_ns = self.backlog.delay_ns(request)
        return Newcomer(
            request=request,
            committed=self.left,
            demand=self.blocks[0],
            urgency_ns=self.policy.urgency_ns(request, False, delay_ns),
            delay_ns=delay_ns,
            promised=Block(due_ns, 0, self.blocks[0], within=self._within),
        )

    def _beside_others(self, due_ns: int) -> Promise | None:
        placed = (self.reservations.place(due_ns, block, self._within) for block in self.blocks)
        return next((Promise(block) for block in placed if block is not None), None)

    def _anew(self, due_ns: int) -> Promise | None:
        if self.backlog.silent or len(self.backlog.promised()) > _MANY:
            return None  # Groups are not chosen anew on devices that may be lost.
        newcomer = self._newcomer(due_ns)
        what_if = WhatIf.now(self.backlog, self.costs, self.now_ns)
        found = self._search(what_if, newcomer)
        may_stop = self.reservations.budget.may_stop and isinstance(self.policy, WeighsJobs)
        if found is not None or not may_stop:
            return found
        boundaries = self.backlog.boundaries()
        found = self._search(_stopped(what_if, boundaries), newcomer) if boundaries else None
        if found is None:
            return None
        needed = [one for one in boundaries if self._must_stop(one, what_if, found)]
        fewer = self._search(_stopped(what_if, needed), newcomer) if len(needed) < len(boundaries) else None
        stopped, found = (boundaries, found) if fewer is None else (needed, fewer)
        return found._replace(stops=tuple(next(iter(one.positions)) for one in stopped))

    def _search(self, what_if: WhatIf, newcomer: Newcomer) -> Promise | None:
        search = ProofSearch.of_all(what_if, self.policy.degrees).with_newcomer(newcomer, self.reservations.margin)
        found = search.in_time()
        if found is None:
            return None
        block = next(block for job, block in zip(search.jobs, found.blocks, strict=True) if job is newcomer)
        return Promise(block, search.adopted(found))

    @staticmethod
    def _must_stop(boundary: Boundary, what_if: WhatIf, found: Promise) -> bool:
        """Return whether works at this boundary occupy the group of a reservation that is new or has changed."""
        wanted = {one for block in (found.block, *found.others.values()) for one, _, _ in block.windows()}
        return any(what_if.free_ns[one] > at_ns for one, at_ns in boundary.free_ns.items() if one in wanted)


def _stopped(what_if: WhatIf, boundaries: Sequence[Boundary]) -> WhatIf:
    for boundary in boundaries:
        what_if = what_if.after_stop(boundary)
    return what_if


def _run_ns(block: Demand) -> int:
    return block.run_ns


_LAST = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """A request that is not accepted yet, as a job without works, to ask what would happen if it were accepted.

    It is a `JobView`, and comes after all jobs with the same deadline.
    """

    request: Request
    committed: Cursor
    demand: Demand
    urgency_ns: int
    delay_ns: int
    promised: Block | None
    job_id: int = _LAST
    dropped_to_best_effort: bool = False
    is_stopping: bool = False
    may_stop: bool = False
    last_devices: Group = ()
    works: Sequence[Work] = ()

    @property
    def eta_prediction(self) -> EtaPrediction:
        return EtaPrediction.alone(self.request.arrival_ns, self.demand)

    @property
    def left(self) -> Cursor:
        return self.committed.leg

    @property
    def stage(self) -> Stage | None:
        return self.left.stage

    @property
    def num_steps_left(self) -> int:
        return self.left.num_steps_left

    @property
    def may_share(self) -> bool:
        return not self.request.exact and self.request.passes == 1


def others_text(count: int) -> str:
    return {0: "no other requests", 1: "1 other request"}.get(count, f"{count} other requests")
