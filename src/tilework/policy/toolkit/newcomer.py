"""A request that is not accepted yet, as a job: to ask what would happen if it were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilework.core.graph.progress import Cursor
from tilework.core.graph.stage import Stage
from tilework.core.interfaces import Block, Demand, EtaPrediction
from tilework.core.request import Request
from tilework.core.work import Group, Work

_LAST = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """A job without works; a `JobView`. It comes after all jobs with the same deadline."""

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
