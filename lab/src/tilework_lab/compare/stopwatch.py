"""How long the decisions of a run take: a policy that measures its plans."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import cast

from tilework.core.interfaces import ClusterView, CostModel, Policy
from tilework.core.time import NS_PER_MS
from tilework.core.work import Plan
from tilework_lab.compare.figures import nearest_rank
from tilework_lab.compare.records import Timing


class Stopwatch:
    """Measures the plans of `policy`, which is the same object, so what else it can do is still found."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.calls_ns = calls_ns = array("q")

        class Timed(type(policy)):  # type: ignore[misc]
            __slots__ = ()

            def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
                started_ns = time.perf_counter_ns()
                plan = super().plan(view, costs, now_ns)
                calls_ns.append(time.perf_counter_ns() - started_ns)
                return cast(Plan, plan)

        object.__setattr__(policy, "__class__", Timed)  # Some are frozen.


def timing_of(calls_ns: Sequence[int], wall_s: float, num_processes: int) -> Timing:
    ordered = [call_ns / NS_PER_MS for call_ns in sorted(calls_ns)] or [0.0]
    return Timing(
        num_plans=len(calls_ns),
        plan_p50_ms=round(nearest_rank(ordered, 50), 6),
        plan_p99_ms=round(nearest_rank(ordered, 99), 6),
        wall_s=round(wall_s, 3),
        num_processes=num_processes,
    )
