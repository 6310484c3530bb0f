"""Whether the deadline of a new request can be promised, and otherwise the earliest deadline that could be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from tilework.admission.eta import Eta, end_after
from tilework.admission.free_after import FreeAfterAhead
from tilework.admission.loads import load_bound_ns
from tilework.admission.reservation_timeline import nodes_within
from tilework.admission.reservations import Reservations
from tilework.core.actions import Reject
from tilework.core.interfaces import Backlog, Block, CostModel, Demand, Policy
from tilework.core.pools import Pools, Within
from tilework.core.request import RefusalCode, Request
from tilework.core.time import s_from_ns
from tilework.policy.toolkit.demand import demand_at, usable_degree
from tilework.policy.toolkit.margin import ADMISSION_MARGIN

_MOST_TRIED = 8  # Deadlines that are tried until one is late enough.


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseQuery:
    """A request that asks for a promise.

    `blocks` are the ways in which the policy may run it, the cheapest in device time first. `ends_ns` is when each of
    them would end, after the jobs that the policy serves before it. `pools` say which devices serve it.
    """

    request: Request
    policy: Policy
    backlog: Backlog
    reservations: Reservations
    pools: Pools
    blocks: Sequence[Demand]
    ends_ns: Sequence[int]
    eta: Eta
    now_ns: int

    @staticmethod
    def of(
        request: Request,
        policy: Policy,
        costs: CostModel,
        backlog: Backlog,
        *,
        reservations: Reservations,
        eta: Eta,
        parts: Sequence[FreeAfterAhead],
    ) -> PromiseQuery:
        """`parts` as `eta.free_before` says, at least one. Raises UnknownCost."""
        start = costs.start(request)
        widest = max(map(len, nodes_within(reservations.places.nodes, costs.pools.within(request.pipeline))))
        degrees = {usable_degree(request, min(degree, widest), costs) for degree in policy.degrees(request, costs)}
        loads_ns = partial(load_bound_ns, costs=costs) if backlog.needs_loads else None
        blocks = [demand_at(request, start, degree, costs, loads_ns) for degree in degrees]
        blocks.sort(key=lambda block: (block.device_ns, block.width))
        return PromiseQuery(
            request=request,
            policy=policy,
            backlog=backlog,
            reservations=reservations,
            pools=costs.pools,
            blocks=blocks,
            ends_ns=[end_after(parts, block) for block in blocks],
            eta=eta,
            now_ns=reservations.now_ns,
        )

    @property
    def _within(self) -> Within:
        return self.pools.within(self.request.pipeline)

    def reservation(self, deadline_ns: int) -> Block | None:
        """The reservation of the cheapest block with which the deadline can be promised; None if it cannot."""
        in_time = (block for block, end_ns in zip(self.blocks, self.ends_ns, strict=True) if end_ns <= deadline_ns)
        placed = (self.reservations.place(deadline_ns, block, self._within) for block in in_time)
        return next((block for block in placed if block is not None), None)

    def earliest_ns(self) -> int:
        """The earliest deadline that could be promised, with the cheapest or the fastest block."""
        return min(self._earliest_ns(block) for block in {self.blocks[0], min(self.blocks, key=_run_ns)})

    def _earliest_ns(self, block: Demand) -> int:
        """The earliest deadline with this block. The end is predicted again for each deadline that is tried.

        A later deadline may place the request after more other jobs.
        """
        due_ns = self.now_ns
        for _ in range(_MOST_TRIED):
            due_ns = self.reservations.earliest_ns(block, due_ns, self._within)
            later = replace(self.request, deadline_ns=due_ns)
            end_ns = end_after(self.eta.free_before(later, self.policy, self.pools, self.backlog), block)
            if end_ns <= due_ns:
                break
            due_ns = end_ns
        return due_ns

    def refusal(self, deadline_ns: int, others: str) -> Reject:
        """Why the deadline cannot be promised; `others` names the jobs that are present."""
        end_ns = min(self.ends_ns)
        needed_ns = ADMISSION_MARGIN.due_ns(end_ns, self.now_ns) - end_ns
        if end_ns > deadline_ns:
            reason = f"it would be {s_from_ns(end_ns - deadline_ns):.2f} s late with {others} present"
        elif end_ns + needed_ns > deadline_ns:
            spare_s, needed_s = s_from_ns(deadline_ns - end_ns), s_from_ns(needed_ns)
            reason = f"it would end {spare_s:.2f} s before its deadline, and a promise needs {needed_s:.2f} s to spare"
        else:
            reason = f"reservations leave no room for it, with {others} present"
        return Reject(self.request.uid, reason, self.earliest_ns(), RefusalCode.DEADLINE)


def _run_ns(block: Demand) -> int:
    return block.run_ns
