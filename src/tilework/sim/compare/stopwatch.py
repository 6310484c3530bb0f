"""How long the decisions of a run take: a policy that measures its plans."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tilework.core.actions import Reject
from tilework.core.graph.progress import Cursor
from tilework.core.interfaces import ClusterView, CostModel, Demand, NeedsFuture, Policy, RefusesRequests
from tilework.core.request import Request
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan
from tilework.sim.compare.figures import nearest_rank
from tilework.sim.compare.records import Timing


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect garbage between runs only: it takes an eighth of a run, and would be counted in single decisions."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Stopwatch:
    """A policy with the durations of its plans."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.calls_ns = array("q")

    def foresee(self, requests: Sequence[Request]) -> None:
        if isinstance(self._policy, NeedsFuture):
            self._policy.foresee(requests)

    def refusal(self, request: Request, costs: CostModel, now_ns: int) -> Reject | None:
        return self._policy.refusal(request, costs, now_ns) if isinstance(self._policy, RefusesRequests) else None

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return self._policy.urgency_ns(request, dropped_to_best_effort, delay_ns)

    def degrees(self, request: Request, costs: CostModel) -> Sequence[int]:
        return self._policy.degrees(request, costs)

    def demand(self, request: Request, left: Cursor, costs: CostModel) -> Demand:
        return self._policy.demand(request, left, costs)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        started_ns = time.perf_counter_ns()
        plan = self._policy.plan(view, costs, now_ns)
        self.calls_ns.append(time.perf_counter_ns() - started_ns)
        return plan


def timing_of(calls_ns: Sequence[int], wall_s: float, num_processes: int) -> Timing:
    ordered = [call_ns / NS_PER_MS for call_ns in sorted(calls_ns)] or [0.0]
    return Timing(
        num_plans=len(calls_ns),
        plan_p50_ms=round(nearest_rank(ordered, 50), 6),
        plan_p99_ms=round(nearest_rank(ordered, 99), 6),
        wall_s=round(wall_s, 3),
        num_processes=num_processes,
    )
