"""A policy that does what a test says."""

from __future__ import annotations

from builders import PIPELINE, Idle
from stages import stage_of
from tilework.core.policy import ClusterView, CostModel
from tilework.core.request import Request
from tilework.core.work import Plan, Start


class Script(Idle):
    """A policy that returns the given plans, then empty ones."""

    def __init__(self, plans: list[Plan]) -> None:
        self.plans = iter(plans)

    def urgency_ns(self, request: Request, dropped_to_best_effort: bool, delay_ns: int = 0) -> int:
        return request.arrival_ns + (10**9 if dropped_to_best_effort else 0)

    def plan(self, view: ClusterView, costs: CostModel, now_ns: int) -> Plan:
        return next(self.plans, Plan())


def start(stage: str, *devices: int, steps: int = 1, job: int = 0) -> Start:
    return Start(stage=stage_of(PIPELINE, stage), job_ids=(job,), devices=devices, num_steps=steps, why="told to")


def run(*starts: Start) -> Plan:
    return Plan(starts=starts)
