"""First come, first served, one device per request: what diffusion servers do today (xDiT, vLLM-Omni at degree 1)."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.core.interfaces import ClusterView, CostModel, GpuView
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan
from tilework.policy.chunks import Choice, Slots, fill
from tilework.policy.registry import policy


@policy("fixed-sp1")
@dataclass(frozen=True, slots=True, kw_only=True)
class FixedDegreeOne:
    """Serve in order of arrival; a device keeps a request until it is finished. Deadlines are ignored."""

    chunk_ns: int = 200 * NS_PER_MS

    def urgency_ns(self, request: Request, set_aside: bool) -> int:
        return request.arrival_ns

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        slots = Slots(view, costs, self.chunk_ns)
        waiting = iter(view.waiting())

        def choose(gpu: GpuView) -> Choice | None:
            if job := slots.continued(gpu):
                return job, "keeps its device until it is finished"
            job = next(waiting, None)
            return None if job is None else (job, "has waited longest")

        fill(slots, choose)
        return Plan(starts=tuple(slots.starts))
