"""First come, first served, a fixed number of GPUs per request: what diffusion servers do today (xDiT, vLLM-Omni)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from tilework.core.interfaces import ClusterView, CostModel, Demand, DeviceView
from tilework.core.progress import Cursor
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan, stages_of
from tilework.policy.registry import policy
from tilework.policy.toolkit.buddy_allocator import Allocator, nodes
from tilework.policy.toolkit.demand import demand_at, usable_degree
from tilework.policy.toolkit.fixed_groups import Choice, Lane, Slots, fill
from tilework.policy.toolkit.order import jobs_at_hand


@dataclass(slots=True, kw_only=True)
class FixedDegree:
    """Serve in order of arrival; a group of `degree` GPUs keeps a request until it is finished.

    Deadlines, weights and tenants are ignored.

    The GPUs of a node that is short of some are divided into groups as wide as they go. A request takes as many GPUs
    of its group as its pipeline was profiled for.
    """

    degree: int
    chunk_ns: int = 200 * NS_PER_MS
    _devices: Sequence[DeviceView] | None = field(default=None, init=False)
    _lanes: Sequence[Lane] = field(default=(), init=False)

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return request.arrival_ns

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        _, diffuse, _ = stages_of(request.pipeline)
        return (usable_degree(diffuse, self.degree, costs),)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        (degree,) = self.degrees(request, costs)
        return demand_at(request, left, degree, costs)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        if self._devices is not view.devices:
            if next(jobs_at_hand(view, 1), None) is None:
                return Plan()  # Thousands of devices may join before anybody comes.
            self._devices, self._lanes = view.devices, _lanes(view.devices, self.degree)
        slots = Slots(view, self._lanes, costs, self.chunk_ns)
        waiting = iter(view.waiting())

        def choose(lane: Lane) -> Choice | None:
            job, reason = slots.continued(lane), "keeps its group until it is finished"
            if job is None:
                job, reason = next(waiting, None), "has waited longest"
            return None if job is None else (job, reason + self._narrower(lane, job.request, costs))

        fill(slots, choose)
        return Plan(starts=tuple(slots.starts))

    def _narrower(self, lane: Lane, request: Request, costs: CostModel) -> str:
        """Why a request gets fewer GPUs than it should; empty if it gets them."""
        if len(lane.devices) < self.degree:
            return f"; its node has only {len(lane.devices)} GPUs left for a group"
        (profiled,) = self.degrees(request, costs)
        return "" if profiled == self.degree else f"; its pipeline was profiled for {profiled} GPUs at most"


def _lanes(devices: Sequence[DeviceView], degree: int) -> list[Lane]:
    """The GPUs of each node in groups of `degree`, aligned ones first; then of half of that, and so on."""
    by_id, lanes = {device.device_id: device for device in devices}, []
    for node in nodes(devices):
        allocator, width = Allocator([node]), degree
        while width:
            while group := allocator.take(width):
                lanes.append(Lane(tuple([by_id[device_id] for device_id in group])))
            width //= 2
    return lanes


for _degree in (1, 2, 4, 8):
    policy(f"fixed-sp{_degree}")(partial(FixedDegree, degree=_degree))
